# hivemind's types are partial; what we say ourselves is checked.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
"""The directory over hivemind's Kademlia DHT, in process, on the running loop.

hivemind brings seconds and most of torch: import this where it is needed.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Collection, Sequence

from ...endpoints import Endpoint, Relay
from ...errors import (
    DirectoryError,
    P2pdEndedError,
    UsageError,
    WrongSwarmError,
)
from ...identity import Identity
from ...ids import NO_MODEL, ModelId, PeerId
from ...membership.membership import Membership, Revocations, make_public, sign_revocations
from ...records.announcements import Announcement, PeerState
from ...records.swarm_records import SwarmRecords
from ..clock import Clock
from ..libp2p.libp2p_transport import Libp2pTransport
from ..libp2p.multiaddrs import PeerAddress
from ..libp2p.p2p_daemon import stopping_if_failed
from ..retry import Backoff, Retry
from .access import Access, DirectoryNode, Place, open_access, reopen_access
from .known_addresses import KnownAddresses
from .neighbourhood import Neighbourhood, Rules, list_addresses

_logger = logging.getLogger(__name__)

_MOST_KEPT = 64
"""Peers whose addresses are read for the file."""

_KEEP_SECONDS = 10.0
"""How often at most known addresses are written to disk."""

_MOST_LISTED = 4
"""So many peers of a model, on the average, have it listed each time that all announce themselves:
one of them is enough, and an announcement lives three times as long."""

_RESTARTS = Backoff(1.0, 15.0, jitter_fraction=0.5)
"""How long p2pd is left alone after it has ended. An attacker who can end it at will has it started
four times a minute; once he gives up, it is back as soon."""

_STEADY_SECONDS = 60.0
"""A p2pd that has lasted so long did not end for the reason for which the one before it did."""

_RESTART_SECONDS = 30.0
"""How long one start may take in all, a relay included."""


_MOST_STARTS = 3
"""How often p2pd is started until a directory is joined, where it ends meanwhile."""


class HivemindDirectory:
    """One member of the DHT, over a p2pd process. Implements Directory; made by `join`.

    The DHT only tells which nodes to ask about a model. These exchange records with whoever asks,
    as peers do over their own streams (see `SwarmRecords`), sealed where the swarm is private: so
    only members learn or tell anything. When p2pd ends, another one takes its place; until then
    operations fail and records stay known.
    """

    def __init__(
        self,
        node: DirectoryNode,
        records: SwarmRecords,
        clock: Clock,
        known: KnownAddresses | None,
    ) -> None:
        self.records = records
        """See Directory.records."""
        self._node = node
        self._clock = clock
        self._known = known
        self._kept: Collection[tuple[PeerId, int]] = ()
        self._kept_at = float("-inf")
        self._rng = random.Random()
        self._models: set[ModelId] = set()  # that we were asked about
        self._read_at: dict[ModelId, float] = {}
        self._own: dict[ModelId, bytes] = {}
        self._transport: Libp2pTransport | None = None
        self._is_closed = False
        self._replacing = asyncio.create_task(self._replace_ended())

    @classmethod
    async def join(
        cls,
        initial_peers: Sequence[str],
        *,
        identity: Identity | None,
        clock: Clock,
        listen_host: str = "127.0.0.1",
        port: int = 0,
        client_mode: bool = False,
        membership: Membership | None = None,
        endpoints: Sequence[Endpoint] = (),
        is_relay: bool = False,
        rules: Rules = None,
        known: KnownAddresses | None = None,
    ) -> HivemindDirectory:
        """Start a node and join through `initial_peers`; with none of them, begin a new DHT.

        With an identity, the node has its peer id. With `client_mode`, the node reads, and
        neither listens nor stores. `port` 0 takes any free one. Without a membership the swarm is
        the public one of the initial peers, or the one that this node begins. With `endpoints`,
        others are asked to dial there; if they cannot, initial peers become our relays (see
        `relays`), if they are relays. With `is_relay` this one is, off loopback, if it can be
        dialled. Announced nodes are dialled by the `rules`. Where no initial peer answers, `known`
        addresses of the swarm are tried; they are kept up.

        Raises UsageError for a malformed address and when it cannot listen there, WrongSwarmError
        when the membership does not fit the initial peers, DirectoryError when no initial peer
        answers within ten seconds, the clock is off, or we need a relay and there is none, and
        P2pdEndedError when our own p2pd ends again and again.
        """
        peers = [PeerAddress.parse(text) for text in initial_peers]
        listening = None if client_mode else (listen_host, port)
        place = Place(identity, listening, endpoints, is_relay, rules)
        try:
            return await cls._join(peers, place, clock, membership, known)
        except (WrongSwarmError, P2pdEndedError):
            raise
        except DirectoryError as error:
            swarm_id, others = known.load() if known and peers else (b"", [])
            # Ours from before a restart may be somebody else's by now.
            others = [one for one in others if not identity or one.peer_id != identity.peer_id]
            if not others:
                raise
            membership = membership or make_public(swarm_id)
            try:
                directory = await cls._join(others, place, clock, membership, known)
            except DirectoryError:
                raise error from None  # it names what the user gave
            _logger.warning("%s; joined through an address of the last time instead", error)
            return directory

    @classmethod
    async def _join(
        cls,
        peers: Sequence[PeerAddress],
        place: Place,
        clock: Clock,
        membership: Membership | None,
        known: KnownAddresses | None,
    ) -> HivemindDirectory:
        num_left = _MOST_STARTS
        while True:
            num_left -= 1
            try:
                access = await open_access(peers, place, clock, membership)
                records = SwarmRecords(access.membership)
                node = await DirectoryNode.start(access, records, clock, access.peers)
                return cls(node, records, clock, known)
            except P2pdEndedError as error:
                if not num_left:
                    raise
                _logger.debug("%s; it is started again", error)

    def __repr__(self) -> str:
        num_neighbours = len(self._neighbourhood)
        return f"<HivemindDirectory {self._access.p2p.peer_id}, {num_neighbours} neighbours>"

    @property
    def membership(self) -> Membership:
        """The membership of the swarm that was joined."""
        return self._access.membership

    @property
    def addresses(self) -> Sequence[str]:
        """Multiaddrs with our peer id, `/ip4/127.0.0.1/tcp/4001/p2p/12D3KooW…`; see the seam."""
        return self._access.addresses

    @property
    def scope(self) -> str:
        """From where others can dial us, one of `Scope`."""
        return str(self._access.reach.scope)

    @property
    def own_hosts(self) -> Sequence[str]:
        """The hosts of this machine where we are announced, reached or not."""
        return [endpoint.host for endpoint in self._access.place.endpoints]

    @property
    def hosts(self) -> Sequence[str]:
        """Where others can dial our endpoints, best first: maybe also at the address of a NAT."""
        return self._access.hosts

    @property
    def is_relay(self) -> bool:
        """Whether others may take us for a relay."""
        return self._access.is_relay

    def move(self, own_hosts: Sequence[str]) -> None:
        """From now on be at other hosts of this machine, whether others can dial us there or not.

        Where a router forwards our port we may still be reached at its address.
        """
        self._node = self._node._replace(access=self._access.move(own_hosts))

    async def renew_reach(self) -> bool:
        """Ask those that we joined through once more whether they can dial us.

        Return whether any of them told. Nobody else is believed, and nobody is asked for a peer
        behind relays, which stays there.
        """
        reach = await self._access.ask_again()
        if reach is not None:
            self._node = self._node._replace(access=self._access._replace(reach=reach))
        return reach is not None

    @property
    def joined_through(self) -> Sequence[str]:
        """An address of each peer that we joined through."""
        first: dict[PeerId, str] = {}
        for peer in self._access.peers:
            first.setdefault(peer.peer_id, peer.text)
        return list(first.values())

    def list_others(self) -> list[str]:
        """Return the first address of each peer beside us that others can join through."""
        near = self._neighbourhood.peer_ids
        others = (list_addresses([peer])[:1] for peer in self._list_known() if peer.peer_id in near)
        return [address.text for addresses in others for address in addresses]

    @property
    def relays(self) -> Sequence[Relay]:
        """The relays that carry streams to us; none when others can dial us."""
        selection = self._access.relay_selection
        return () if selection is None else selection.relays

    async def find_relays(self, model_id: ModelId) -> Sequence[Relay]:
        """Take other relays for those that are gone; return `relays`.

        Those who serve the model are asked as well as initial peers. Does nothing without relays.
        """
        if self._access.relay_selection is not None:
            await self._access.relay_selection.renew(lambda: self.lookup(model_id))
        return self.relays

    def make_transport(self, rules: Rules = None) -> Libp2pTransport:
        """Return a transport over p2pd, the only one; close it before the directory."""
        self._transport = Libp2pTransport(self._access.p2p, self.membership, rules)
        return self._transport

    async def announce(self, record: bytes) -> None:
        """See Directory.announce. Raises UsageError in client mode."""
        if self._is_reader:
            raise UsageError("a directory in client mode only reads; join without client_mode")
        announcement, value, _ = self.records.add_own(record, self._clock.wall())
        model_id = announcement.model_id
        self._own[model_id] = value
        self._models.add(model_id)
        self._check_is_running()
        await self._neighbourhood.restore(self._list_known())
        answers, _ = await asyncio.gather(
            self._node.records.bring(model_id, value), self._list_model(announcement, value)
        )
        if announcement.state is not PeerState.OFFLINE:
            await self._neighbourhood.return_to_initial_peers()
        self._keep_addresses(_KEEP_SECONDS)
        # Where nobody else is known it is kept here, where newcomers may ask as well.
        if not any(answers) and (answers or self._knows_others()):
            raise DirectoryError("no node of the directory keeps our announcement")

    async def lookup(self, model_id: ModelId, max_age_seconds: float = 0.0) -> list[Announcement]:
        """See Directory.lookup."""
        self._check_is_running()
        self.records.reserve(model_id)
        self._models.add(model_id)
        now, read_at = self._clock.now(), self._read_at.get(model_id, float("-inf"))
        if now - read_at >= max_age_seconds:
            await self._search(model_id)
            self._read_at[model_id] = now
        self._keep_addresses(_KEEP_SECONDS)
        return self.records.list_current(model_id, self._clock.wall())

    async def list_models(self) -> list[ModelId]:
        """See Directory.list_models."""
        self._check_is_running()
        await self._search(NO_MODEL)
        return self.records.list_models(self._clock.wall())

    async def _list_model(self, announcement: Announcement, value: bytes) -> None:
        """Bring an announcement to those who are asked which models there are, if it is our turn.

        They need not be those who are asked about this model. Where many serve it, all of them
        together bring a few.
        """
        num_peers = len(self.records.list_current(announcement.model_id, self._clock.wall()))
        is_leaving = announcement.state is PeerState.OFFLINE
        if not is_leaving and self._rng.random() * num_peers < _MOST_LISTED:
            await self._node.records.bring(NO_MODEL, value)

    async def _search(self, model_id: ModelId) -> None:
        """Ask nodes about a model; raises DirectoryError where there are some and none answers."""
        for _ in range(2):  # the first search may find out that every known neighbour is gone
            await self._neighbourhood.restore(self._list_known())
            if await self._node.records.search(model_id):
                return
            if len(self._neighbourhood):
                break
        if self._is_reader or self._knows_others():
            raise DirectoryError(f"no peer of the directory answers: {self._initial_texts}")

    def _knows_others(self) -> bool:
        """Return whether others announce themselves that should answer."""
        now, is_own = self._clock.wall(), self.records.is_own
        known = (
            one for model_id in self._models for one in self.records.list_current(model_id, now)
        )
        return any(
            one.as_nodes and one.state is not PeerState.OFFLINE and not is_own(one) for one in known
        )

    def _keep_addresses(self, min_age_seconds: float) -> None:
        """Write down where we and others can be joined, if there are others and it has changed."""
        if self._known is None or self._clock.now() - self._kept_at < min_age_seconds:
            return
        known, own_id = self._list_known(), str(self._access.p2p.peer_id)
        nodes = {(peer.peer_id, peer.directory_port) for peer in known}
        if nodes != self._kept and any(peer_id != own_id for peer_id, _ in nodes):
            self._kept, self._kept_at = nodes, self._clock.now()
            now, answering = self._clock.wall(), self._neighbourhood.peer_ids
            self._rng.shuffle(known)
            # Announcing costs nothing: those that have answered come first.
            known.sort(key=lambda peer: (peer.peer_id not in answering, peer.expires_at <= now))
            known = known[:_MOST_KEPT]
            # New ones first: what was joined through may be what was kept the last time.
            addresses = [*list_addresses(known), *self._access.peers]
            self._known.save(self.membership.swarm_id, addresses)

    def _list_known(self) -> list[Announcement]:
        now, lists = self._clock.wall(), (self.records.list_current, self.records.list_hints)
        return [peer for model_id in self._models for read in lists for peer in read(model_id, now)]

    async def revoke(self, peer_ids: Collection[PeerId]) -> Revocations:
        """Add peers to the owner's list, publish it and return it; peers hand it on from then on.

        With nobody to add it is only read. Raises UsageError unless we are the owner,
        DirectoryError when nobody tells who is revoked so far, or nobody takes the list.
        """
        self._check_is_running()
        if not await self._node.records.search(NO_MODEL):
            raise DirectoryError(
                "no peer of the swarm says which peers are revoked so far, so nothing was changed; "
                "check that one is running"
            )
        known = self.records.revocations
        if not set(peer_ids) - known.peer_ids:
            return known
        sequence = max(known.sequence + 1, int(self._clock.wall() * 1000))
        revocations = Revocations(sequence, known.peer_ids.union(peer_ids))
        record = sign_revocations(self.membership, revocations)
        if not any(await self._node.records.bring(NO_MODEL, self.records.seal_revocations(record))):
            raise DirectoryError("no peer of the swarm keeps the list; check that one is running")
        return revocations

    async def close(self) -> None:
        """See Directory.close."""
        if self._is_closed:
            return
        self._is_closed = True
        self._keep_addresses(0.0)
        self._replacing.cancel()
        await asyncio.wait([self._replacing])
        await self._node.close()

    async def _replace_ended(self) -> None:
        """Start another p2pd whenever the present one has ended, later and later each time."""
        restarts = Retry(_RESTARTS, self._clock, rng=random.Random())
        while True:
            began_at = self._clock.now()
            status = await self._node.p2pd.wait()
            if self._clock.now() - began_at > _STEADY_SECONDS:
                restarts.reset()
            _logger.debug("p2pd has ended (exit status %d)", status)
            ended, was_told = self._node, False
            try:
                await ended.close()
            except Exception as error:  # noqa: BLE001 - as below
                _logger.debug("what is left of p2pd could not be cleared away: %r", error)
            while self._node.p2pd is ended.p2pd:
                restarts.note_failure()
                await restarts.pause()
                if not was_told:  # nor is it where we leave: whoever ends us may end p2pd as well
                    _logger.info("the directory is lost: p2pd has ended and is started again")
                    was_told = True
                try:
                    async with asyncio.timeout(_RESTART_SECONDS):
                        await self.replace_node()
                except Exception as error:  # noqa: BLE001 - else the peer is away for good
                    _logger.debug("p2pd could not be started again: %r", error)
            _logger.info("the directory is back")

    async def replace_node(self) -> None:
        """Put another node in place of the one whose p2pd has ended, and announce again."""
        access = await reopen_access(self._access)
        self._node = await DirectoryNode.start(access, self.records, self._clock, ())
        async with stopping_if_failed(access.p2p):
            if self._transport is not None:
                await self._transport.move(access.p2p)
        await self._neighbourhood.restore(self._list_known())
        for model_id, value in self._own.items():
            await self._node.records.bring(model_id, value)

    @property
    def _access(self) -> Access:
        return self._node.access

    @property
    def _neighbourhood(self) -> Neighbourhood:
        return self._node.neighbourhood

    @property
    def _is_reader(self) -> bool:
        return self._access.place.listening is None

    @property
    def _initial_texts(self) -> str:
        return ", ".join(peer.text for peer in self._access.peers)

    def _check_is_running(self) -> None:
        if self._is_closed:
            raise DirectoryError("the directory was closed")
        if self._node.p2pd.returncode is not None:
            raise DirectoryError("the p2pd process has ended; another one is being started")
