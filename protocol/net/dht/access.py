# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
"""The way into the network of a directory: p2pd, the swarm behind it, and how others reach us."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ...endpoints import Endpoint, Relay, is_loopback
from ...identity import Identity
from ...ids import PeerId
from ...membership.membership import Membership, begin_public
from ..clock import Clock
from ..libp2p.multiaddrs import PeerAddress
from ..libp2p.p2p_daemon import (
    P2P,
    child_of,
    list_relays,
    start_reading_p2pd,
    start_serving_p2pd,
    stop_p2pd,
)
from ..libp2p.swarm_question import answer_questions, find_swarm, make_ask
from ..relays.circuit import RelayReservations, start_sufficient_relay
from ..relays.reachability import answer_dial_back, can_be_dialled
from ..relays.relay_selection import NUM_RELAYS, RelaySelection, rank_relays


class Access(NamedTuple):
    """A running p2pd, connected to peers of the swarm."""

    p2p: P2P
    membership: Membership
    peers: Sequence[PeerAddress]
    """Those that were joined through."""
    addresses: Sequence[str]
    """Addresses at which others reach this p2pd; none where it only asks."""
    relay_selection: RelaySelection | None
    """The relays that carry streams to us, where others cannot dial us."""


async def open_access(
    peers: Sequence[PeerAddress],
    identity: Identity | None,
    clock: Clock,
    listening: tuple[str, int] | None,
    membership: Membership | None,
    endpoint: Endpoint | None,
) -> Access:
    """Start p2pd and find the swarm; see `HivemindDirectory.join`. `listening` is host and port.

    When that fails or is interrupted, no p2pd is left running.
    """
    if listening is None:
        p2p = await start_reading_p2pd(peers, identity)
    else:
        p2p = await start_serving_p2pd(peers, identity, *listening)
    try:
        if peers:
            membership, peers = await find_swarm(peers, membership, make_ask(p2p))
        membership = membership or begin_public(PeerId(str(p2p.peer_id)))
        if listening is None:
            return Access(p2p, membership, peers, (), None)
        relays: Sequence[Relay] = ()  # that may be ours
        if endpoint is not None and not is_loopback(listening[0]):
            p2p, relays = await make_reachable(p2p, peers, identity, listening, endpoint)
            await answer_dial_back(p2p)
        addresses = [str(address) for address in await p2p.get_visible_maddrs()]
        await answer_questions(p2p, membership)
    except BaseException:
        if child_of(p2p).returncode is None:
            await stop_p2pd(p2p)
        raise
    selection = None
    if relays:
        peer_id = PeerId(str(p2p.peer_id))
        selection = RelaySelection(RelayReservations(p2p), peer_id, clock, relays)
    return Access(p2p, membership, peers, addresses, selection)


async def make_reachable(
    p2p: P2P,
    initial_peers: Sequence[PeerAddress],
    identity: Identity | None,
    listening: tuple[str, int],
    endpoint: Endpoint,
) -> tuple[P2P, Sequence[Relay]]:
    """Return a p2pd that is a relay for others, or one behind relays when nobody can dial us.

    With it come all that may be relays, best first; p2pd is told of as many as are needed. It is
    the one that was given, or a new one.
    """

    async def start(*trusted: Relay) -> P2P:
        return await start_serving_p2pd(initial_peers, identity, *listening, trusted)

    relays = rank_relays(PeerId(str(p2p.peer_id)), list_relays(initial_peers))
    if not relays or await can_be_dialled(p2p, endpoint):
        return await start_sufficient_relay(p2p, start), ()
    await stop_p2pd(p2p)
    return await start(*relays[:NUM_RELAYS]), relays
