"""Asks one peer whether it is what it announces, and names what is wrong."""

import asyncio
import ssl
from collections.abc import Collection, Sequence
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
from ...protocol.messages.session import Welcome
from ...protocol.net.dialling import greet, list_near
from ...protocol.net.tasks import cancel_all
from ...protocol.net.transport import Transport
from ...protocol.records.announcements import Announcement
from .probes import Probes

PEER_SECONDS = 6.0
"""How long one endpoint of a peer may keep us waiting."""

MAX_PEERS_ASKED = 64
"""Of a large swarm only so many peers are asked, at most `_PEERS_AT_ONCE` at a time."""

_PEERS_AT_ONCE = 8


class PeerFault(StrEnum):
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


_FIXES = {
    PeerFault.CLOSED_PORT: "the peer's process has ended: start it again, or wait until its "
    "announcement expires; if it runs, a firewall or router there closes its port: open the port "
    "(--listen HOST:PORT fixes its number)",
    PeerFault.UNREACHABLE: "check the network between here and there, and that the peer announces "
    "an address that you can reach (--announce-host) at a port that its firewall allows",
    PeerFault.SILENT: "its process is paused (resume it: kill -CONT) or overloaded; on another "
    "network, open its port in the firewall (--listen HOST:PORT fixes its number)",
    PeerFault.NO_TLS: "another program listens there: it has taken over the peer's port, or it is "
    "a proxy in between",
    PeerFault.FINGERPRINT: "the peer was restarted and will send a new announcement within a "
    "minute, or someone intercepts the connection: trust it only if the new announcement matches",
    PeerFault.WRONG_SECRET: "ask the owner of the swarm for a new join code",
    PeerFault.NOT_A_MEMBER: "ask the owner of the swarm for a join code, and give it with --join",
    PeerFault.PROTOCOL: "a program other than a shoal peer answers there, or the peer is broken: "
    "restart it",
    PeerFault.VERSION: "update shoal on the older of the two machines",
    PeerFault.OTHER_PEER: "the address was given to another peer: wait until the old announcement "
    "expires",
    PeerFault.OTHER_MODEL: "the peer was restarted with another model: wait until the old "
    "announcement expires",
    PeerFault.OTHER_BLOCKS: "the peer was restarted with other blocks: wait until the old "
    "announcement expires",
    PeerFault.REFUSED: "the peer accepts no sessions at the moment: try again later",
}
"""Advice for each fault."""

_RELAYED_FIX = (
    "this peer is behind a NAT and was reached through a relay: start it again if its process has "
    "ended; if it runs, it finds another relay within a minute"
)


@dataclass(frozen=True)
class PeerCheck:
    """The result of talking to one peer; with `fault` None, it works.

    `clock_ahead_seconds` compares its wall clock with ours, half a round trip taken into account.
    """

    peer: Announcement
    fault: PeerFault | None = None
    detail: str = ""
    rtt_seconds: float | None = None
    clock_ahead_seconds: float | None = None


def advise(check: PeerCheck) -> str:
    """Return what to do about the fault of a peer."""
    assert check.fault is not None
    is_gone = check.fault in (PeerFault.CLOSED_PORT, PeerFault.UNREACHABLE, PeerFault.SILENT)
    is_relayed = bool(check.peer.relays) and not check.peer.endpoints
    return _RELAYED_FIX if is_gone and is_relayed else _FIXES[check.fault]


async def check_peers(
    peers: Collection[Announcement],
    transport: Transport,
    probes: Probes,
    seconds: float | None = None,
) -> list[PeerCheck]:
    """Talk to peers, `MAX_PEERS_ASKED` of them at most; `seconds` is how long that may take."""
    turns = asyncio.Semaphore(_PEERS_AT_ONCE)

    async def check(peer: Announcement) -> PeerCheck:
        async with turns:
            return await check_peer(peer, transport, probes)

    # Of very many some for every block.
    ordered, num_asked = sorted(peers, key=lambda peer: peer.span), min(len(peers), MAX_PEERS_ASKED)
    asked = [ordered[index * len(ordered) // num_asked] for index in range(num_asked)]
    asking = [asyncio.create_task(check(peer)) for peer in asked]
    try:
        done, _ = await asyncio.wait(asking, timeout=seconds) if asking else (set(), None)
        late = PeerFault.SILENT, "it could not be asked in time"
        return [
            task.result() if task in done else PeerCheck(peer, *late)
            for peer, task in zip(asked, asking, strict=True)
        ]
    finally:
        await cancel_all(asking)


async def check_peer(peer: Announcement, transport: Transport, probes: Probes) -> PeerCheck:
    """Talk to a peer at its endpoints until one works. Never raises ShoalError."""
    if peer.min_version > versions.MAX_VERSION or peer.max_version < versions.MIN_VERSION:
        theirs = f"{peer.min_version} to {peer.max_version}"
        ours = f"{versions.MIN_VERSION} to {versions.MAX_VERSION}"
        detail = f"it speaks protocol versions {theirs}, this machine {ours}"
        return PeerCheck(peer, PeerFault.VERSION, detail)
    # Side by side: the relays may be those of a stranger, who would learn from the time of our dial
    # which addresses and ports of this network refuse.
    near, far = await asyncio.gather(
        _check_in_turn(peer, list_near(peer), transport, probes),
        _check_in_turn(peer, peer.all_endpoints, transport, probes),
    )
    return near if near.fault is None else far


async def _check_in_turn(
    peer: Announcement, endpoints: Sequence[Endpoint], transport: Transport, probes: Probes
) -> PeerCheck:
    """Talk to a peer at some of its endpoints, best first, until one works."""
    result = PeerCheck(peer, PeerFault.UNREACHABLE, "it announces no endpoint")
    for endpoint in endpoints:
        try:
            async with asyncio.timeout(PEER_SECONDS):
                result = await _ask_peer(peer, endpoint, transport, probes)
        except TimeoutError:
            detail = f"{endpoint} did not answer within {PEER_SECONDS:g} s"
            result = PeerCheck(peer, PeerFault.SILENT, detail)
        if result.fault is None:
            break
    return result


async def _ask_peer(
    peer: Announcement, endpoint: Endpoint, transport: Transport, probes: Probes
) -> PeerCheck:
    """Shake hands at one endpoint, step by step, so that each failure has its own name."""
    try:
        if endpoint.fingerprint:
            await probes.check_certificate(endpoint)
    except RemoteProtocolError as error:
        is_tls = not isinstance(error.__cause__, ssl.SSLError)
        return PeerCheck(peer, PeerFault.FINGERPRINT if is_tls else PeerFault.NO_TLS, str(error))
    except UnavailableError as error:
        return PeerCheck(peer, _name_fault(error), str(error))
    try:
        stream = await transport.open_stream(endpoint, PEER_SECONDS)
    except NotAMemberError as error:
        fault = PeerFault.WRONG_SECRET if error.has_secret else PeerFault.NOT_A_MEMBER
        return PeerCheck(peer, fault, str(error))
    except (RemoteProtocolError, UsageError) as error:
        return PeerCheck(peer, PeerFault.PROTOCOL, str(error))
    except UnavailableError as error:
        return PeerCheck(peer, _name_fault(error), str(error))
    try:
        wall = probes.clock.wall()
        welcome, rtt_seconds = await greet(stream, str(endpoint), probes.clock, NO_CLIENT)
    except RefusedError as error:
        is_version = error.code is ErrorCode.BAD_VERSION
        return PeerCheck(peer, PeerFault.VERSION if is_version else PeerFault.REFUSED, str(error))
    except RemoteProtocolError as error:
        return PeerCheck(peer, PeerFault.PROTOCOL, str(error))
    except UnavailableError as error:
        return PeerCheck(peer, _name_fault(error), str(error))
    finally:
        await stream.close()
    times = rtt_seconds, welcome.wall_seconds - (wall + rtt_seconds / 2)
    fault, detail = _judge(welcome, peer, endpoint)
    return PeerCheck(peer, fault, detail, *times)


def _judge(
    welcome: Welcome, peer: Announcement, endpoint: Endpoint
) -> tuple[PeerFault | None, str]:
    """Compare what a peer says of itself with what it announced."""
    if welcome.peer_id != peer.peer_id:
        return PeerFault.OTHER_PEER, f"{endpoint} is now peer …{welcome.peer_id[-6:]}"
    if welcome.model_id != peer.model_id:
        return PeerFault.OTHER_MODEL, f"it serves model id {welcome.model_id}"
    if not welcome.span.covers(peer.span):
        return PeerFault.OTHER_BLOCKS, f"it serves blocks {welcome.span}"
    return None, ""


def _name_fault(error: UnavailableError) -> PeerFault:
    if isinstance(error.__cause__, ConnectionRefusedError):
        return PeerFault.CLOSED_PORT
    is_timeout = isinstance(error.__cause__, TimeoutError)
    return PeerFault.SILENT if is_timeout else PeerFault.UNREACHABLE
