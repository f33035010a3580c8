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
import re
import warnings
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Any, cast

from ...endpoints import Endpoint, Relay
from ...errors import DirectoryError, LocalProtocolError, RemoteProtocolError, UsageError
from ...identity import Identity
from ...ids import ModelId, PeerId
from ...limits import MAX_ANNOUNCEMENT_LIFETIME_SECONDS
from ...membership.membership import Membership, begin_public
from ...membership.revocations import Revocations, sign_revocations
from ...records.announcements import Announcement, PeerState
from ..addresses import is_loopback
from ..clock import Clock
from ..libp2p.libp2p_transport import Libp2pTransport
from ..p2pd.multiaddrs import PeerAddress, list_relay_addresses
from ..p2pd.p2p_daemon import (
    answer_questions,
    child_of,
    make_ask,
    start_reading_p2pd,
    start_serving_p2pd,
    stop_p2pd,
)
from ..p2pd.swarm_question import find_swarm, make_silence_error
from ..relays.dial_back import DialBack
from ..relays.reachability import make_reachable
from ..relays.relay_keeper import RelayKeeper
from ..relays.relay_places import make_keeper
from .dht_validator import GateValidator
from .neighbourhood import Neighbourhood
from .newcomers import Newcomers
from .node_ids import distrust, make_node_id
from .record_gate import REVOCATIONS, RecordGate
from .record_intake import RecordIntake
from .replicas import Replicas

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # about what hivemind itself uses
    from hivemind.dht.node import DHTNode
    from hivemind.dht.protocol import ValidationError
    from hivemind.dht.routing import DHTID
    from hivemind.p2p import P2P
    from hivemind.utils import MSGPackSerializer
    from hivemind.utils.logging import use_hivemind_log_handler

logging.addLevelName(logging.WARNING, "WARNING")  # hivemind renames it for the whole process

_logger = logging.getLogger(__name__)

# With those of p2p_daemon.py, it keeps a join that cannot succeed below ten seconds.
_JOIN_ANSWER_SECONDS = 3.0
# How long one neighbour may keep an operation waiting before it counts as gone, and how long
# a whole operation may take: with 16 questions at once, three rounds of nothing but dead ones.
_ANSWER_SECONDS = 1.5
_OPERATION_SECONDS = 5.0
_CLOSE_SECONDS = 2.0

_NODE_OPTIONS: dict[str, Any] = {
    # Reads must be fresh, and nobody shall fill our memory with what we did not ask for.
    "cache_locally": False,
    "cache_nearest": 0,
    "cache_on_store": False,
    "cache_refresh_before_expiry": 0,
    "cache_size": -1,  # or a single record that a stranger puts there would hide all others
    "reuse_get_requests": False,
    "num_workers": 16,  # dead neighbours are found out side by side, not one after the other
    "blacklist_time": 10.0,
    "wait_timeout": _JOIN_ANSWER_SECONDS,
}


class HivemindDirectory:
    """One node of the DHT and its p2pd process. Implements Directory; made by `join`.

    Under the key of (swarm, model) the DHT keeps a dictionary from peer id to signed record.
    What is found or stored here passes the gate; lookups answer from what has passed.
    """

    def __init__(
        self,
        node: DHTNode,
        p2p: P2P,
        gate: RecordGate,
        initial_peers: Sequence[PeerAddress],
        addresses: Sequence[str],
        keeper: RelayKeeper | None,
    ) -> None:
        self._node = node
        self._p2p = p2p
        self._gate = gate
        self._neighbourhood = Neighbourhood(node, p2p, initial_peers)
        self._replicas = Replicas(node, p2p, gate)
        self._relay_addresses: Sequence[PeerAddress] = ()
        self._addresses = tuple(addresses)
        self._keeper = keeper
        self._is_closed = False

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
    ) -> HivemindDirectory:
        """Start a node and join through `initial_peers`; with none of them, begin a new DHT.

        With an identity, the node has its peer id. With `client_mode`, the node reads, and
        neither listens nor stores. `port` 0 takes any free one. Without a membership the swarm is
        the public one of the initial peers, or the one that this node begins. With an `endpoint`,
        others are asked to dial it; if they cannot, initial peers become our relays (see `relays`).

        Raises UsageError for a malformed address and when it cannot listen there, WrongSwarmError
        when the membership does not fit the initial peers, DirectoryError when no initial peer
        answers within ten seconds or the clock is off.
        """
        _quieten_hivemind()
        peers = [PeerAddress.parse(text) for text in initial_peers]
        if client_mode:
            p2p = await start_reading_p2pd(peers, identity)
        else:
            p2p = await start_serving_p2pd(peers, identity, listen_host, port)
        try:
            if peers:
                membership, peers = await find_swarm(peers, membership, make_ask(p2p))
            membership = membership or begin_public(_id_of(p2p))
            relays: Sequence[Relay] = ()  # that may be ours
            if endpoint is not None and not is_loopback(listen_host):
                p2p, relays = await make_reachable(
                    p2p, peers, identity, listen_host, port, endpoint
                )
                await DialBack(clock).start(p2p)
            gate = RecordGate(
                membership,
                clock,
                lambda key: DHTID.generate(source=key).to_bytes(),
                MSGPackSerializer.dumps,
            )
            addresses = [] if client_mode else await p2p.get_visible_maddrs()
            if not client_mode:
                await answer_questions(p2p, membership)
            node = await _start_node(p2p, gate, peers, client_mode)
            keeper = make_keeper(p2p, clock, relays) if relays else None
            directory = cls(node, p2p, gate, peers, list(map(str, addresses)), keeper)
            if not client_mode:
                await directory._replicas.serve()
        except BaseException:
            if child_of(p2p).returncode is None:
                await stop_p2pd(p2p)
            raise
        return directory

    def __repr__(self) -> str:
        return f"<HivemindDirectory {self._p2p.peer_id}, {len(self._neighbourhood)} neighbours>"

    @property
    def membership(self) -> Membership:
        """What we know of the swarm that was joined."""
        return self._gate.membership

    @property
    def addresses(self) -> Sequence[str]:
        """Multiaddrs with our peer id, `/ip4/127.0.0.1/tcp/4001/p2p/12D3KooW…`; see the seam."""
        return self._addresses

    @property
    def relays(self) -> Sequence[Relay]:
        """Who carries streams to us, since others cannot dial us; none when they can."""
        return () if self._keeper is None else self._keeper.relays

    async def renew_relays(self, model_id: ModelId) -> bool:
        """Take other relays for those that are gone; return whether they are not the same now.

        Those who serve the model are asked as well as initial peers. Does nothing without relays.
        """
        if self._keeper is None:
            return False
        return await self._keeper.look(lambda: self.lookup(model_id))

    def make_transport(self) -> Libp2pTransport:
        """Return a transport over the same p2pd; close it before the directory."""
        return Libp2pTransport(self._p2p, self.membership)

    async def announce(self, record: bytes) -> None:
        """See Directory.announce. Raises UsageError in client mode."""
        self._check_is_running()
        if self._is_reader:
            raise UsageError("a directory in client mode only reads; join without client_mode")
        try:
            announcement = self._gate.read(record)
        except RemoteProtocolError as error:
            raise LocalProtocolError(f"our own announcement is not valid: {error}") from error
        try:
            self._gate.add_own(announcement.model_id, record)
        except RemoteProtocolError as error:
            raise DirectoryError(f"the directory refused our announcement: {error}") from error
        await self._neighbourhood.restore(self._relay_addresses)
        key, value = self._gate.key_of(announcement.model_id), self._gate.wrap(record)
        expires_at = float(announcement.expires_at)
        if not await self._store(key, announcement.peer_id, value, expires_at):
            raise DirectoryError("no replica of the directory stored our announcement")
        if self.membership.is_private:
            await self._hand_on_revocations()
        if announcement.state is not PeerState.OFFLINE:
            announced = self._gate.list_current(announcement.model_id)
            await self._neighbourhood.look_for_lost(announced, self._gate.wall())

    async def lookup(self, model_id: ModelId) -> list[Announcement]:
        """See Directory.lookup."""
        self._check_is_running()
        for _ in range(2):  # the first search may find out that every known neighbour is gone
            await self._neighbourhood.restore(self._relay_addresses)
            await self._search(self._gate.watch(model_id), *self._other_keys)
            if len(self._neighbourhood):
                break
        else:
            if self._is_reader:
                raise DirectoryError(f"no peer of the directory answers: {self._initial_texts}")
        found = self._gate.list_current(model_id)
        drawn = random.sample(found, len(found))  # else made-up peers could be the first ones
        self._relay_addresses = list_relay_addresses(drawn) or self._relay_addresses
        return found

    async def revoke(self, peer_ids: Collection[PeerId]) -> Revocations:
        """Add peers to the owner's list, publish it and return it; peers hand it on from then on.

        With nobody to add it is only read. Raises UsageError unless we are the owner,
        DirectoryError when nobody took it.
        """
        self._check_is_running()
        await self._neighbourhood.restore(self._relay_addresses)
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

    async def _hand_on_revocations(self) -> None:
        """Learn of the newest list, and keep it from expiring: its owner need not be there."""
        await self._search(self._gate.revocations_key)
        value = self._gate.wrap_revocations()
        if value:
            await self._store_revocations(value)

    async def _store_revocations(self, value: bytes) -> bool:
        # A replica keeps what expires later: an old list must not outlive the newest one.
        expires_at = self._gate.wall() + MAX_ANNOUNCEMENT_LIFETIME_SECONDS
        return await self._store(self._gate.revocations_key, REVOCATIONS, value, expires_at)

    async def close(self) -> None:
        """See Directory.close."""
        if self._is_closed:
            return
        self._is_closed = True
        if child_of(self._p2p).returncode is None:
            try:
                async with asyncio.timeout(_CLOSE_SECONDS):
                    await self._node.shutdown()
            except Exception as error:  # noqa: BLE001 - it tells a p2pd that may be going away
                _logger.debug("the DHT node did not shut down in good order: %r", error)
        await stop_p2pd(self._p2p)

    @property
    def _other_keys(self) -> Sequence[str]:
        """What is asked for along with every model."""
        return (self._gate.revocations_key,) if self.membership.is_private else ()

    @property
    def _is_reader(self) -> bool:
        return not self._addresses

    @property
    def _initial_texts(self) -> str:
        return ", ".join(peer.text for peer in self._neighbourhood.initial_peers)

    def _check_is_running(self) -> None:
        if self._is_closed:
            raise DirectoryError("the directory was closed")
        if child_of(self._p2p).returncode is not None:
            raise DirectoryError("the p2pd process has ended; join the directory again")

    async def _store(self, key: str, subkey: str, value: bytes, expires_at: float) -> bool:
        """Return whether at least one replica holds the value now."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_OPERATION_SECONDS):
                return await self._replicas.store(key, subkey, value, expires_at)
        return False

    async def _search(self, *keys: str) -> None:
        """Ask everyone near the keys, which feeds the gate."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_OPERATION_SECONDS):
                await self._replicas.search(keys)


def _id_of(p2p: P2P) -> PeerId:
    return PeerId(cast(Any, p2p).peer_id.to_base58())


async def _start_node(
    p2p: P2P, gate: RecordGate, initial_peers: Sequence[PeerAddress], client_mode: bool
) -> DHTNode:
    try:
        node = await DHTNode.create(
            p2p=p2p,
            node_id=make_node_id(cast(Any, p2p).peer_id),
            initial_peers=[f"/p2p/{peer.peer_id}" for peer in initial_peers],
            client_mode=client_mode,
            record_validator=GateValidator(gate),
            **_NODE_OPTIONS,
        )
    except ValidationError as error:
        raise DirectoryError(_explain(error)) from error
    except RuntimeError as error:  # none of them responded
        raise make_silence_error(initial_peers) from error

    def forget(key: str, peer_id: str) -> None:
        stored: Any = node.protocol.storage.get(DHTID.generate(source=key))
        if stored is not None:
            del stored.value[peer_id]

    gate.when_displaced(forget)
    node.protocol.wait_timeout = _ANSWER_SECONDS
    distrust(node.protocol)
    Newcomers(node.protocol).watch()
    if not client_mode:
        RecordIntake(node.protocol, gate.wall).open(p2p)
    return node


def _explain(error: ValidationError) -> str:
    """Translate why the initial peers do not want us."""
    times = re.search(r"local: ([\d.]+), peer: ([\d.]+)", str(error))
    if times is None:
        return f"the initial peers cannot connect to us: {error}"
    ahead_seconds = float(times[1]) - float(times[2])
    direction = "ahead of" if ahead_seconds > 0 else "behind"
    return (
        f"the clock of this machine is {abs(ahead_seconds):.1f} seconds {direction} that of an "
        "initial peer: synchronise it with a time server (3 seconds are allowed)"
    )


def _quieten_hivemind() -> None:
    """Hand hivemind's messages to whoever set up logging, and only when debugging."""
    use_hivemind_log_handler("nowhere")
    is_debugging = _logger.isEnabledFor(logging.DEBUG)
    logging.getLogger("hivemind").setLevel(logging.DEBUG if is_debugging else logging.CRITICAL)
    warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"hivemind\.")
