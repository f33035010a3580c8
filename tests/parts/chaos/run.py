"""A swarm, clients and a plan, all at once; and what came out."""

from __future__ import annotations

import contextlib
import functools
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chaos.aftermath import check_nothing_is_held, measure_room
from chaos.halves import plan_halves
from chaos.leftovers import Leftovers, put_temporary_files_in
from chaos.live_swarm import LiveSwarm
from chaos.plan import Action, plan_chaos
from chaos.stranger import Stranger
from chaos.writers import LONGEST_TEXT, Tally, Task, Writer, tell_stories, write, write_longest
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from shoal.cli.options.bundled_model import find_model
from shoal.client import AutoDistributedModelForCausalLM
from shoal.peer.local_swarm.swarm import PeerProcessError
from shoal.protocol.errors import UsageError
from shoal.protocol.spans import Span

Say = Callable[[str], None]

PLANS = {"mixed": plan_chaos, "halves": plan_halves}
"""What is done, by the name of it."""

_LAST_TEXTS_SECONDS = 90.0
"""How long clients may take to finish their texts after the last action."""


@dataclass(frozen=True)
class Setting:
    """What kind of chaos."""

    seed: int
    seconds: float
    spans: Sequence[Span]
    num_clients: int = 4
    weights: str = "fp32"
    kind: str = "mixed"
    token_seconds: float = 0.0
    """How long a client takes to read a token; 0 writes as fast as it can."""
    model: str = field(default_factory=find_model)

    def plan(self) -> list[Action]:
        """Return what is to be done."""
        return PLANS[self.kind](self.seed, self.seconds, self.spans)


@dataclass
class Outcome:
    """What was done, and what it did."""

    setting: Setting
    done: list[Action] = field(default_factory=list)
    tally: Tally = field(default_factory=Tally)
    failures: list[str] = field(default_factory=list)
    """With all that helps to find the cause; empty when everything is as undisturbed."""
    attacks: Counter[str] = field(default_factory=Counter[str])
    """How often the stranger did what."""
    num_left_out: int = 0
    """Actions that a swarm which was late had no time left for."""

    @property
    def counts(self) -> Counter[str]:
        """How often each kind of action took place."""
        return Counter(action.kind.value for action in self.done)


def run_chaos(setting: Setting, say: Say) -> Outcome:
    """Carry out the plan of a seed while clients write; raises nothing that the chaos caused."""
    outcome = Outcome(setting)
    with tempfile.TemporaryDirectory(prefix="shoal-chaos-") as folder:
        keys, temporary = Path(folder, "keys"), Path(folder, "tmp")
        keys.mkdir()
        temporary.mkdir()
        with put_temporary_files_in(temporary):
            prompts = tell_stories(AutoTokenizer.from_pretrained(setting.model))
            expected = _write_with_transformers(setting, prompts)
            leftovers = Leftovers(temporary)
            _Run(setting, outcome, leftovers, say).run(keys, prompts, expected)
            outcome.failures += [f"left behind: {thing}" for thing in leftovers.find()]
    return outcome


class _Run:
    """One run, from the start of the swarm to its end."""

    def __init__(self, setting: Setting, outcome: Outcome, leftovers: Leftovers, say: Say) -> None:
        self._setting = setting
        self._outcome = outcome
        self._leftovers = leftovers
        self._say = say
        self._stop = threading.Event()

    def run(self, keys: Path, prompts: list[Tensor], expected: list[Tensor]) -> None:
        setting = self._setting
        self._say(f"Starting {len(setting.spans)} peers ...")
        with LiveSwarm(setting.model, setting.spans, setting.weights, keys) as swarm:
            connect = functools.partial(_connect, setting.model, swarm)
            with connect(delivery="star") as model:
                room = measure_room(model)
                expected = expected or [write(model, prompt, LONGEST_TEXT) for prompt in prompts]
                model_id = model._client.view_swarm().model_id
            task = Task(
                connect,
                prompts,
                expected,
                swarm.name_of,
                lambda: f"behind action {len(self._outcome.done)}",
                self._stop,
                setting.token_seconds,
            )
            writers = [
                Writer(number, setting.seed, task, self._outcome.tally)
                for number in range(setting.num_clients)
            ]
            num_blocks = max(span.stop for span in setting.spans)
            with Stranger(setting.seed, model_id, num_blocks, swarm.initial_peers) as stranger:
                for writer in writers:
                    writer.start()
                with self._noting_failures(swarm, writers):
                    self._carry_out(swarm)
                with self._noting_failures(swarm, writers):
                    self._finish(swarm, stranger, writers, room)
            self._leftovers.note_processes()
            self._say("Ending the swarm ...")

    def _carry_out(self, swarm: LiveSwarm) -> None:
        """Do everything at its time, or later where the swarm was not ready for it.

        What was not begun when the time is over is left out.
        """
        setting = self._setting
        first = time.monotonic()
        late = 0.0
        end = setting.seconds
        for action in setting.plan():
            if action.at + late > setting.seconds:
                end = min(end, action.at)
            if (action.at if action.begun_at is None else action.begun_at) >= end:
                self._outcome.num_left_out += 1
                continue
            if self._stop.wait(max(0.0, first + late + action.at - time.monotonic())):
                return
            self._leftovers.note_processes()
            self._say(str(action))
            swarm.check_peers()
            swarm.do(action)
            self._outcome.done.append(action)
            late = max(late, time.monotonic() - first - action.at)

    def _finish(
        self,
        swarm: LiveSwarm,
        stranger: Stranger,
        writers: Sequence[Writer],
        room: Mapping[int, int],
    ) -> None:
        has_failed = self._stop.is_set()
        self._say("Waiting for the last texts ...")
        self._stop.set()
        deadline = time.monotonic() + _LAST_TEXTS_SECONDS
        for writer in writers:
            writer.join(max(0.0, deadline - time.monotonic()))
            if writer.is_alive():
                raise PeerProcessError(f"a text does not come to its end: {writer.doing}")
        if has_failed:
            return
        self._outcome.attacks = stranger.leave()
        self._say("Waiting until peers hold nothing any more ...")
        swarm.check_peers()
        swarm.wait_for_leavers()
        with _connect(self._setting.model, swarm, delivery="star") as model:
            check_nothing_is_held(swarm, model, room)

    @contextlib.contextmanager
    def _noting_failures(self, swarm: LiveSwarm, writers: Sequence[Writer]) -> Iterator[None]:
        concerned: set[str] = set()
        failures = self._outcome.failures
        try:
            yield
        except (PeerProcessError, UsageError) as error:
            failures.append(str(error))
            concerned |= set(swarm.names)
        for writer in writers:
            if writer.failure is not None:
                failures.append(writer.failure.what)
                concerned |= {swarm.name_of(peer) for peer in writer.failure.peers}
                writer.failure = None
        failures += [swarm.show_log(name) for name in swarm.names if name in concerned]


def _write_with_transformers(setting: Setting, prompts: Sequence[Tensor]) -> list[Tensor]:
    """Return what the same weights write without a swarm; nothing for rounded weights."""
    if setting.weights != "fp32":
        return []
    reference = AutoModelForCausalLM.from_pretrained(setting.model, dtype="float32")
    return write_longest(reference, prompts)


def _connect(model: str, swarm: LiveSwarm, **settings: Any) -> Any:
    return AutoDistributedModelForCausalLM.from_pretrained(
        model,
        initial_peers=swarm.initial_peers,
        # int8 peers get 16 bits otherwise, rounded wherever one hop ends: a hop that is replaced by
        # two would round in one more place.
        wire_dtype="fp32",
        **settings,
    )
