"""The main path of a serving peer: load a span, announce it, serve it, leave in good order."""

import asyncio
import logging
import random
from collections.abc import Sequence
from contextlib import AbstractContextManager, AsyncExitStack, nullcontext
from dataclasses import replace
from functools import partial

from ..protocol.endpoints import Endpoint
from ..protocol.identity import Identity
from ..protocol.membership.join_code import make_codes
from ..protocol.net.addresses import check_can_be_dialled, is_loopback
from ..protocol.net.clock import SystemClock
from ..protocol.net.dht.hivemind_directory import HivemindDirectory
from ..protocol.net.directory import Directory
from ..protocol.net.p2pd.multiaddrs import replace_host, split_multiaddr
from ..protocol.net.tcp.tcp_transport import TcpTransport
from ..protocol.net.tcp.tls import make_tls_identity
from ..protocol.net.transport import Listener, Transport
from ..protocol.records.announcements import Announcement
from .accounts.memory import find_room
from .announcing.announcer import Announcer
from .announcing.delays import Delays
from .announcing.relay_watch import watch_relays
from .announcing.self_description import SelfDescription, make_template
from .hosting.hosting import HostedModel, Hosting
from .placement.room import Room
from .placer import PlacedModel, Placer
from .pushing.neighbours import Neighbours
from .pushing.parked_streams import ParkedStreams
from .pushing.reverse_connections import ReverseConnections
from .resident import PeerEvent, Report, Resident, say_goodbye
from .runtime.chores import Chores
from .runtime.config import PeerConfig
from .runtime.identity_file import hold_identity
from .runtime.loop_lag import LoopLag
from .streams.door import Door

_logger = logging.getLogger(__name__)


async def run_peer(config: PeerConfig, stop: asyncio.Event, report: Report) -> None:
    """Serve a span until `stop` is set, the configured one or those that the swarm needs.

    Reports `started`, `directory`, `placed` (where, if that is not told), `loading` (per block),
    `online`, maybe `moving`, `loading` and `online` again (or, where that was not possible,
    `returning`), and `left`. Raises UsageError for what the caller can mend and DirectoryError when
    the swarm cannot be joined; whatever was begun is undone before.
    """
    check_can_be_dialled(config.announce_host or config.listen_host)
    clock = SystemClock()
    async with AsyncExitStack() as stack:
        identity = stack.enter_context(_hold_identity(config))
        model = await asyncio.to_thread(HostedModel.open, config)
        report(PeerEvent("started", _describe_start(identity, model)))
        # Whoever knows the announcement from before a restart finds the same key again.
        tls_identity = make_tls_identity(identity.derive_secret("shoal TLS key"))
        transport = TcpTransport(tls_identity, membership=config.membership)
        stack.push_async_callback(transport.close)
        door = Door()
        listeners = [await _listen(config, transport, config.listen_port, door)]
        endpoint = _choose_endpoint(config, listeners[0].endpoint)
        directory = await _join_directory(config, identity, clock, endpoint)
        stack.push_async_callback(directory.close)
        report(PeerEvent("directory", _describe_directory(config, directory)))
        if directory.relays:
            listeners.append(await _listen_behind_relays(config, directory, stack, door))

        lag = LoopLag(clock)
        template = _make_template(config, identity, model, endpoint, directory)
        period_seconds = config.announce_period_seconds
        delays = Delays(directory, transport, clock, period_seconds, random.Random())
        reverse = _make_reverse(config, identity, transport, directory, door)
        description = SelfDescription(template, lag, model.sizes.work, delays, reverse)
        announcer = Announcer(directory, identity, description.describe, clock, period_seconds)
        stack.push_async_callback(say_goodbye, announcer)
        chores = await stack.enter_async_context(Chores())
        chores.begin(lag.run())
        chores.begin(delays.run())
        if reverse is not None:
            chores.begin(watch_relays(directory, model.model_id, description, announcer, report))
            chores.begin(reverse.run(partial(_note_parked, announcer, report)))
        parked = None if reverse else _make_parked(config, model, directory, endpoint)
        neighbours = Neighbours(transport, clock, delays.note_pushed, parked)
        stack.push_async_callback(neighbours.close)
        for listener in listeners:
            stack.push_async_callback(listener.close)
        placed = _describe_model(config, model)
        placer = Placer(identity.peer_id, placed, directory, announcer, description, clock)
        resident = Resident(
            hosting=Hosting(config, model, identity.peer_id, clock, neighbours),
            door=door,
            announcer=announcer,
            description=description,
            report=report,
            address=_describe_address(template.all_endpoints[0], directory),
            drain_seconds=config.drain_seconds,
        )
        await resident.run(config.span, placer, chores, stop)
        _logger.info("served with %r", lag)
    report(PeerEvent("left", {}))


def _hold_identity(config: PeerConfig) -> AbstractContextManager[Identity]:
    if config.identity_path is None:
        return nullcontext(Identity.generate())
    return hold_identity(config.identity_path)


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


def _describe_start(identity: Identity, model: HostedModel) -> dict[str, object]:
    return {
        "peer_id": identity.peer_id,
        "model_id": model.model_id,
        "adapter_bytes": model.adapter_bytes,
    }


def _describe_directory(config: PeerConfig, directory: HivemindDirectory) -> dict[str, object]:
    """Return where others join, and the codes for that of a swarm that begins here.

    Not those of other swarms: a peer that is started by a program should not log secrets.
    """
    dialled = replace_host(directory.addresses, config.announce_host)
    facts: dict[str, object] = {"addresses": list(directory.addresses), "dialled": dialled}
    if not config.initial_peers:
        facts["join_codes"] = make_codes(directory.membership, dialled)
    return facts


def _make_template(
    config: PeerConfig,
    identity: Identity,
    model: HostedModel,
    endpoint: Endpoint,
    directory: HivemindDirectory,
) -> Announcement:
    """Return what to announce; it says, too, that the peer is behind relays, or is one."""
    num_blocks = model.spec.num_blocks
    template = make_template(config, identity.peer_id, model.model_id, num_blocks, endpoint)
    if directory.relays:
        return replace(template, endpoints=(), relays=tuple(directory.relays))
    host, port = split_multiaddr(directory.addresses[0])
    return template if is_loopback(host) else replace(template, relay_port=port)


async def _listen(config: PeerConfig, transport: Transport, port: int, door: Door) -> Listener:
    return await transport.listen(config.listen_host, port, door.serve)


async def _listen_behind_relays(
    config: PeerConfig,
    directory: HivemindDirectory,
    stack: AsyncExitStack,
    door: Door,
) -> Listener:
    transport = directory.make_transport()
    stack.push_async_callback(transport.close)
    return await _listen(config, transport, config.directory_port, door)


def _make_reverse(
    config: PeerConfig,
    identity: Identity,
    transport: Transport,
    directory: HivemindDirectory,
    door: Door,
) -> ReverseConnections | None:
    """Return what lets others push to a peer that cannot be dialled; None for one that can."""
    if not directory.relays:
        return None
    period_seconds = config.announce_period_seconds
    return ReverseConnections(
        identity, transport, directory, door.serve, SystemClock(), period_seconds
    )


def _note_parked(announcer: Announcer, report: Report, parked_at: Sequence[str]) -> None:
    """Announce and report who can push to us over connections of ours (`parked`)."""
    announcer.hurry()
    report(PeerEvent("parked", {"parked_at": list(parked_at)}))


def _make_parked(
    config: PeerConfig, model: HostedModel, directory: HivemindDirectory, endpoint: Endpoint
) -> ParkedStreams:
    """Return what keeps the streams of peers that cannot be dialled."""
    look = partial(directory.lookup, model.model_id)
    period_seconds = config.announce_period_seconds
    return ParkedStreams(endpoint.fingerprint, look, SystemClock(), period_seconds)


def _choose_endpoint(config: PeerConfig, listening: Endpoint) -> Endpoint:
    host = config.announce_host or listening.host
    return Endpoint(host, listening.port, listening.fingerprint)


def _describe_address(door: object, directory: Directory) -> dict[str, object]:
    return {"endpoint": str(door), "addresses": list(directory.addresses)}


def _describe_model(config: PeerConfig, model: HostedModel) -> PlacedModel:
    """Return what there is to place: as many blocks as were asked for, or as memory holds."""
    if config.num_blocks is None:
        other_bytes = config.kv_budget_bytes + model.pass_bytes + model.adapter_bytes
        room = find_room(model.sizes, other_bytes, model.read_free_bytes())
    else:
        room = Room(config.num_blocks)
    return PlacedModel(model.model_id, model.sizes.work, room)
