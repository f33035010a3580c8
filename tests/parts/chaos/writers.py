"""Clients that write known texts all the time, and compare every token."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers.generation.streamers import BaseStreamer

from shoal.protocol.ids import PeerId

_STORIES = (
    "Once upon a time",
    "There once was a curious girl named Ella who lived in a white house beside a river.",
    "One day, Finn looked under the bed, but the kite was gone.",
    '"I have lost my kite!" she cried.',
    "Aunt Edda had made a golden kite for a kind boy named Milo. He never went to the riverbank "
    "without it. So the two friends went to look under the stone bridge. And what did they see?",
    "It was wet with dew, but as golden as ever.",
)
_LONG_STORY_REPEATS = 12
"""So often the longest of them, for a prompt that takes its time."""

LONGEST_TEXT = 200
_SHORTEST_TEXT = 20
_TEXTS_PER_VISIT = (2, 6)
"""How many texts a client writes before it leaves the swarm and comes back."""

_TWO_PARTS_SHARE = 0.4


def tell_stories(tokenizer: Any) -> list[Tensor]:
    """Return the prompts as token ids [1, T]."""
    texts = [*_STORIES, " ".join([max(_STORIES, key=len)] * _LONG_STORY_REPEATS)]
    return [tokenizer(text, return_tensors="pt").input_ids for text in texts]


def write(model: Any, prompt: Tensor | None, num_tokens: int, **settings: Any) -> Tensor:
    """Return the likeliest text of exactly so many new tokens, as generate() does."""
    return model.generate(
        prompt, max_new_tokens=num_tokens, min_new_tokens=num_tokens, do_sample=False, **settings
    )


def write_longest(reference: Any, prompts: Sequence[Tensor]) -> list[Tensor]:
    """Return the longest text of each prompt, by plain transformers and all at once."""
    length = max(prompt.shape[1] for prompt in prompts)
    missing = [length - prompt.shape[1] for prompt in prompts]
    rows = zip(prompts, missing, strict=True)
    padded = torch.cat([functional.pad(prompt, (num, 0)) for prompt, num in rows])
    mask = torch.arange(length) >= torch.tensor(missing)[:, None]
    texts = write(reference, padded, LONGEST_TEXT, attention_mask=mask.long())
    return [texts[row : row + 1, num:] for row, num in enumerate(missing)]


@dataclass(frozen=True, order=True)
class Stall:
    """The longest time for which a text did not grow, and whose text it was."""

    seconds: float = 0.0
    num_tokens: int = 0
    """How long the text was; 1 where the prompt took so long."""
    context: str = ""


@dataclass
class Tally:
    """What all writers did so far. Shared by threads; `add` takes a text at a time."""

    num_texts: int = 0
    num_tokens: int = 0
    num_failovers: int = 0
    num_visits: int = 0
    longest_stall: Stall = Stall()
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, num_tokens: int, num_failovers: int, stall: Stall) -> None:
        with self.lock:
            self.num_texts += 1
            self.num_tokens += num_tokens
            self.num_failovers += num_failovers
            self.longest_stall = max(self.longest_stall, stall)


@dataclass(frozen=True)
class Failure:
    """A text that is wrong or was not finished."""

    what: str
    peers: tuple[PeerId, ...] = ()
    """Those that had to do with it."""


@dataclass(frozen=True)
class Task:
    """What all writers write, and where."""

    connect: Callable[..., Any]
    """Opens the model with these settings of a client."""
    prompts: Sequence[Tensor]
    expected: Sequence[Tensor]
    """The longest text of each prompt."""
    name_of: Callable[[PeerId], str]
    tell_time: Callable[[], str]
    stop: threading.Event
    """Set at the end, or by the first failure."""
    token_seconds: float = 0.0
    """How long to wait behind each token, until told to stop."""


class Writer(threading.Thread):
    """One client: joins, writes some texts, leaves, and joins again, until it is told to stop."""

    def __init__(self, number: int, seed: int, task: Task, tally: Tally) -> None:
        super().__init__(name=f"client {number + 1}", daemon=True)
        self.failure: Failure | None = None
        self._delivery = "star" if number % 2 else "chain"
        self._has_standbys = number % 4 >= 2
        self._rng = Random(f"{seed} {number}")
        self._task = task
        self._tally = tally
        self._model: Any = None
        self._session: Any = None
        self._begun_at = time.monotonic()

    def run(self) -> None:
        """Write until told to stop; the first failure stops everybody."""
        while not self._task.stop.is_set():
            try:
                self._visit()
            except Exception:  # noqa: BLE001 - whatever it is, it is the finding
                self._fail(traceback.format_exc())

    @property
    def doing(self) -> str:
        """Where the session stands, for whoever wonders why nothing happens."""
        seconds = time.monotonic() - self._begun_at
        how = f"{self._delivery}, with standbys" if self._has_standbys else self._delivery
        return f"{self.name} ({how}), for {seconds:.1f} s: {self._session!r}"

    def _visit(self) -> None:
        with self._tally.lock:
            self._tally.num_visits += 1
        self._begun_at = time.monotonic()
        settings = {"delivery": self._delivery, "standby": self._has_standbys}
        with self._task.connect(**settings, seed=self._rng.randrange(2**32)) as self._model:
            for _ in range(self._rng.randint(*_TEXTS_PER_VISIT)):
                if not self._task.stop.is_set():
                    self._write_one()

    def _write_one(self) -> None:
        index = self._rng.randrange(len(self._task.prompts))
        num_tokens = self._rng.randint(_SHORTEST_TEXT, LONGEST_TEXT)
        prompt = self._task.prompts[index]
        expected = self._task.expected[index][:, : prompt.shape[1] + num_tokens]
        self._begun_at = time.monotonic()
        watch = _Watch(self._task.token_seconds, self._task.stop)
        max_length = prompt.shape[1] + LONGEST_TEXT
        with self._model.inference_session(max_length=max_length) as self._session:
            try:
                text = self._write(prompt, num_tokens, watch)
            except Exception:  # noqa: BLE001 - and the session still knows its hops
                self._fail(traceback.format_exc())
                return
            if not torch.equal(text, expected):
                self._fail(_compare(prompt, text, expected))
            stall = watch.find_stall(self._describe_failovers())
            self._tally.add(num_tokens, len(self._session.failovers), stall)

    def _write(self, prompt: Tensor, num_tokens: int, watch: _Watch) -> Tensor:
        """Return a text that was written at once, or in two parts in one session."""
        if self._rng.random() >= _TWO_PARTS_SHARE:
            return write(self._model, prompt, num_tokens, streamer=watch)
        num_first = num_tokens // 2
        first = write(self._model, prompt, num_first, streamer=watch)
        rest = write(self._model, None, num_tokens - num_first, streamer=watch)
        return torch.cat([first, rest], dim=1)

    def _fail(self, what: str) -> None:
        """Take down what is known at this moment, and stop everybody."""
        lines = [f"{self._task.tell_time()}, {self.doing}", what]
        peers: list[PeerId] = []
        if self._session is not None:
            lines.append(self._describe_failovers())
            hops = [*self._session.hops]
            for failover in self._session.failovers:
                hops += [failover.lost, *failover.replacements]
            peers = [hop.peer.peer_id for hop in hops]
        if self._model is not None:
            lines.append(self._describe_view())
        self.failure = self.failure or Failure("\n".join(lines), tuple(dict.fromkeys(peers)))
        self._task.stop.set()

    def _describe_failovers(self) -> str:
        name_of = self._task.name_of
        route = [f"{name_of(hop.peer.peer_id)} {hop.span}" for hop in self._session.hops]
        lines = [f"{self.name}, {self._delivery} over {', '.join(route)}"]
        for failover in self._session.failovers:
            found = [name_of(hop.peer.peer_id) for hop in failover.replacements]
            lines.append(
                f"at {failover.position} {name_of(failover.lost.peer.peer_id)}, for it "
                f"{', '.join(found)} within {failover.seconds:.1f} s: {failover.reason}"
            )
        return "\n".join(lines)

    def _describe_view(self) -> str:
        """Return what the client knows of the swarm."""
        swarm = self._model._client.swarm
        known = [
            f"{self._task.name_of(peer.peer_id)} {peer.state}"
            + " (avoided)" * swarm.book.is_quarantined(peer)
            for peer in swarm.book.view.peers
        ]
        return f"it knows {', '.join(known) or 'nobody'}"


def _compare(prompt: Tensor, text: Tensor, expected: Tensor) -> str:
    if text.shape != expected.shape:
        return f"{text.shape[1]} tokens instead of {expected.shape[1]}"
    first = int((text != expected).nonzero()[0, 1])
    return (
        f"token {first} is {int(text[0, first])} instead of {int(expected[0, first])}, the first "
        f"that is wrong behind a prompt of {prompt.shape[1]} tokens, of {text.shape[1]}"
    )


class _Watch(BaseStreamer):
    """Notes when tokens come. A prompt comes before them, at once, and counts as one."""

    def __init__(self, token_seconds: float, stop: threading.Event) -> None:
        self._token_seconds = token_seconds
        self._stop = stop
        self._times = [time.monotonic()]

    def put(self, value: Tensor) -> None:
        self._times.append(time.monotonic())
        self._stop.wait(self._token_seconds)

    def find_stall(self, context: str) -> Stall:
        gaps = [(end - begin) for begin, end in pairwise(self._times)]
        longest = max(gaps)
        return Stall(longest, gaps.index(longest), context)

    def end(self) -> None:
        return
