"""What a peer has while it serves one span: blocks, a compute thread, and sessions."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from ..kernels.checkpoint import Checkpoint
from ..kernels.quantize import WeightFormat
from ..protocol.ids import ModelId, PeerId, make_model_id
from ..protocol.net.clock import Clock
from ..protocol.spans import Span
from .config import PeerConfig
from .engine.block_cache import open_block_cache
from .engine.compute_thread import ComputeThread
from .engine.engine import Engine, HostedBlock, check_kv_budget
from .engine.families import read_spec
from .engine.loader import check_span, check_weights, open_checkpoint
from .engine.spec import ModelShape
from .neighbours import Neighbours
from .service import Service, ServiceFacts
from .throughput import Throughput, measure_throughput

ReportLoading = Callable[[int, int], None]


@dataclass(frozen=True)
class HostedModel:
    """The model of a peer, checked against what the peer was told; nothing of it is loaded."""

    checkpoint: Checkpoint
    model_id: ModelId
    spec: ModelShape

    @classmethod
    def open(cls, config: PeerConfig) -> "HostedModel":
        """Read what the model is. Raises UsageError for what the peer cannot serve of it."""
        checkpoint = open_checkpoint(config.model)
        spec = read_spec(checkpoint.config)
        span = config.span or Span(0, min(config.num_blocks or 1, spec.num_blocks))
        weights = WeightFormat(config.weights)
        check_span(spec, span)
        check_weights(spec, weights)
        check_kv_budget(spec, span, weights, config.kv_budget_bytes)
        return cls(checkpoint, make_model_id(checkpoint.config, checkpoint.revision), spec)


@dataclass(frozen=True)
class Stay:
    """A span that is being served."""

    engine: Engine
    service: Service
    throughput: Throughput
    load_seconds: float
    """What loading one block took; 0 if all were there already."""
    began_at: float
    """Seconds of the peer's clock."""

    @property
    def compute(self) -> ComputeThread:
        return self.service.compute

    @property
    def blocks_per_second(self) -> float:
        """Measured steps of one token through one block."""
        return self.throughput.decode_steps_per_second * len(self.engine.span)


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
            peer_id, model.model_id, config.max_sessions, config.session_idle_seconds
        )
        self._clock = clock
        self._neighbours = neighbours

    @asynccontextmanager
    async def serve(
        self, span: Span, kept: Mapping[int, HostedBlock], report_loading: ReportLoading
    ) -> AsyncGenerator[Stay]:
        """Load what is not `kept` of a span, by block, and have it ready to be served.

        In the end no stream and no session of it is left.
        """
        started_at = self._clock.now()
        engine = await self._load(span, kept, report_loading)
        num_loaded = len(set(range(span.start, span.stop)) - kept.keys())
        load_seconds = (self._clock.now() - started_at) / max(1, num_loaded) if num_loaded else 0.0
        async with ComputeThread(engine, self._config.token_budget) as compute:
            throughput = await compute.call(lambda: measure_throughput(engine))
            service = Service(self._facts, engine, compute, self._clock, self._neighbours)
            try:
                yield Stay(engine, service, throughput, load_seconds, self._clock.now())
            finally:
                await service.hang_up()

    async def _load(
        self, span: Span, kept: Mapping[int, HostedBlock], report_loading: ReportLoading
    ) -> Engine:
        loop = asyncio.get_running_loop()
        is_wanted = True

        def on_progress(num_done: int, num_blocks: int) -> None:
            if not is_wanted:
                raise asyncio.CancelledError  # ends the loading thread
            loop.call_soon_threadsafe(report_loading, num_done, num_blocks)

        config = self._config
        try:
            return await asyncio.to_thread(
                Engine.load,
                self._model.checkpoint,
                span,
                WeightFormat(config.weights),
                device=config.device,
                kv_budget_bytes=config.kv_budget_bytes,
                num_threads=config.num_threads,
                on_progress=on_progress,
                cache=open_block_cache(config.block_cache_bytes),
                kept=kept,
            )
        finally:
            is_wanted = False
