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
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from ...endpoints import Endpoint, Relay
from ...errors import (
    DirectoryError,
    LocalProtocolError,
    RemoteProtocolError,
    ShoalError,
    UsageError,
)
from ...identity import Identity
from ...ids import ModelId, PeerId
from ...membership.membership import Membership, Revocations, sign_revocations
from ...records.announcements import Announcement, KnownRecord, PeerState
from ..clock import Clock
from ..libp2p.libp2p_transport import Libp2pTransport
from ..libp2p.multiaddrs import PeerAddress
from ..libp2p.p2p_daemon import child_of, stop_p2pd, stopping_if_failed
from ..retry import Backoff, Retry
from .access import Access, Place, open_access, reopen_access
from .gated_node import make_gate, quieten_hivemind, start_node
from .neighbourhood import Neighbourhood, Replicas, list_meeting_points
from .record_gate import RecordGate

if TYPE_CHECKING:
    from hivemind.dht.node import DHTNode

_logger = logging.getLogger(__name__)

_OPERATION_SECONDS = 5.0
"""How long an operation may take: with 16 questions at once, three rounds of only dead nodes."""

_CLOSE_SECONDS = 2.0

_RESTARTS = Backoff(1.0, 15.0, jitter_fraction=0.5)
"""How long p2pd is left alone after it has ended. An attacker who can end it at will has it started
four times a minute; once he gives up, it is back as soon."""

_STEADY_SECONDS = 60.0
"""A p2pd that has lasted so long did not end for the reason for which the one before it did."""

_RESTART_SECONDS = 30.0
"""How long one start may take in all, a relay included."""


class _Node(NamedTuple):
    """A node of the DHT and the p2pd through which it speaks: replaced as one when p2pd ends."""

    access: Access
    p2pd: asyncio.subprocess.Process
    dht: DHTNode
    neighbourhood: Neighbourhood
    replicas: Replicas

    @classmethod
    async def start(
        cls, access: Access, gate: RecordGate, initial_peers: Sequence[PeerAddress]
    ) -> _Node:
        """Start a node that answers others unless it only asks; stop p2pd where that fails.

        Raises DirectoryError when no initial peer wants us.
        """
        p2p, is_reader = access.p2p, access.place.listening is None
        async with stopping_if_failed(p2p):
            dht = await start_node(p2p, gate, initial_peers, is_reader)
            neighbourhood = Neighbourhood(dht, p2p, access.peers)
            replicas = Replicas(dht, p2p, gate)
            if not is_reader:
                await replicas.serve()
            return cls(access, child_of(p2p), dht, neighbourhood, replicas)

    @property
    def is_running(self) -> bool:
        return self.p2pd.returncode is None

    async def close(self) -> None:
        """End the node and its p2pd, if it has not ended yet."""
        if self.is_running:
            try:
                async with asyncio.timeout(_CLOSE_SECONDS):
                    await self.dht.shutdown()
            except Exception as error:  # noqa: BLE001 - it tells a p2pd that may be going away
                _logger.debug("the DHT node did not shut down cleanly: %r", error)
        await stop_p2pd(self.access.p2p)
        await self.replicas.close()


class HivemindDirectory:
    """One member of the DHT, over a p2pd process. Implements Directory; made by `join`.

    Under the key of (swarm, model) the DHT keeps a dictionary from peer id to signed record.
    Records that are found or stored here pass the gate; lookups answer with admitted records. When
    p2pd ends, another one takes its place; until then operations fail and records stay known.
    """

    def __init__(self, node: _Node, gate: RecordGate, clock: Clock) -> None:
        self._node = node
        self._gate = gate
        self._clock = clock
        self._own: dict[ModelId, tuple[Announcement, bytes]] = {}  # with the value in the DHT
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
        endpoint: Endpoint | None = None,
        is_relay: bool = False,
    ) -> HivemindDirectory:
        """Start a node and join through `initial_peers`; with none of them, begin a new DHT.

        With an identity, the node has its peer id. With `client_mode`, the node reads, and
        neither listens nor stores. `port` 0 takes any free one. Without a membership the swarm is
        the public one of the initial peers, or the one that this node begins. With an `endpoint`,
        others are asked to dial it; if they cannot, initial peers become our relays (see `relays`),
        if they are relays. With `is_relay` this one is, off loopback, if it can be dialled.

        Raises UsageError for a malformed address and when it cannot listen there, WrongSwarmError
        when the membership does not fit the initial peers, DirectoryError when no initial peer
        answers within ten seconds, the clock is off, or we need a relay and there is none.
        """
        quieten_hivemind()
        peers = [PeerAddress.parse(text) for text in initial_peers]
        listening = None if client_mode else (listen_host, port)
        place = Place(identity, listening, endpoint, is_relay)
        access = await open_access(peers, place, clock, membership)
        gate = make_gate(access.membership, clock)
        return cls(await _Node.start(access, gate, access.peers), gate, clock)

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

    def make_transport(self) -> Libp2pTransport:
        """Return a transport over p2pd, the only one; close it before the directory."""
        self._transport = Libp2pTransport(self._access.p2p, self.membership)
        return self._transport

    async def announce(self, record: bytes) -> None:
        """See Directory.announce. Raises UsageError in client mode."""
        if self._is_reader:
            raise UsageError("a directory in client mode only reads; join without client_mode")
        announcement, value = self._take_own(record)
        self._own[announcement.model_id] = announcement, value
        self._check_is_running()
        await self._neighbourhood.restore()
        await self._publish(announcement, value)
        await self._look_after_swarm(announcement)

    def _take_own(self, record: bytes) -> tuple[Announcement, bytes]:
        """Return our announcement, which lookups find here from now on, and its value."""
        try:
            announcement = self._gate.read(record)
        except RemoteProtocolError as error:
            raise LocalProtocolError(f"our own announcement is not valid: {error}") from error
        try:
            return announcement, self._gate.add_own(announcement.model_id, record)
        except RemoteProtocolError as error:
            raise DirectoryError(f"the directory refused our announcement: {error}") from error

    async def _publish(self, announcement: Announcement, value: bytes) -> None:
        key = self._gate.key_of(announcement.model_id)
        expires_at = float(announcement.expires_at)
        if not await self._store(key, announcement.peer_id, value, expires_at):
            raise DirectoryError("no replica of the directory stored our announcement")

    async def _look_after_swarm(self, announcement: Announcement) -> None:
        """Do what every peer does each time that it announces itself, so that the swarm lasts.

        It hands on the list of revocations, and goes back to neighbours that were lost.
        """
        if self.membership.is_private:
            await self._search(self._gate.revocations_key)
            if value := self._gate.wrap_revocations():
                await self._store_revocations(value)  # its owner need not be there
        if announcement.state is not PeerState.OFFLINE:
            announced = self._gate.list_current(announcement.model_id)
            await self._neighbourhood.look_for_lost(announced, self._gate.wall())

    async def lookup(self, model_id: ModelId) -> list[Announcement]:
        """See Directory.lookup."""
        self._check_is_running()
        for _ in range(2):  # the first search may find out that every known neighbour is gone
            await self._neighbourhood.restore()
            await self._search(self._gate.watch(model_id), *self._other_keys)
            if len(self._neighbourhood):
                break
        else:
            if self._is_reader:
                raise DirectoryError(f"no peer of the directory answers: {self._initial_texts}")
        found = self._gate.list_current(model_id)
        drawn = random.sample(found, len(found))  # else made-up peers could be the first ones
        self._neighbourhood.note_meeting_points(drawn)
        return found

    def list_records(self, model_id: ModelId) -> list[KnownRecord]:
        """See Directory.list_records."""
        return self._gate.list_records(model_id)

    def list_hints(self, model_id: ModelId) -> list[Announcement]:
        """See Directory.list_hints."""
        return self._gate.list_hints(model_id)

    def take_record(self, model_id: ModelId, value: bytes) -> Announcement:
        """See Directory.take_record."""
        return self._gate.take(model_id, value)

    async def revoke(self, peer_ids: Collection[PeerId]) -> Revocations:
        """Add peers to the owner's list, publish it and return it; peers hand it on from then on.

        With nobody to add it is only read. Raises UsageError unless we are the owner,
        DirectoryError when nobody took it.
        """
        self._check_is_running()
        await self._neighbourhood.restore()
        await self._search(self._gate.revocations_key)
        known = self._gate.revocations
        if not set(peer_ids) - known.peer_ids:
            return known
        sequence = max(known.sequence + 1, int(self._gate.wall() * 1000))
        revocations = Revocations(sequence, known.peer_ids.union(peer_ids))
        value = self._gate.wrap_revocations(sign_revocations(self.membership, revocations))
        if not await self._store_revocations(value):
            raise DirectoryError("no peer of the swarm stored the list; check that one is running")
        return revocations

    async def _store_revocations(self, value: bytes) -> bool:
        # A replica keeps what expires later: an old list must not outlive the newest one.
        return await self._store(
            self._gate.revocations_key, self._gate.REVOCATIONS, value, self._gate.latest_expiry()
        )

    async def close(self) -> None:
        """See Directory.close."""
        if self._is_closed:
            return
        self._is_closed = True
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
            _logger.warning("p2pd has ended (exit status %d); it is started again", status)
            await self._node.close()
            while not self._node.is_running:
                restarts.note_failure()
                await restarts.pause()
                try:
                    async with asyncio.timeout(_RESTART_SECONDS):
                        await self._replace()
                except (ShoalError, TimeoutError) as error:
                    _logger.warning("p2pd could not be started again: %s", error)

    async def _replace(self) -> None:
        """Put another node in place of the one whose p2pd has ended, and announce again."""
        peers = [*self._access.peers, *self._list_meeting_points()]
        access = await reopen_access(self._access, list(dict.fromkeys(peers)))
        must_answer = access.peers if self._is_reader else ()
        self._node = await _Node.start(access, self._gate, must_answer)
        async with stopping_if_failed(access.p2p):
            if self._transport is not None:
                await self._transport.move(access.p2p)
        await self._neighbourhood.restore()
        for announcement, value in self._own.values():
            if announcement.expires_at > self._gate.wall():
                with suppress(DirectoryError):  # the next announcement is soon due
                    await self._publish(announcement, value)
        _logger.info("p2pd runs again, with %d neighbours", len(self._neighbourhood))

    def _list_meeting_points(self) -> list[PeerAddress]:
        """Return where peers can be joined that announce the models that we announce."""
        return [
            address
            for model_id in self._own
            for address in list_meeting_points(self._gate.list_current(model_id))
        ]

    @property
    def _other_keys(self) -> Sequence[str]:
        """The keys that are looked up along with every model."""
        return (self._gate.revocations_key,) if self.membership.is_private else ()

    @property
    def _access(self) -> Access:
        return self._node.access

    @property
    def _neighbourhood(self) -> Neighbourhood:
        return self._node.neighbourhood

    @property
    def _is_reader(self) -> bool:
        return not self._access.addresses

    @property
    def _initial_texts(self) -> str:
        return ", ".join(peer.text for peer in self._access.peers)

    def _check_is_running(self) -> None:
        if self._is_closed:
            raise DirectoryError("the directory was closed")
        if not self._node.is_running:
            raise DirectoryError("the p2pd process has ended; another one is being started")

    async def _store(self, key: str, subkey: str, value: bytes, expires_at: float) -> bool:
        """Return whether at least one replica holds the value now."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_OPERATION_SECONDS):
                return await self._node.replicas.store(key, subkey, value, expires_at)
        return False

    async def _search(self, *keys: str) -> None:
        """Ask everyone near the keys, which feeds the gate."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_OPERATION_SECONDS):
                await self._node.replicas.search(keys)
