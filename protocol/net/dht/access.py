# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
"""The way into the network of a directory: p2pd, the swarm behind it, and how others reach us."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from ...endpoints import Endpoint, Relay, is_loopback
from ...errors import DirectoryError
from ...identity import Identity
from ...membership.membership import Membership, begin_public
from ...records.swarm_records import SwarmRecords
from ..clock import Clock
from ..libp2p.multiaddrs import PeerAddress, replace_hosts, split_multiaddr
from ..libp2p.p2p_daemon import (
    P2P,
    child_of,
    id_of,
    list_relays,
    lower_priority,
    start_reading_p2pd,
    start_serving_p2pd,
    stop_p2pd,
    stopping_if_failed,
)
from ..libp2p.swarm_question import answer_questions, find_swarm, make_ask
from ..relays.circuit import RelayReservations, start_sufficient_relay
from ..relays.reach import Reach, Scope
from ..relays.reachability import answer_dial_back, find_reach
from ..relays.relay_selection import NUM_RELAYS, RelaySelection, rank_relays
from .dht_node import DHTNode, quieten_hivemind, start_node
from .neighbourhood import Neighbourhood, RecordNodes, Rules

_logger = logging.getLogger(__name__)

_CLOSE_SECONDS = 2.0


class Place(NamedTuple):
    """The identity and addresses of a directory, the same for each p2pd that it starts."""

    identity: Identity | None
    listening: tuple[str, int] | None
    """Host and port of p2pd, 0 for any; None: it only asks."""
    endpoints: Sequence[Endpoint] = ()
    """Where others may dial us without p2pd, if this is not found out to be wrong."""
    is_relay: bool = False
    """Whether to carry streams to peers that cannot be dialled, where we can be."""
    rules: Rules = None

    @property
    def is_dialled(self) -> bool:
        """Whether other machines are to dial us."""
        where = self.listening
        return where is not None and bool(self.endpoints) and not is_loopback(where[0])


class Access(NamedTuple):
    """A running p2pd, connected to peers of the swarm."""

    p2p: P2P
    place: Place
    """With the port that p2pd has."""
    membership: Membership
    peers: Sequence[PeerAddress]
    """Those that were joined through."""
    visible: Sequence[str]
    """Addresses at which this p2pd listens; none where it only asks."""
    relay_selection: RelaySelection | None
    """The relays that carry streams to us, where others cannot dial us."""
    reach: Reach
    """From where others can dial us."""

    @property
    def hosts(self) -> list[str]:
        """Where others can dial us, best first: maybe also at the address of a NAT."""
        return self.reach.list_hosts([at.host for at in self.place.endpoints])

    @property
    def addresses(self) -> Sequence[str]:
        """Addresses at which others reach this p2pd; none where it only asks."""
        return replace_hosts(self.visible, self.hosts if self.place.is_dialled else [])

    @property
    def is_relay(self) -> bool:
        """Whether others may take us for a relay: we want to be one, and can be dialled."""
        return self.place.is_dialled and self.place.is_relay and not self.reach.needs_relay

    def move(self, own_hosts: Sequence[str]) -> Access:
        """Return what this is at other hosts of this machine; see `HivemindDirectory.move`."""
        endpoints = [replace(self.place.endpoints[0], host=host) for host in own_hosts]
        is_own = self.reach.seen_host in [endpoint.host for endpoint in self.place.endpoints]
        reach = Reach(Scope.UNKNOWN) if is_own else self.reach
        return self._replace(place=self.place._replace(endpoints=endpoints), reach=reach)

    async def ask_again(self) -> Reach | None:
        """Return what those that were joined through say now of our endpoint; None if nothing."""
        place = self.place
        if place.listening is None or self.relay_selection is not None:
            return self.reach
        among, (host, _) = {peer.peer_id for peer in self.peers}, place.listening
        reach = await find_reach(self.p2p, place.endpoints[0], host, among)
        return None if reach.scope is Scope.UNKNOWN else reach


async def open_access(
    peers: Sequence[PeerAddress], place: Place, clock: Clock, membership: Membership | None
) -> Access:
    """Start p2pd and find the swarm; see `HivemindDirectory.join`.

    When that fails or is interrupted, no p2pd is left running.
    """
    quieten_hivemind()
    p2p = await _start(place, peers)
    relays: Sequence[Relay] = ()  # that may be ours
    reach = Reach(Scope.UNKNOWN)
    async with stopping_if_failed(p2p):
        if peers:
            membership, peers = await find_swarm(peers, membership, make_ask(p2p))
        membership = membership or begin_public(id_of(p2p))
    if place.is_dialled:
        p2p, relays, reach = await make_reachable(p2p, peers, place)
        if not relays:
            p2p, place = await _start_relay(p2p, place, peers)
    selection = None
    if relays:
        peer_id = id_of(p2p)
        reservations = RelayReservations(p2p)
        selection = RelaySelection(reservations, peer_id, clock, relays, place.rules)
    return await _begin(p2p, place, membership, peers, selection, reach)


async def reopen_access(ended: Access) -> Access:
    """Start a p2pd in place of one that has ended: same port, same relays.

    It starts although no other node answers, as one that went on running would.
    """
    place, selection = ended.place, ended.relay_selection
    if place.listening is None:
        p2p = await start_reading_p2pd(ended.peers, place.identity, begins_alone=True)
    elif selection is not None:
        p2p = await _start(place, (), selection.relays)
        selection.move(RelayReservations(p2p))
    else:
        p2p, place = await _start_relay(await _start(place, ()), place, ())
    return await _begin(p2p, place, ended.membership, ended.peers, selection, ended.reach)


async def _start(place: Place, peers: Sequence[PeerAddress], relays: Sequence[Relay] = ()) -> P2P:
    if place.listening is None:
        return await start_reading_p2pd(peers, place.identity)
    return await start_serving_p2pd(
        peers, place.identity, *place.listening, relays, is_relay=place.is_relay
    )


async def _start_relay(p2p: P2P, place: Place, peers: Sequence[PeerAddress]) -> tuple[P2P, Place]:
    """Return a p2pd that carries whole texts, if we want that, or one that is no relay."""
    if not (place.is_dialled and place.is_relay):
        return p2p, place
    if relay := await start_sufficient_relay(p2p, lambda: _start(place, peers)):
        return relay, place
    place = place._replace(is_relay=False)
    return await _start(place, peers), place


async def _begin(
    p2p: P2P,
    place: Place,
    membership: Membership,
    peers: Sequence[PeerAddress],
    selection: RelaySelection | None,
    reach: Reach,
) -> Access:
    """Answer from now on what is asked through a p2pd; stop it where that fails."""
    if place.listening is None:
        return Access(p2p, place, membership, peers, (), selection, reach)
    async with stopping_if_failed(p2p):
        if place.is_dialled:
            await answer_dial_back(p2p)
        visible = [str(address) for address in await p2p.get_visible_maddrs()]
        await answer_questions(p2p, membership)
        host, _ = place.listening
        _, port = split_multiaddr(visible[0])
        place = place._replace(listening=(host, port))
        return Access(p2p, place, membership, peers, visible, selection, reach)


async def make_reachable(
    p2p: P2P, initial_peers: Sequence[PeerAddress], place: Place
) -> tuple[P2P, Sequence[Relay], Reach]:
    """Return a p2pd that others can dial, or one behind relays.

    With it come the initial peers that are relays, at all their addresses; p2pd is told of as many
    as are needed. It is the one that was given, or a new one. When that fails or is interrupted,
    none is left running. Raises DirectoryError when nobody can dial us and no initial peer is a
    relay.
    """
    async with stopping_if_failed(p2p):
        found = list_relays(initial_peers)
        candidates = rank_relays(id_of(p2p), found)
        reach = Reach(Scope.UNKNOWN)
        if candidates:
            host, _ = place.listening or ("", 0)
            reach = await find_reach(p2p, place.endpoints[0], host)
        relays: Sequence[Relay] = ()
        if reach.needs_relay:
            granting = await RelayReservations(p2p).list_granting(candidates)
            known = {relay.peer_id for relay in granting}
            relays = [relay for relay in found if relay.peer_id in known]
        if reach.scope is Scope.NOBODY and not relays:
            _, port = split_multiaddr(str((await p2p.get_visible_maddrs())[0]))
            raise make_unreachable_error(place.endpoints[0], port)
    if relays:
        await stop_p2pd(p2p)
        best = rank_relays(id_of(p2p), relays)[:NUM_RELAYS]
        return await _start(place, initial_peers, best), relays, reach
    return p2p, (), reach


def make_unreachable_error(endpoint: Endpoint, directory_port: int) -> DirectoryError:
    """Return what to raise for a peer that nobody can dial where nobody is a relay."""
    port = endpoint.port
    return DirectoryError(
        f"nobody can dial this peer at {endpoint}, and no initial peer is a relay: forward TCP "
        f"ports {port} and {directory_port} of the router to this machine, or open them in its "
        f"firewall, and start again with --listen 0.0.0.0:{port} --directory-port "
        f"{directory_port}; or join through a peer that is a relay"
    )


class DirectoryNode(NamedTuple):
    """A node of the DHT and the p2pd through which it speaks: replaced as one when p2pd ends."""

    access: Access
    p2pd: asyncio.subprocess.Process
    dht: DHTNode
    neighbourhood: Neighbourhood
    records: RecordNodes

    @classmethod
    async def start(
        cls,
        access: Access,
        records: SwarmRecords,
        clock: Clock,
        initial_peers: Sequence[PeerAddress],
    ) -> DirectoryNode:
        """Start a node that answers others unless it only asks; stop p2pd where that fails.

        Raises DirectoryError when no initial peer wants us.
        """
        p2p, is_reader = access.p2p, access.place.listening is None
        async with stopping_if_failed(p2p):
            dht = await start_node(p2p, initial_peers, is_reader)
            neighbourhood = Neighbourhood(dht, p2p, access.peers, access.place.rules)
            await neighbourhood.enter()
            nodes = RecordNodes(neighbourhood, p2p, records, clock, random.Random())
            if not is_reader:
                await nodes.answer_questions()
                # Now that nothing of the start waits for p2pd. Behind relays it keeps its priority:
                # what clients of this peer send comes through it.
                if access.relay_selection is None:
                    lower_priority(p2p)
            return cls(access, child_of(p2p), dht, neighbourhood, nodes)

    async def close(self) -> None:
        """End the node and its p2pd, if it has not ended yet."""
        if self.p2pd.returncode is None:
            try:
                async with asyncio.timeout(_CLOSE_SECONDS):
                    await self.dht.shutdown()
            except Exception as error:  # noqa: BLE001 - it tells a p2pd that may be going away
                _logger.debug("the DHT node did not shut down cleanly: %r", error)
        await stop_p2pd(self.access.p2p)
        await self.neighbourhood.close()
