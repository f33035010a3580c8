"""Loads spans of one model, measures them, and has them ready to be served."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

import torch

from ...protocol.errors import ModelError, ShoalError
from ...protocol.net.clock import Clock
from ...protocol.spans import Span
from ..engine.blocks.batch import HostedBlock
from ..engine.compute_thread import ComputeCounts, ComputeThread
from ..engine.engine import Engine
from ..engine.loading.block_cache import open_block_cache
from ..engine.loading.engine_loader import load_engine
from ..engine.training.numerics import set_num_threads
from ..process.config import PeerConfig
from .hosted_model import RESERVE_BYTES, HostedModel
from .throughput import Throughput, measure_between_work, measure_throughput

ReportLoading = Callable[[int, int], None]

_LOAD_ERRORS = (ShoalError, OSError, MemoryError, RuntimeError)
"""Errors of disks, downloads, files and memory; torch reports the last as RuntimeError."""


class LoadError(ModelError):
    """Blocks could not be loaded: `blocks`, or one of them."""

    def __init__(self, detail: str, blocks: Collection[int]) -> None:
        super().__init__(detail)
        self.blocks = frozenset(blocks)


@dataclass
class ServedSpan:
    """A span that is loaded, and what was measured of it."""

    engine: Engine
    compute: ComputeThread
    throughput: Throughput
    """The newest that was told."""
    work: float
    """The cost of a step in all of its blocks; the average block of the model costs 1."""
    load_seconds: float
    """Seconds that loading one block took; 0 if all were loaded already."""
    began_at: float
    """Seconds of the peer's clock."""

    @property
    def span(self) -> Span:
        return self.engine.span

    @property
    def blocks_per_second(self) -> float:
        """Measured steps of one token through one block of average cost."""
        return self.throughput.decode_steps_per_second * self.work


class SpanLoader:
    """Loads spans of one model and serves them, one after the other."""

    def __init__(self, model: HostedModel, clock: Clock) -> None:
        self.model = model
        self.counts = ComputeCounts()
        """What is computed in all of the spans."""
        self._clock = clock
        self._num_threads = model.config.num_threads or torch.get_num_threads()

    @classmethod
    def open(cls, config: PeerConfig, clock: Clock) -> SpanLoader:
        """Open the model that a peer was told; raises what `HostedModel.open` does."""
        return cls(HostedModel.open(config), clock)

    @asynccontextmanager
    async def serve(
        self, span: Span, kept: Mapping[int, HostedBlock], report_loading: ReportLoading
    ) -> AsyncGenerator[ServedSpan]:
        """Load what is not `kept` of a span, by block, and have it ready to be served.

        Raises LoadError if it cannot be loaded.
        """
        started_at = self._clock.now()
        missing = _find_missing(span, kept)
        engine = await self._load(span, kept, report_loading)
        load_seconds = (self._clock.now() - started_at) / len(missing) if missing else 0.0
        compute = self.make_compute_thread(engine)
        compute.counts = self.counts
        async with compute:
            await compute.call(partial(set_num_threads, self._num_threads))
            throughput = await self._measure(compute, engine, missing)
            work = sum(self.model.sizes.work[span.start : span.stop])
            now = self._clock.now()
            yield ServedSpan(engine, compute, throughput, work, load_seconds, now)

    def load(
        self,
        span: Span,
        kept: Mapping[int, HostedBlock],
        on_progress: Callable[[int, int], None],
    ) -> Engine:
        """Load the blocks of a span that are not `kept`. Takes long: run it on a thread."""
        return load_engine(
            self.model.checkpoint,
            span,
            self.model.numerics.weights,
            device=self.model.numerics.device,
            kv_budget_bytes=self.model.config.kv_budget_bytes,
            num_threads=self.model.config.num_threads,
            on_progress=on_progress,
            cache=open_block_cache(self.model.config.block_cache_bytes),
            kept=kept,
        )

    def make_compute_thread(self, engine: Engine) -> ComputeThread:
        """Return the thread that computes an engine's blocks; it is not started yet."""
        return ComputeThread(engine)

    def measure(self, engine: Engine) -> Throughput:
        """Return how fast an engine is; runs on its compute thread."""
        return measure_throughput(engine)

    async def measure_again(
        self, served: ServedSpan, is_idle: Callable[[], bool]
    ) -> Throughput | None:
        """Measure a span that is served, unless there is work; see `measure_between_work`."""
        return await measure_between_work(served.compute, served.engine, is_idle)

    def keep_blocks(self, engine: Engine, span: Span) -> dict[int, HostedBlock]:
        """Return the blocks of an engine to hold on to while a peer moves to another span.

        All of them, where memory allows it, so that the peer can go back if the other span cannot
        be loaded.
        """
        kept = engine.keep_blocks(span)
        needed_bytes = self._count_bytes_to_load(_find_missing(span, kept))
        if needed_bytes + RESERVE_BYTES <= self.model.read_free_bytes():
            return engine.keep_blocks(engine.span)
        return kept

    def check_room(self, span: Span, kept: Mapping[int, HostedBlock]) -> None:
        """Raise LoadError unless there is memory for what is not `kept` of a span.

        The system would end the process that takes more, and a device refuse it.
        """
        missing = _find_missing(span, kept)
        needed_bytes = self._count_bytes_to_load(missing)
        free_bytes = self.model.read_free_bytes()
        if needed_bytes > free_bytes:
            raise LoadError(
                f"blocks {span} need another {needed_bytes / 2**20:,.0f} MiB, but only "
                f"{free_bytes / 2**20:,.0f} MiB are free",
                missing,
            )

    def _count_bytes_to_load(self, blocks: Collection[int]) -> int:
        sizes = self.model.sizes
        return sizes.loading_bytes + sum(sizes.num_bytes[block] for block in blocks)

    async def _measure(
        self, compute: ComputeThread, engine: Engine, missing: Collection[int]
    ) -> Throughput:
        throughput = await compute.call(lambda: self._measure_if_possible(engine))
        if throughput is None:
            raise LoadError(
                f"{engine.device.torch_device} has memory for blocks {engine.span}, but not "
                "for steps through them; serve fewer blocks (--num-blocks), or give sessions less "
                "memory (--kv-memory)",
                missing,
            )
        return throughput

    def _measure_if_possible(self, engine: Engine) -> Throughput | None:
        """Return None if the memory is too small.

        The error ends here: its traceback would hold on to the engine, and the way back needs the
        room.
        """
        try:
            return self.measure(engine)
        except torch.OutOfMemoryError:
            return None

    async def _load(
        self, span: Span, kept: Mapping[int, HostedBlock], report_loading: ReportLoading
    ) -> Engine:
        loop = asyncio.get_running_loop()
        is_wanted = True
        block = span.start

        def on_progress(num_done: int, num_blocks: int) -> None:
            nonlocal block
            if not is_wanted:
                raise asyncio.CancelledError  # ends the loading thread
            block = min(span.start + num_done, span.stop - 1)
            loop.call_soon_threadsafe(report_loading, num_done, num_blocks)

        try:
            return await asyncio.to_thread(self.load, span, kept, on_progress)
        except _LOAD_ERRORS as error:
            reason = str(error) or "there is too little memory"  # a MemoryError says nothing
            raise LoadError(f"block {block} cannot be loaded: {reason}", [block]) from error
        finally:
            is_wanted = False


def _find_missing(span: Span, kept: Mapping[int, HostedBlock]) -> set[int]:
    return set(range(span.start, span.stop)) - kept.keys()
