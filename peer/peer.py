"""The main path of a serving peer: load a span, announce it, serve it, leave in good order."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass

import torch

from ..kernels.checkpoint import Checkpoint
from ..kernels.quantize import WeightFormat
from ..protocol import versions
from ..protocol.announcements import Announcement, ComputeDtype, PeerState
from ..protocol.endpoints import Endpoint
from ..protocol.errors import DirectoryError, UsageError
from ..protocol.identity import Identity
from ..protocol.ids import ModelId, make_model_id
from ..protocol.net.clock import SystemClock
from ..protocol.net.directory import Directory
from ..protocol.net.grpc_transport import GrpcTransport
from ..protocol.net.hivemind_directory import HivemindDirectory
from ..protocol.net.transport import Stream
from ..protocol.spans import Span
from .announcer import LIFETIME_PERIODS, Announcer
from .config import PeerConfig
from .engine.compute_thread import ComputeThread
from .engine.engine import Engine
from .engine.families import read_spec
from .engine.loader import check_span, open_checkpoint
from .identity_file import load_or_create_identity
from .service import Service, ServiceFacts
from .throughput import Throughput, measure_throughput

_logger = logging.getLogger(__name__)

_DTYPE_NAMES: dict[torch.dtype, ComputeDtype] = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
}


@dataclass(frozen=True)
class PeerEvent:
    """A point in the life of a peer, for whoever started it. Values are plain JSON types."""

    name: str
    facts: dict[str, object]


Report = Callable[[PeerEvent], None]


async def run_peer(config: PeerConfig, stop: asyncio.Event, report: Report) -> None:
    """Serve a span until `stop` is set.

    Reports `started`, `directory`, `loading` (per block), `online` and `left`. Raises UsageError
    for what the caller can mend and DirectoryError when the swarm cannot be joined; whatever was
    begun is undone before.
    """
    identity = _choose_identity(config)
    checkpoint, span, model_id = await asyncio.to_thread(_inspect_model, config)
    report(PeerEvent("started", {"peer_id": identity.peer_id, "model_id": model_id}))
    async with AsyncExitStack() as stack:
        directory = await HivemindDirectory.join(
            config.initial_peers,
            identity=identity,
            listen_host=config.listen_host,
            port=config.directory_port,
            clock=SystemClock(),
        )
        stack.push_async_callback(directory.close)
        report(PeerEvent("directory", {"addresses": list(directory.addresses)}))
        service_ready: asyncio.Future[Service] = asyncio.get_running_loop().create_future()
        transport = GrpcTransport()
        stack.push_async_callback(transport.close)

        async def serve(stream: Stream) -> None:
            # Whoever dials while the blocks are being loaded waits for them.
            await (await asyncio.shield(service_ready)).serve(stream)

        listener = await transport.listen(config.listen_host, config.listen_port, serve)
        engine = await _load_engine(config, checkpoint, span, report)
        compute = await stack.enter_async_context(ComputeThread(engine, config.token_budget))
        throughput = await compute.call(lambda: measure_throughput(engine))
        facts = ServiceFacts(
            identity.peer_id, model_id, config.max_sessions, config.session_idle_seconds
        )
        service = Service(facts, engine, compute, SystemClock())
        service_ready.set_result(service)
        stack.push_async_callback(listener.close)
        endpoint = _choose_endpoint(config, listener.endpoint)
        describe = _make_describe(config, identity, service, endpoint, throughput)
        announcer = Announcer(
            directory, identity, describe, SystemClock(), config.announce_period_seconds
        )
        await announcer.announce(PeerState.ONLINE)
        report(PeerEvent("online", _describe_online(service, endpoint, throughput, directory)))
        await _serve_until(stop, announcer)
        await _leave(service, announcer, config.drain_seconds)
    report(PeerEvent("left", {}))


def _choose_identity(config: PeerConfig) -> Identity:
    if config.identity_path is None:
        return Identity.generate()
    return load_or_create_identity(config.identity_path)


def _inspect_model(config: PeerConfig) -> tuple[Checkpoint, Span, ModelId]:
    """Open the model and choose the span; nothing is loaded yet."""
    checkpoint = open_checkpoint(config.model)
    spec = read_spec(checkpoint.config)
    span = config.span or Span(0, spec.num_blocks)
    check_span(spec, span)
    return checkpoint, span, make_model_id(checkpoint.config, checkpoint.revision)


async def _load_engine(
    config: PeerConfig, checkpoint: Checkpoint, span: Span, report: Report
) -> Engine:
    loop = asyncio.get_running_loop()
    is_wanted = True

    def on_progress(num_done: int, num_blocks: int) -> None:
        if not is_wanted:
            raise asyncio.CancelledError  # ends the loading thread
        facts: dict[str, object] = {"done": num_done, "blocks": num_blocks}
        loop.call_soon_threadsafe(report, PeerEvent("loading", facts))

    try:
        return await asyncio.to_thread(
            Engine.load,
            checkpoint,
            span,
            WeightFormat(config.weights),
            device=config.device,
            kv_budget_bytes=config.kv_budget_bytes,
            num_threads=config.num_threads,
            on_progress=on_progress,
        )
    finally:
        is_wanted = False


def _choose_endpoint(config: PeerConfig, listening: Endpoint) -> Endpoint:
    host = config.announce_host or listening.host
    if host in ("0.0.0.0", "::"):
        raise UsageError(
            f"others cannot dial {host}: say with --announce-host which address they should use"
        )
    return Endpoint(host, listening.port, listening.fingerprint)


def _make_describe(
    config: PeerConfig,
    identity: Identity,
    service: Service,
    endpoint: Endpoint,
    throughput: Throughput,
):
    """Return the function that the announcer asks for the present announcement."""
    engine = service.engine

    async def describe(state: PeerState, sequence: int, now: float) -> Announcement:
        statistics = await service.compute.call(engine.pool.statistics)
        return Announcement(
            peer_id=identity.peer_id,
            model_id=service.facts.model_id,
            num_blocks=engine.spec.num_blocks,
            span=engine.span,
            state=state,
            endpoints=(endpoint,),
            min_version=versions.MIN_VERSION,
            max_version=versions.MAX_VERSION,
            weights=config.weights,  # type: ignore[arg-type] - the schema checks it
            compute_dtype=_DTYPE_NAMES[engine.dtype],
            sequence=sequence,
            issued_at=now,
            expires_at=now + LIFETIME_PERIODS * config.announce_period_seconds,
            free_kv_tokens=statistics.free_tokens,
            decode_steps_per_second=throughput.decode_steps_per_second,
            prefill_tokens_per_second=throughput.prefill_tokens_per_second,
            queue_seconds=service.compute.queue_seconds,
            software=versions.SOFTWARE,
        )

    return describe


def _describe_online(
    service: Service, endpoint: Endpoint, throughput: Throughput, directory: Directory
) -> dict[str, object]:
    engine = service.engine
    return {
        "peer_id": service.facts.peer_id,
        "model_id": service.facts.model_id,
        "span": str(engine.span),
        "num_blocks": engine.spec.num_blocks,
        "weights_bytes": engine.num_weight_bytes,
        "endpoint": str(endpoint),
        "addresses": list(directory.addresses),
        "decode_steps_per_second": round(throughput.decode_steps_per_second, 1),
        "prefill_tokens_per_second": round(throughput.prefill_tokens_per_second, 1),
    }


async def _serve_until(stop: asyncio.Event, announcer: Announcer) -> None:
    async with asyncio.TaskGroup() as tasks:
        renewing = tasks.create_task(announcer.run())
        await stop.wait()
        renewing.cancel()


async def _leave(service: Service, announcer: Announcer, drain_seconds: float) -> None:
    """Take no new sessions, give the running ones their time, then say goodbye."""
    service.is_draining = True
    try:
        if service.sessions and drain_seconds > 0:
            await announcer.announce(PeerState.DRAINING)
            await service.wait_until_empty(drain_seconds)
        await announcer.announce(PeerState.OFFLINE)
    except DirectoryError as error:
        _logger.warning("could not say goodbye to the directory: %s", error)
