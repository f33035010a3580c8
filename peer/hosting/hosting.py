"""What a peer has while it serves one span: blocks, a compute thread, and sessions."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import torch

from ...kernels.linear.quantize import WeightFormat
from ...models.checkpoints.checkpoint import Checkpoint
from ...models.spec_reader import read_spec
from ...models.specs.model_spec import ModelShape
from ...protocol.errors import ModelError, ShoalError
from ...protocol.ids import ModelId, PeerId, make_model_id
from ...protocol.net.clock import Clock
from ...protocol.spans import Span
from ..accounts.adapter_budget import choose_adapter_bytes
from ..accounts.block_sizes import BlockSizes
from ..accounts.memory import RESERVE_BYTES, read_free_bytes
from ..accounts.pass_budget import choose_pass_bytes
from ..engine.blocks.cuda_device import choose_device
from ..engine.blocks.numerics import Numerics
from ..engine.compute_thread import ComputeThread
from ..engine.engine import Engine, HostedBlock, check_kv_budget
from ..engine.loading.block_cache import open_block_cache
from ..engine.loading.loader import check_span, check_weights
from ..pushing.neighbours import Neighbours
from ..runtime.config import PeerConfig
from ..streams.service import Service, ServiceFacts
from .throughput import Throughput, measure_throughput

ReportLoading = Callable[[int, int], None]

_LOAD_ERRORS = (ShoalError, OSError, MemoryError, RuntimeError)
"""What disks, downloads, files and a lack of memory end in; torch says the last by RuntimeError."""


class LoadError(ModelError):
    """Blocks could not be loaded: `blocks`, or one of them."""

    def __init__(self, detail: str, blocks: Collection[int]) -> None:
        super().__init__(detail)
        self.blocks = frozenset(blocks)


@dataclass(frozen=True)
class HostedModel:
    """The model of a peer, checked against what the peer was told; nothing of it is loaded."""

    checkpoint: Checkpoint
    model_id: ModelId
    spec: ModelShape
    numerics: Numerics
    sizes: BlockSizes
    pass_bytes: int
    """Memory for passes."""
    adapter_bytes: int
    """Memory for adapters."""

    @classmethod
    def open(cls, config: PeerConfig) -> "HostedModel":
        """Read what the model is. Raises UsageError for what the peer cannot serve of it."""
        checkpoint = Checkpoint.open(config.model)
        spec = read_spec(checkpoint.config)
        span = config.span or Span(0, min(config.num_blocks or 1, spec.num_blocks))
        numerics = Numerics(WeightFormat(config.weights), choose_device(config.device))
        check_span(spec, span)
        check_weights(spec, numerics)
        check_kv_budget(spec, span, numerics, config.kv_budget_bytes)
        model_id = make_model_id(checkpoint.config, checkpoint.revision)
        sizes = BlockSizes.of_model(spec, numerics.weights)
        free_bytes = _read_free_bytes(numerics)
        pass_bytes, adapter_bytes = config.pass_bytes, config.adapter_bytes
        if pass_bytes is None:
            pass_bytes = choose_pass_bytes(free_bytes)
        if adapter_bytes is None:
            adapter_bytes = choose_adapter_bytes(free_bytes)
        return cls(checkpoint, model_id, spec, numerics, sizes, pass_bytes, adapter_bytes)

    def read_free_bytes(self) -> int:
        """Return the memory that is left where the blocks are computed."""
        return _read_free_bytes(self.numerics)


@dataclass(frozen=True)
class Stay:
    """A span that is being served."""

    engine: Engine
    service: Service
    throughput: Throughput
    work: float
    """What a step costs in all of its blocks, where the average block of the model costs 1."""
    load_seconds: float
    """What loading one block took; 0 if all were there already."""
    began_at: float
    """Seconds of the peer's clock."""

    @property
    def compute(self) -> ComputeThread:
        return self.service.compute

    @property
    def blocks_per_second(self) -> float:
        """Measured steps of one token through one block of average cost."""
        return self.throughput.decode_steps_per_second * self.work


class Hosting:
    """Loads spans of one model and serves them, one after the other."""

    def __init__(
        self,
        config: PeerConfig,
        model: HostedModel,
        peer_id: PeerId,
        clock: Clock,
        neighbours: Neighbours,
    ) -> None:
        self._config = config
        self._model = model
        self._facts = ServiceFacts(
            peer_id,
            model.model_id,
            config.max_sessions,
            config.session_idle_seconds,
            model.pass_bytes,
            model.adapter_bytes,
        )
        self._clock = clock
        self._neighbours = neighbours

    @asynccontextmanager
    async def serve(
        self, span: Span, kept: Mapping[int, HostedBlock], report_loading: ReportLoading
    ) -> AsyncGenerator[Stay]:
        """Load what is not `kept` of a span, by block, and have it ready to be served.

        In the end no stream and no session of it is left. Raises LoadError if it cannot be loaded.
        """
        started_at = self._clock.now()
        missing = _find_missing(span, kept)
        async with AsyncExitStack() as stack:
            engine = await self._load(span, kept, report_loading)
            load_seconds = (self._clock.now() - started_at) / len(missing) if missing else 0.0
            compute = await stack.enter_async_context(
                ComputeThread(engine, self._config.token_budget)
            )
            throughput = await self._measure(compute, engine, missing)
            service = Service(self._facts, engine, compute, self._clock, self._neighbours)
            service.read_free_bytes = self._model.read_free_bytes
            stack.push_async_callback(service.hang_up)
            work = sum(self._model.sizes.work[span.start : span.stop])
            yield Stay(engine, service, throughput, work, load_seconds, self._clock.now())

    def keep_blocks(self, engine: Engine, span: Span) -> dict[int, HostedBlock]:
        """Return the blocks of an engine to hold on to while a peer moves to another span.

        All of them, where memory allows it, so that the peer can go back if the other span cannot
        be loaded.
        """
        kept = engine.keep_blocks(span)
        needed_bytes = self._count_bytes_to_load(_find_missing(span, kept))
        if needed_bytes + RESERVE_BYTES <= self._model.read_free_bytes():
            return engine.keep_blocks(engine.span)
        return kept

    def check_room(self, span: Span, kept: Mapping[int, HostedBlock]) -> None:
        """Raise LoadError unless there is memory for what is not `kept` of a span.

        The system would end the process that takes more, and a device refuse it.
        """
        missing = _find_missing(span, kept)
        needed_bytes = self._count_bytes_to_load(missing)
        free_bytes = self._model.read_free_bytes()
        if needed_bytes > free_bytes:
            raise LoadError(
                f"blocks {span} need another {needed_bytes / 2**20:,.0f} MiB, but only "
                f"{free_bytes / 2**20:,.0f} MiB are free",
                missing,
            )

    def _count_bytes_to_load(self, blocks: Collection[int]) -> int:
        sizes = self._model.sizes
        return sizes.loading_bytes + sum(sizes.num_bytes[block] for block in blocks)

    async def _measure(
        self, compute: ComputeThread, engine: Engine, missing: Collection[int]
    ) -> Throughput:
        throughput = await compute.call(lambda: _measure_if_possible(engine))
        if throughput is None:
            raise LoadError(
                f"{self._model.numerics.device.place} has memory for blocks {engine.span}, but not "
                "for steps through them; serve fewer blocks (--num-blocks), or give sessions less "
                "memory (--kv-memory)",
                missing,
            )
        return throughput

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

        config = self._config
        try:
            return await asyncio.to_thread(
                Engine.load,
                self._model.checkpoint,
                span,
                self._model.numerics.weights,
                device=self._model.numerics.device,
                kv_budget_bytes=config.kv_budget_bytes,
                num_threads=config.num_threads,
                on_progress=on_progress,
                cache=open_block_cache(config.block_cache_bytes),
                kept=kept,
            )
        except _LOAD_ERRORS as error:
            reason = str(error) or "there is too little memory"  # a MemoryError says nothing
            raise LoadError(f"block {block} cannot be loaded: {reason}", [block]) from error
        finally:
            is_wanted = False


def _read_free_bytes(numerics: Numerics) -> int:
    device_bytes = numerics.device.read_free_bytes()
    return read_free_bytes() if device_bytes is None else device_bytes


def _measure_if_possible(engine: Engine) -> Throughput | None:
    """Return None if the memory is too small.

    The error ends here: its traceback would hold on to the engine, and the way back needs the room.
    """
    try:
        return measure_throughput(engine)
    except torch.OutOfMemoryError:
        return None


def _find_missing(span: Span, kept: Mapping[int, HostedBlock]) -> set[int]:
    return set(range(span.start, span.stop)) - kept.keys()
