"""What all parts of one run share: the model, how much to measure, and swarms that run already."""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from transformers.utils import logging

from ...peer.local_swarm.swarm import LocalSwarm
from .benchmark_model import BenchmarkModel, make_benchmark_model, open_bundled_model
from .effort import Effort
from .reference import Reference

Result = TypeVar("Result")


class Setting(AbstractContextManager["Setting"]):
    """Made once per run. `say` is told what is under way. Ends its swarms when it is left.

    The reference is measured beside what is compared with it, minutes apart at most, because the
    speed of shared machines wanders; peers that wait for work meanwhile take no time from it.
    """

    def __init__(
        self, effort: Effort, uses_bundled_model: bool, say: Callable[[str], None]
    ) -> None:
        logging.disable_progress_bar()
        torch.manual_seed(0)
        torch.set_num_threads(1)
        self.effort = effort
        self.say = say
        say("making the model")
        self.tiny_model = open_bundled_model()
        self.model = self.tiny_model if uses_bundled_model else make_benchmark_model()
        self.reference = Reference(self.model, effort.num_calls)
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
        """End the peers of a model; whoever needs some gets new ones."""
        self._swarms.pop(model).close()
