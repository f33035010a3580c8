"""Settings of a process that trains, the stages and corpus of its run, and its compute thread."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...models.shells.shell_opening import open_shell
from ...models.token_shards import TokenShards
from ...protocol.net.clock import Clock
from ...protocol.runs.deadlines import UsualTimes
from ...protocol.runs.run_record import RunRecord
from ...protocol.runs.training_run import TrainingRun
from ...protocol.spans import Span
from ..engine.training.numerics import describe_machine, set_num_threads
from ..engine.training.span_building import find_embedding_and_head

Compute = Callable[[Callable[[], Any]], Awaitable[Any]]
"""Runs a function on the thread that computes, one after the other."""


@dataclass(frozen=True)
class RunPeerConfig:
    """Settings of a peer that trains."""

    record: RunRecord
    corpus_folder: Path
    stages: Sequence[int] | None = None
    """The stages that it can hold, of which it gets the one with the fewest members; None: all."""
    founds_run: bool = False
    """Whether to begin the run, in place of joining it."""
    num_threads: int = 1
    graph_bytes: int = 2**30
    """The most that graphs of passes under way may take; others are computed again."""
    read_free_bytes: Callable[[], int] | None = None
    """Tells how much memory is left, of which graphs take half at most; None: they may take all."""
    announce_period_seconds: float = 30.0
    silence_seconds: float = 10.0
    """How long another member may say nothing before it counts as stopped."""
    linger_seconds: float = 10.0
    """How long to stay behind the last update: others may need our state."""
    audited_fraction: float = 0.02
    """The fraction of the parts of each stage that a second replica computes as well."""
    pause_seconds: float = 0.2
    """How long to wait before looking again whether there is something to do."""
    shards: TokenShards | None = None
    """The corpus, where it is open already."""

    @property
    def run(self) -> TrainingRun:
        """The run that is trained."""
        return self.record.run


@dataclass(frozen=True, eq=False)
class _Turn:
    """Something to compute, by the name of its function, and when that was asked for."""

    name: str
    asked_at: float


class WatchedCompute:
    """Computes one thing after the other, and notices when one takes far longer than usual."""

    def __init__(self, compute: Compute, clock: Clock, floor_seconds: float) -> None:
        """Nothing counts as late before `floor_seconds`."""
        self._compute = compute
        self._clock = clock
        self._times = defaultdict[str, UsualTimes](lambda: UsualTimes(floor_seconds))
        """By the name of the function."""
        self._waits = defaultdict[str, UsualTimes](lambda: UsualTimes(0.0))
        """How long functions waited for their turn, by their names."""
        self._waiting = deque[_Turn]()
        """What is computed now, and behind it what waits for its turn."""
        self._begun_at = 0.0

    async def __call__(self, function: Callable[[], Any]) -> Any:
        """Return the result. A computation goes on when its caller is cancelled."""
        name = getattr(getattr(function, "func", function), "__qualname__", "")
        one = _Turn(name, self._clock.now())
        self._waiting.append(one)
        if len(self._waiting) == 1:
            self._begin(one.asked_at)
        computing = asyncio.ensure_future(self._compute(function))
        computing.add_done_callback(lambda _: self._end(one, computing))
        return await asyncio.shield(computing)

    def _begin(self, now: float) -> None:
        """Note that the first in the queue is computed from now on."""
        first = self._waiting[0]
        self._waits[first.name].note(now - first.asked_at)
        self._begun_at = now

    def _end(self, one: _Turn, computing: asyncio.Future[Any]) -> None:
        now = self._clock.now()
        self._times[one.name].note(now - self._begun_at)
        self._waiting.remove(one)
        if self._waiting:
            self._begin(now)
        if not computing.cancelled():
            computing.exception()  # maybe nobody waits for it any more

    def find_usual_seconds(self, function: Callable[..., Any]) -> float:
        """Return how long a function takes, without the wait for its turn; 0: it is not known."""
        return self._times[function.__qualname__].usual_seconds

    def find_usual_wait_seconds(self, function: Callable[..., Any]) -> float:
        """Return how long a function waits for its turn; 0: it is not known."""
        return self._waits[function.__qualname__].usual_seconds

    @property
    def is_late(self) -> bool:
        """Whether what is computed now should have ended long ago."""
        if not self._waiting:
            return False
        name = self._waiting[0].name
        return self._clock.now() - self._begun_at > self._times[name].deadline_seconds


@dataclass(frozen=True)
class RunResources:
    """What does not change while a process trains."""

    config: RunPeerConfig
    spans: Sequence[Span]
    """The blocks of each stage."""
    architecture: str
    """The name of the model's class in transformers."""
    shards: TokenShards
    compute: WatchedCompute
    compute_class: str
    """The digest of what this machine computes of the run."""

    @property
    def run(self) -> TrainingRun:
        """The run that is trained."""
        return self.config.run

    @property
    def whole(self) -> Span:
        """All blocks of the model."""
        return Span(0, self.spans[-1].stop)

    @property
    def machine(self) -> str:
        """The hardware and software that decide whether others compute the same, for people."""
        return describe_machine(self.config.num_threads)

    @property
    def stages(self) -> Sequence[int]:
        """The stages that it can hold."""
        return range(len(self.spans)) if self.config.stages is None else self.config.stages

    @classmethod
    def open(
        cls, config: RunPeerConfig, compute: WatchedCompute, compute_class: str
    ) -> RunResources:
        """Read what a run needs on this machine. Raises UsageError."""
        shell = open_shell(config.run.model)
        embedding, _ = find_embedding_and_head(shell)
        shards = config.shards or TokenShards.open(
            config.run.corpus, config.corpus_folder, embedding.num_embeddings
        )
        spans, architecture = config.run.list_stages(len(shell.layers)), type(shell.model).__name__
        return cls(config, spans, architecture, shards, compute, compute_class)


def make_compute(stack: ExitStack, num_threads: int = 1, *, is_beside: bool = False) -> Compute:
    """Return a `Compute` that runs functions on one thread, which ends with the stack.

    torch divides among `num_threads` also what is computed outside of passes, such as sums.
    `is_beside`: beside what the process serves, which comes first.
    """

    def begin() -> None:
        set_num_threads(num_threads)
        if is_beside:
            _give_way()

    executor = ThreadPoolExecutor(1, "training", begin)
    stack.callback(executor.shutdown, wait=True, cancel_futures=True)
    loop = asyncio.get_running_loop()

    def compute(function: Callable[[], Any]) -> asyncio.Future[Any]:
        return loop.run_in_executor(executor, function)

    return compute


def _give_way() -> None:
    """Let the calling thread, and threads that it starts, compute in what time others leave.

    Only on Linux do threads have a priority of their own; elsewhere nothing changes.
    """
    if sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
