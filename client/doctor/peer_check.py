"""Asks one peer whether it is what it announces, and names what is wrong."""

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from ...protocol import versions
from ...protocol.endpoints import Endpoint
from ...protocol.errors import (
    ErrorCode,
    NotAMemberError,
    RefusedError,
    RemoteProtocolError,
    UnavailableError,
    UsageError,
)
from ...protocol.ids import NO_CLIENT
from ...protocol.membership.membership import Membership
from ...protocol.messages.session import Welcome
from ...protocol.net.clock import Clock, SystemClock
from ...protocol.net.dialling import greet
from ...protocol.net.directory import Directory
from ...protocol.net.transport import ChoosingTransport, Transport
from ...protocol.records.announcements import Announcement
from .reach_check import Door, Reach

PEER_SECONDS = 6.0
"""How long one endpoint of a peer may keep us waiting."""

LIBP2P_GREETING = b"\x13/multistream/1.0.0\n"
"""The greeting of a libp2p connection (multistream-select: length, text, newline)."""


class Fault(StrEnum):
    """Faults of a peer that announces itself."""

    CLOSED_PORT = "closed port"
    UNREACHABLE = "unreachable"
    SILENT = "silent"
    NO_TLS = "no TLS"
    FINGERPRINT = "wrong fingerprint"
    WRONG_SECRET = "wrong secret"
    NOT_A_MEMBER = "not a member"
    PROTOCOL = "wrong protocol"
    VERSION = "wrong version"
    OTHER_PEER = "another peer"
    OTHER_MODEL = "another model"
    OTHER_BLOCKS = "other blocks"
    REFUSED = "refused"


FIXES = {
    Fault.CLOSED_PORT: "the peer's process has ended: start it again, or wait until its "
    "announcement expires; if it runs, a firewall or router there closes its port: open the port "
    "(--listen HOST:PORT fixes its number)",
    Fault.UNREACHABLE: "check the network between here and there, and that the peer announces an "
    "address that you can reach (--announce-host) at a port that its firewall allows",
    Fault.SILENT: "its process is paused (resume it: kill -CONT) or overloaded; on another "
    "network, open its port in the firewall (--listen HOST:PORT fixes its number)",
    Fault.NO_TLS: "another program listens there: it has taken over the peer's port, or it is a "
    "proxy in between",
    Fault.FINGERPRINT: "the peer was restarted and will send a new announcement within a minute, "
    "or someone intercepts the connection: trust it only if the new announcement matches",
    Fault.WRONG_SECRET: "ask the owner of the swarm for a new join code",
    Fault.NOT_A_MEMBER: "ask the owner of the swarm for a join code, and give it with --join",
    Fault.PROTOCOL: "a program other than a shoal peer answers there, or the peer is broken: "
    "restart it",
    Fault.VERSION: "update shoal on the older of the two machines",
    Fault.OTHER_PEER: "the address was given to another peer: wait until the old announcement "
    "expires",
    Fault.OTHER_MODEL: "the peer was restarted with another model: wait until the old "
    "announcement expires",
    Fault.OTHER_BLOCKS: "the peer was restarted with other blocks: wait until the old "
    "announcement expires",
    Fault.REFUSED: "the peer accepts no sessions at the moment: try again later",
}
"""Advice for each fault."""


@dataclass(frozen=True)
class PeerCheck:
    """The result of talking to one peer; with `fault` None, it works.

    `clock_ahead_seconds` compares its wall clock with ours, half a round trip taken into account.
    """

    peer: Announcement
    fault: Fault | None = None
    detail: str = ""
    rtt_seconds: float | None = None
    clock_ahead_seconds: float | None = None


@dataclass(frozen=True)
class Probes:
    """Everything that touches the network or the clock."""

    clock: Clock
    transport: Transport
    dial: Callable[[str, int], Awaitable[None]]
    """Open and close a TCP connection; raises OSError."""
    hail: Callable[[str, int], Awaitable[bytes]]
    """Greet over TCP as libp2p does and return the answer; raises OSError."""
    join: Callable[[Sequence[str]], Awaitable[Directory]]
    check_certificate: Callable[[Endpoint], Awaitable[object]]
    """Raise as `fetch_pinned_certificate` does."""
    reach: Callable[[Sequence[str], Door], Awaitable[Sequence[Reach]]]
    """Ask others, through these addresses, to dial a door of this machine."""


def make_network_probes(membership: Membership | None = None) -> Probes:
    """Return the probes over TCP, TLS and the DHT, which take seconds to import.

    They are those of a member, or, with None, of whoever the swarm is open to.
    """
    from ...protocol.net.dht.hivemind_directory import HivemindDirectory
    from ...protocol.net.libp2p.libp2p_transport import LazyLibp2pTransport
    from ...protocol.net.relays.reachability import probe
    from ...protocol.net.tcp.tcp_transport import TcpTransport
    from ...protocol.net.tcp.tls import fetch_pinned_certificate

    clock = SystemClock()

    async def join(addresses: Sequence[str]) -> Directory:
        return await HivemindDirectory.join(
            addresses, identity=None, clock=clock, client_mode=True, membership=membership
        )

    async def reach(addresses: Sequence[str], door: Door) -> Sequence[Reach]:
        return await probe(
            TcpTransport(), addresses, door.listen_host, door.port, door.announced_host
        )

    transport = ChoosingTransport(
        TcpTransport(membership=membership),
        LazyLibp2pTransport(membership),
    )
    return Probes(clock, transport, _dial, _hail, join, fetch_pinned_certificate, reach)


async def _dial(host: str, port: int) -> None:
    _, writer = await asyncio.open_connection(host, port)
    writer.close()


async def _hail(host: str, port: int) -> bytes:
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(LIBP2P_GREETING)
        return await reader.read(len(LIBP2P_GREETING))
    finally:
        writer.close()


async def check_peer(peer: Announcement, probes: Probes) -> PeerCheck:
    """Talk to a peer at its endpoints, best first, until one works. Never raises ShoalError."""
    if peer.min_version > versions.MAX_VERSION or peer.max_version < versions.MIN_VERSION:
        theirs = f"{peer.min_version} to {peer.max_version}"
        ours = f"{versions.MIN_VERSION} to {versions.MAX_VERSION}"
        detail = f"it speaks protocol versions {theirs}, this machine {ours}"
        return PeerCheck(peer, Fault.VERSION, detail)
    result = PeerCheck(peer, Fault.UNREACHABLE, "it announces no endpoint")
    for endpoint in peer.all_endpoints:
        try:
            async with asyncio.timeout(PEER_SECONDS):
                result = await _ask_peer(peer, endpoint, probes)
        except TimeoutError:
            detail = f"{endpoint} did not answer within {PEER_SECONDS:g} s"
            result = PeerCheck(peer, Fault.SILENT, detail)
        if result.fault is None:
            break
    return result


async def _ask_peer(peer: Announcement, endpoint: Endpoint, probes: Probes) -> PeerCheck:
    """Shake hands at one endpoint, step by step, so that each failure has its own name."""
    try:
        if endpoint.fingerprint:
            await probes.check_certificate(endpoint)
    except RemoteProtocolError as error:
        is_tls = not isinstance(error.__cause__, ssl.SSLError)
        return PeerCheck(peer, Fault.FINGERPRINT if is_tls else Fault.NO_TLS, str(error))
    except UnavailableError as error:
        return PeerCheck(peer, _name_fault(error), str(error))
    try:
        stream = await probes.transport.open_stream(endpoint, PEER_SECONDS)
    except NotAMemberError as error:
        fault = Fault.WRONG_SECRET if error.has_secret else Fault.NOT_A_MEMBER
        return PeerCheck(peer, fault, str(error))
    except (RemoteProtocolError, UsageError) as error:
        return PeerCheck(peer, Fault.PROTOCOL, str(error))
    except UnavailableError as error:
        return PeerCheck(peer, _name_fault(error), str(error))
    try:
        wall = probes.clock.wall()
        welcome, rtt_seconds = await greet(stream, str(endpoint), probes.clock, NO_CLIENT)
    except RefusedError as error:
        is_version = error.code is ErrorCode.BAD_VERSION
        return PeerCheck(peer, Fault.VERSION if is_version else Fault.REFUSED, str(error))
    except RemoteProtocolError as error:
        return PeerCheck(peer, Fault.PROTOCOL, str(error))
    except UnavailableError as error:
        return PeerCheck(peer, _name_fault(error), str(error))
    finally:
        await stream.close()
    times = rtt_seconds, welcome.wall_seconds - (wall + rtt_seconds / 2)
    fault, detail = _judge(welcome, peer, endpoint)
    return PeerCheck(peer, fault, detail, *times)


def _judge(welcome: Welcome, peer: Announcement, endpoint: Endpoint) -> tuple[Fault | None, str]:
    """Compare what a peer says of itself with what it announced."""
    if welcome.peer_id != peer.peer_id:
        return Fault.OTHER_PEER, f"{endpoint} is now peer …{welcome.peer_id[-6:]}"
    if welcome.model_id != peer.model_id:
        return Fault.OTHER_MODEL, f"it serves model id {welcome.model_id}"
    if not welcome.span.covers(peer.span):
        return Fault.OTHER_BLOCKS, f"it serves blocks {welcome.span}"
    return None, ""


def _name_fault(error: UnavailableError) -> Fault:
    if isinstance(error.__cause__, ConnectionRefusedError):
        return Fault.CLOSED_PORT
    is_timeout = isinstance(error.__cause__, TimeoutError)
    return Fault.SILENT if is_timeout else Fault.UNREACHABLE
