"""The monitor's access to swarms on the internet."""

from collections.abc import Sequence

from ...protocol.endpoints import find_local_network
from ...protocol.errors import (
    NotAMemberError,
    RefusedError,
    RemoteProtocolError,
    SilentError,
    StaleAnnouncementError,
    UnavailableError,
)
from ...protocol.membership.membership import Membership
from ...protocol.net.addresses import is_address, list_own_hosts
from ...protocol.net.clock import SystemClock
from ...protocol.net.dht.internet import InternetNetwork
from ...protocol.net.dialling import open_greeted
from ...protocol.net.directory import Directory
from ...protocol.net.libp2p.multiaddrs import split_multiaddr
from ...protocol.net.tcp.dial_rules import DialRules
from ...protocol.net.transport import Transport
from ...protocol.records.announcements import Announcement
from .collector import SwarmAccess
from .state import ProbeResult

_ANSWER_SECONDS = 6.0
"""How long a peer may take, at all of its endpoints."""

_MAX_FAULT_CHARACTERS = 300
"""A peer chooses the words of its refusal."""


def make_access(membership: Membership | None) -> SwarmAccess:
    """Return the access to a swarm over TCP, TLS and the DHT, which takes seconds to import.

    Without a membership it joins open swarms only. What strangers announce is dialled by the rules
    of peers: see `_list_own_hosts`. Peers behind relays are reached through these.
    """
    clock = SystemClock()

    async def join(addresses: Sequence[str]) -> tuple[Transport, Directory]:
        rules = DialRules(clock, _list_own_hosts(addresses))
        return await InternetNetwork(clock, addresses, membership).connect(rules)

    async def probe(peer: Announcement, transport: Transport) -> ProbeResult:
        try:
            stream, rtt_seconds = await open_greeted(
                transport, clock, peer, peer.span, _ANSWER_SECONDS, names_model=True
            )
            await stream.close()
        except RefusedError as error:
            is_member = not isinstance(error, NotAMemberError)
            fault = f"refused: {error}"[:_MAX_FAULT_CHARACTERS]
            return ProbeResult(clock.wall(), fault, is_refusal=is_member)
        except (UnavailableError, RemoteProtocolError) as error:
            fault = f"{_name_fault(error)}: {error}"[:_MAX_FAULT_CHARACTERS]
            return ProbeResult(clock.wall(), fault)
        return ProbeResult(clock.wall(), rtt_seconds=rtt_seconds)

    return SwarmAccess(clock, join, probe)


def _list_own_hosts(addresses: Sequence[str]) -> list[str]:
    """Return hosts in the networks that may be dialled: those that the swarm was joined through.

    A swarm of local networks alone may be in all of this machine's.
    """
    hosts = [split_multiaddr(address)[0] for address in addresses]
    if any(not is_address(host) or find_local_network(host) is None for host in hosts):
        return hosts
    return [*hosts, *filter(find_local_network, list_own_hosts("0.0.0.0"))]


def _name_fault(error: UnavailableError | RemoteProtocolError) -> str:
    """Return the fault in a word or two, for a table."""
    if isinstance(error, StaleAnnouncementError):
        return "not as announced"
    if isinstance(error, RemoteProtocolError):
        return "wrong protocol"
    return "silent" if isinstance(error, SilentError) else "unreachable"
