"""Settings of a process that trains, the stages and corpus of its run, and its compute thread."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...models.shells.shell_opening import open_shell
from ...models.token_shards import TokenShards
from ...protocol.runs.training_run import TrainingRun
from ...protocol.spans import Span
from ..engine.training.span_building import find_embedding_and_head

Compute = Callable[[Callable[[], Any]], Awaitable[Any]]
"""Runs a function on the thread that computes, one after the other."""


@dataclass(frozen=True)
class RunPeerConfig:
    """Settings of a peer that trains."""

    run: TrainingRun
    corpus_folder: Path
    stage: int | None = None
    """The stage to hold; None: the one that needs a member most."""
    founds_run: bool = False
    """Whether to begin the run, in place of joining it."""
    num_threads: int = 1
    announce_period_seconds: float = 30.0
    silence_seconds: float = 10.0
    """How long another member may say nothing before it counts as stopped."""
    patience_seconds: float = 3.0
    """How long a leader may be silent before the next member leads."""
    linger_seconds: float = 10.0
    """How long to stay behind the last update: others may need our state."""
    pause_seconds: float = 0.2
    """How long to wait before looking again whether there is something to do."""


@dataclass(frozen=True)
class RunResources:
    """What does not change while a process trains."""

    config: RunPeerConfig
    spans: Sequence[Span]
    """The blocks of each stage."""
    architecture: str
    """The name of the model's class in transformers."""
    shards: TokenShards
    compute: Compute

    @property
    def run(self) -> TrainingRun:
        """The run that is trained."""
        return self.config.run

    @property
    def whole(self) -> Span:
        """All blocks of the model."""
        return Span(0, self.spans[-1].stop)

    @classmethod
    def open(cls, config: RunPeerConfig, compute: Compute) -> RunResources:
        """Read what a run needs on this machine. Raises UsageError."""
        shell = open_shell(config.run.model)
        embedding, _ = find_embedding_and_head(shell)
        shards = TokenShards.open(config.run.corpus, config.corpus_folder, embedding.num_embeddings)
        spans, architecture = config.run.list_stages(len(shell.layers)), type(shell.model).__name__
        return cls(config, spans, architecture, shards, compute)


def make_compute(stack: ExitStack) -> Compute:
    """Return what runs functions on one thread, which ends with the stack."""
    executor = ThreadPoolExecutor(1, "training")
    stack.callback(executor.shutdown, wait=True, cancel_futures=True)
    loop = asyncio.get_running_loop()

    def compute(function: Callable[[], Any]) -> asyncio.Future[Any]:
        return loop.run_in_executor(executor, function)

    return compute
