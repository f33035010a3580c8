"""The main path of a serving peer: load a span, announce it, serve it, leave in good order."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable
from contextlib import AbstractContextManager, AsyncExitStack, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from ..kernels.checkpoint import Checkpoint
from ..kernels.quantize import WeightFormat
from ..protocol.announcements import Announcement, PeerState
from ..protocol.endpoints import Endpoint
from ..protocol.errors import DirectoryError, UsageError
from ..protocol.identity import Identity
from ..protocol.ids import ModelId, make_model_id
from ..protocol.join_code import make_codes
from ..protocol.net.clock import SystemClock
from ..protocol.net.directory import Directory
from ..protocol.net.hivemind_directory import HivemindDirectory
from ..protocol.net.multiaddrs import replace_host
from ..protocol.net.tcp_transport import TcpTransport
from ..protocol.net.tls import make_tls_identity
from ..protocol.net.transport import Listener, Stream, Transport
from ..protocol.spans import Span
from .announcer import Announcer
from .config import PeerConfig
from .engine.block_cache import open_block_cache
from .engine.compute_thread import ComputeThread
from .engine.engine import Engine, check_kv_budget
from .engine.families import read_spec
from .engine.loader import check_span, check_weights, open_checkpoint
from .identity_file import hold_identity
from .loop_lag import LoopLag
from .neighbours import Neighbours
from .self_description import SelfDescription, make_template
from .service import Service, ServiceFacts
from .throughput import Throughput, measure_throughput

_logger = logging.getLogger(__name__)


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
    _check_can_be_dialled(config)
    clock = SystemClock()
    async with AsyncExitStack() as stack:
        identity = stack.enter_context(_hold_identity(config))
        plan = await asyncio.to_thread(_plan_span, config)
        report(PeerEvent("started", {"peer_id": identity.peer_id, "model_id": plan.model_id}))
        # Whoever knows the announcement from before a restart finds the same key again.
        tls_identity = make_tls_identity(identity.derive_secret("shoal TLS key"))
        transport = TcpTransport(tls_identity, membership=config.membership)
        stack.push_async_callback(transport.close)
        ready: asyncio.Future[Service] = asyncio.get_running_loop().create_future()
        listeners = [await _listen(config, transport, config.listen_port, ready)]
        endpoint = _choose_endpoint(config, listeners[0].endpoint)
        directory = await _join_directory(config, identity, clock, endpoint)
        stack.push_async_callback(directory.close)
        report(PeerEvent("directory", _describe_directory(config, directory)))
        if directory.relays:
            listeners.append(await _listen_behind_relays(config, directory, stack, ready))

        lag = LoopLag(clock)
        template = make_template(
            config, identity.peer_id, plan.model_id, plan.span, plan.num_blocks, endpoint
        )
        if directory.relays:
            template = replace(template, endpoints=(), relays=directory.relays)
        description = SelfDescription(template, lag)
        announcer = Announcer(
            directory, identity, description.describe, clock, config.announce_period_seconds
        )
        stack.push_async_callback(_say_goodbye, announcer)
        await announcer.announce(PeerState.JOINING)
        chores = await stack.enter_async_context(_Chores((announcer.run(), lag.run())))

        engine = await _load_engine(config, plan, report)
        compute = await stack.enter_async_context(ComputeThread(engine, config.token_budget))
        for listener in listeners:
            stack.push_async_callback(listener.close)
        throughput = await compute.call(lambda: measure_throughput(engine))
        neighbours = Neighbours(transport, clock)
        stack.push_async_callback(neighbours.close)
        facts = _gather_facts(config, identity, plan)
        service = Service(facts, engine, compute, clock, neighbours)
        ready.set_result(service)
        description.begin_serving(engine, compute, throughput)
        await announcer.announce(PeerState.ONLINE)
        facts_online = _describe_online(service, template, throughput, directory)
        report(PeerEvent("online", facts_online))

        await chores.run_until(stop)
        await _drain(service, announcer, config.drain_seconds)
        await _say_goodbye(announcer)
        _logger.info("served with %r", lag)
    report(PeerEvent("left", {}))


class _Chores:
    """Background tasks of a peer: cancelled at the end, and nobody overlooks it if one fails."""

    def __init__(self, coroutines: Iterable[Coroutine[Any, Any, None]]) -> None:
        self._tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]

    async def __aenter__(self) -> "_Chores":
        return self

    async def __aexit__(self, *exception: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)
        for task in self._tasks:
            if not task.cancelled() and task.exception() is not None:
                _logger.warning("a chore of the peer failed", exc_info=task.exception())

    async def run_until(self, stop: asyncio.Event) -> None:
        """Wait for the event; raise what a chore raised if one ends before."""
        stopping = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait((stopping, *self._tasks), return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
        for task in self._tasks:
            if task.done():
                task.result()


@dataclass(frozen=True)
class _Plan:
    """What a peer is about to serve; nothing of it is loaded yet."""

    checkpoint: Checkpoint
    model_id: ModelId
    span: Span
    num_blocks: int


def _hold_identity(config: PeerConfig) -> AbstractContextManager[Identity]:
    if config.identity_path is None:
        return nullcontext(Identity.generate())
    return hold_identity(config.identity_path)


def _check_can_be_dialled(config: PeerConfig) -> None:
    host = config.announce_host or config.listen_host
    if host in ("0.0.0.0", "::"):
        raise UsageError(
            f"others cannot dial {host}: say with --announce-host which address they should use"
        )


def _plan_span(config: PeerConfig) -> _Plan:
    checkpoint = open_checkpoint(config.model)
    spec = read_spec(checkpoint.config)
    span = config.span or Span(0, spec.num_blocks)
    weights = WeightFormat(config.weights)
    check_span(spec, span)
    check_weights(spec, weights)
    check_kv_budget(spec, span, weights, config.kv_budget_bytes)
    model_id = make_model_id(checkpoint.config, checkpoint.revision)
    return _Plan(checkpoint, model_id, span, spec.num_blocks)


async def _join_directory(
    config: PeerConfig, identity: Identity, clock: SystemClock, endpoint: Endpoint
) -> HivemindDirectory:
    return await HivemindDirectory.join(
        config.initial_peers,
        identity=identity,
        listen_host=config.listen_host,
        port=config.directory_port,
        clock=clock,
        membership=config.membership,
        endpoint=endpoint,
    )


def _gather_facts(config: PeerConfig, identity: Identity, plan: _Plan) -> ServiceFacts:
    return ServiceFacts(
        identity.peer_id, plan.model_id, config.max_sessions, config.session_idle_seconds
    )


def _describe_directory(config: PeerConfig, directory: HivemindDirectory) -> dict[str, object]:
    """Return where others join, and the codes for that of a swarm that begins here.

    Not those of other swarms: a peer that is started by a program should not log secrets.
    """
    facts: dict[str, object] = {"addresses": list(directory.addresses)}
    if not config.initial_peers:
        dialled = replace_host(directory.addresses, config.announce_host)
        facts["join_codes"] = make_codes(directory.membership, dialled)
    return facts


async def _listen(
    config: PeerConfig, transport: Transport, port: int, ready: asyncio.Future[Service]
) -> Listener:
    async def serve(stream: Stream) -> None:
        # Whoever dials while the blocks are being loaded waits for them.
        await (await asyncio.shield(ready)).serve(stream)

    return await transport.listen(config.listen_host, port, serve)


async def _listen_behind_relays(
    config: PeerConfig,
    directory: HivemindDirectory,
    stack: AsyncExitStack,
    ready: asyncio.Future[Service],
) -> Listener:
    transport = directory.make_transport()
    stack.push_async_callback(transport.close)
    return await _listen(config, transport, config.directory_port, ready)


async def _load_engine(config: PeerConfig, plan: _Plan, report: Report) -> Engine:
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
            plan.checkpoint,
            plan.span,
            WeightFormat(config.weights),
            device=config.device,
            kv_budget_bytes=config.kv_budget_bytes,
            num_threads=config.num_threads,
            on_progress=on_progress,
            cache=open_block_cache(config.block_cache_bytes),
        )
    finally:
        is_wanted = False


def _choose_endpoint(config: PeerConfig, listening: Endpoint) -> Endpoint:
    host = config.announce_host or listening.host
    return Endpoint(host, listening.port, listening.fingerprint)


def _describe_online(
    service: Service, template: Announcement, throughput: Throughput, directory: Directory
) -> dict[str, object]:
    engine = service.engine
    return {
        "peer_id": service.facts.peer_id,
        "model_id": service.facts.model_id,
        "span": str(engine.span),
        "num_blocks": engine.spec.num_blocks,
        "weights_bytes": engine.num_weight_bytes,
        "kernels": engine.kernels,
        "endpoint": str(template.doors[0]),
        "addresses": list(directory.addresses),
        "decode_steps_per_second": round(throughput.decode_steps_per_second, 1),
        "prefill_tokens_per_second": round(throughput.prefill_tokens_per_second, 1),
    }


async def _drain(service: Service, announcer: Announcer, drain_seconds: float) -> None:
    """Take no new sessions and give the running ones their time."""
    service.begin_draining()
    if not service.is_empty and drain_seconds > 0:
        try:
            await announcer.announce(PeerState.DRAINING)
        except DirectoryError as error:
            _logger.warning("could not announce that sessions should leave: %s", error)
        await service.wait_until_empty(drain_seconds)


async def _say_goodbye(announcer: Announcer) -> None:
    """Announce OFFLINE unless that was done: once a peer has shown itself, others wait for it."""
    if announcer.state is PeerState.OFFLINE:
        return
    try:
        await announcer.announce(PeerState.OFFLINE)
    except DirectoryError as error:
        _logger.warning("could not say goodbye to the directory: %s", error)
