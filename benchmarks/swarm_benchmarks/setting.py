"""What all parts of one run share: how much to measure, the model, and swarms that run already."""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from transformers.utils import logging

from measuring.benchmark_model import BenchmarkModel, make_benchmark_model, open_bundled_model
from measuring.reference import Reference
from shoal.peer.local_swarm.swarm import LocalSwarm
from swarm_benchmarks.curve import SessionsCurve

Result = TypeVar("Result")


@dataclass(frozen=True)
class Effort:
    """How much is measured: enough for figures that one may quote. Lengths are in tokens."""

    num_calls: int = 3
    """Of how many calls the median is taken where one call takes long."""

    num_steps: int = 100
    """The same for steps of one token."""

    load_seconds: float = 5.0
    """How long many sessions step at once."""

    num_generated: int = 64
    """Tokens of one text."""

    session_counts: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    """How many sessions there are at once, in turn."""

    prompts: tuple[int, ...] = (128, 512, 1024)
    """Lengths of prompts."""

    long_prompt: int = 4096
    """The prompt that somebody else's first token has to pass."""

    contexts: tuple[int, int] = (100, 4000)
    """A short and a long text to decode behind."""

    maximum: int = 8000
    """Length of the sessions whose memory is measured."""

    lengths: tuple[int, int] = (100, 1000)
    """How far such sessions are used."""

    num_flooding: int = 32
    """Sessions of the client that floods the peers."""

    p2pd_attack_seconds: float = 300.0
    """How long p2pd is attacked."""

    texts: tuple[int, int] = (8, 256)
    """Rows of a batch to train on, and their length."""


QUICK = Effort(
    num_calls=1,
    num_steps=10,
    load_seconds=0.2,
    num_generated=8,
    session_counts=(1, 8, 16),
    prompts=(32, 512),
    long_prompt=512,
    contexts=(20, 400),
    maximum=1000,
    lengths=(100, 500),
    num_flooding=4,
    p2pd_attack_seconds=3.0,
    texts=(4, 32),
)
"""Only to see that everything runs."""


class Setting(AbstractContextManager["Setting"]):
    """Made once per run. `say` is told what is under way. Ends its swarms when it is left.

    The reference is measured beside what is compared with it, minutes apart at most, because the
    speed of shared machines wanders; peers that wait for work meanwhile take no time from it.
    """

    def __init__(self, is_quick: bool, say: Callable[[str], None]) -> None:
        logging.disable_progress_bar()
        torch.manual_seed(0)
        torch.set_num_threads(1)
        self.effort = QUICK if is_quick else Effort()
        self.say = say
        self.curve: SessionsCurve | None = None
        """What the part `sessions` found, to be drawn."""
        say("making the model")
        self.tiny_model = open_bundled_model()
        self.model = self.tiny_model if is_quick else make_benchmark_model()
        self.reference = Reference(self.model, self.effort.num_calls)
        self._swarms: dict[BenchmarkModel, LocalSwarm] = {}
        # One for all parts: gRPC may still have something to tell the loop of an earlier one.
        # Not uvloop: it forks in a way that gRPC's threads do not survive, and joining a swarm
        # starts a daemon.
        self._runner = asyncio.Runner()

    def __exit__(self, *exception: object) -> None:
        for model in list(self._swarms):
            self.end_swarm(model)
        self._runner.close()

    def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Run on the loop that all parts share: asyncio's own, as a client has it."""
        return self._runner.run(coroutine)

    def start_swarm(self, model: BenchmarkModel) -> LocalSwarm:
        """Return two peers that share the blocks of a model, int8, one thread each.

        They are started once and stay for the parts that follow.
        """
        if model not in self._swarms:
            self.say("starting peers")
            swarm = LocalSwarm(model.directory, spans=model.halves, weights="int8")
            self._swarms[model] = swarm.__enter__()  # ends what it began if that fails
        return self._swarms[model]

    def end_swarm(self, model: BenchmarkModel) -> None:
        """End the peers of a model; parts that need some get new ones."""
        self._swarms.pop(model).close()
