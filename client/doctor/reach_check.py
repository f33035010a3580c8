"""Who can be dialled from where: what addresses mean, and what the answers of others come to.

Pure; `protocol/net/relays/reachability.py` asks them.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ...protocol.endpoints import find_local_network, is_loopback
from ...protocol.net.addresses import DialBackAnswer, is_address
from ...protocol.records.announcements import Announcement
from .finding import Finding, FindingStatus

LOCAL_FIX = (
    "start it again without --local and without --listen 127.0.0.1, and join through an address "
    "that is none of 127.0.0.1: a peer that joins through this machine only is local, too"
)
"""Advice for a peer of `find_local_peers`."""

_NAME = "reach"
_RELAYED = "Until then a peer here is reached through relays, which is slower"


@dataclass(frozen=True)
class ListenAddress:
    """The address at which a peer of this machine would listen (port 0: any), and announce."""

    listen_host: str
    port: int
    announced_host: str


def name_bounds(host: str) -> str:
    """Return what to say of an address that means nothing elsewhere; nothing of others.

    >>> name_bounds("192.168.1.5")
    '; that is an address of a local network, which others cannot reach'
    """
    if is_loopback(host):
        return "; that is an address of the machine of the peer itself, which others cannot reach"
    if is_in_local_network(host):
        return "; that is an address of a local network, which others cannot reach"
    return ""


def is_in_local_network(host: str) -> bool:
    """Return whether a host is an address of a home or office, or a link."""
    return is_address(host) and find_local_network(host) is not None


def find_local_peers(peers: Sequence[Announcement]) -> list[Announcement]:
    """Return the peers that only their own machine reaches, in a swarm of others."""
    local = [peer for peer in peers if peer.all_endpoints and _is_local(peer)]
    return local if len(local) < len(peers) else []


def _is_local(peer: Announcement) -> bool:
    return not peer.relays and all(is_loopback(endpoint.host) for endpoint in peer.endpoints)


def judge_reach(address: ListenAddress, answers: Sequence[DialBackAnswer]) -> Finding:
    """Return the meaning of the answers, and advice, for people."""
    host, port = address.announced_host, address.port
    place = f"{host}:{port}" if port else host
    if is_loopback(host):
        detail = f"{host} is this machine only: other machines cannot dial a peer here"
        fix = "to let them, serve without --local and without --listen 127.0.0.1"
        return Finding(_NAME, FindingStatus.WARNING, detail, fix)
    # A peer of this machine sees us from within.
    known = [a for a in answers if a.is_reached is not None and not is_loopback(a.seen_host)]
    if not known:
        detail = f"no peer on another machine could be asked to dial {place}"
        return Finding(
            _NAME, FindingStatus.WARNING, detail, "try again when more peers are running"
        )
    num_reaching = sum(bool(answer.is_reached) for answer in known)
    seen_host, num_seeing = Counter(answer.seen_host for answer in known).most_common(1)[0]
    # Most have to agree, and a name of ours may stand for what they see.
    are_addresses = is_address(host) and is_address(seen_host)
    if are_addresses and seen_host != host and 2 * num_seeing > len(known):
        is_let_through = any(a.is_reached for a in known if a.seen_host == seen_host)
        return _judge_translated(address, seen_host, is_let_through)
    if 2 * num_reaching >= len(known):
        detail = f"{num_reaching} of {len(known)} peers that were asked can dial {place}"
        return Finding(_NAME, FindingStatus.OK, detail)
    number = f"TCP port {port}" if port else "its port (--listen HOST:PORT fixes its number)"
    detail = (
        f"{len(known) - num_reaching} of {len(known)} peers cannot dial {place}, although they see "
        "this machine there: a firewall blocks it"
    )
    return Finding(
        _NAME, FindingStatus.WARNING, detail, f"open {number} in the firewall. {_RELAYED}"
    )


def _judge_translated(address: ListenAddress, seen_host: str, is_let_through: bool) -> Finding:
    """Return what to do where others see another address than the one that would be announced."""
    host, port = address.announced_host, address.port
    detail = f"others see this machine as {seen_host}, not as {host}: it is behind a NAT"
    if is_let_through:
        fix = f"the NAT forwards the port: announce its address with --announce-host {seen_host}"
        return Finding(_NAME, FindingStatus.WARNING, detail, fix)
    number = f"TCP port {port}" if port else "a TCP port"
    fix = (
        f"forward {number} from the router to this machine, and serve with --listen "
        f"0.0.0.0:{port or 'PORT'} --announce-host {seen_host}. {_RELAYED}"
    )
    return Finding(_NAME, FindingStatus.WARNING, detail, fix)
