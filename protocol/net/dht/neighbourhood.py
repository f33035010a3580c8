# hivemind's types are partial; what we say ourselves is checked.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
"""The other nodes of the DHT: the neighbours of a node, and the records that nodes keep.

hivemind forgets a neighbour that does not answer and never looks for it again; `Neighbourhood`
does. hivemind finds the nodes near a key, but its search brings all records from each node on its
way; `Replicas` stores records at these nodes and asks for those that are missing here.
"""

from __future__ import annotations

import asyncio
import logging
import random
import warnings
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import islice
from random import Random
from typing import Any, cast

from ...errors import DirectoryError, RemoteProtocolError, ShoalError, UsageError
from ...ids import PeerId
from ...records.announcements import Announcement, PeerState
from ..libp2p.multiaddrs import PeerAddress, find_listening
from ..libp2p.p2p_daemon import connect
from .gated_node import make_node_id
from .record_gate import (
    MAX_KNOWN,
    QUESTION,
    Entry,
    RecordGate,
    decode_answer,
    decode_question,
    encode_answer,
    encode_question,
    may_be_cut,
)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # about what hivemind itself uses
    from hivemind.dht.node import DHTNode
    from hivemind.dht.routing import DHTID
    from hivemind.p2p import P2P, PeerID
    from hivemind.p2p.p2p_daemon_bindings.utils import (
        P2PDaemonError,
        P2PHandlerError,
    )
    from hivemind.utils import MSGPackSerializer

_logger = logging.getLogger(__name__)

_ANSWER_SECONDS = 1.5
MAX_LOST = 128
LOST_SECONDS = 24 * 3600.0
"""How long a neighbour is remembered that fell silent."""

_LOST_AT_ONCE = 2
"""Most of the neighbours that are lost are gone for good."""

_MAX_MEETING_POINTS = 16
"""Other peers that are dialled at once when all neighbours are gone."""

_NUM_ASKED = 10
"""Nodes near a key that are asked: twice as many as keep a record, for some come and some go."""

_NODE_SECONDS = 1.5
"""How long one node may be waited for in a search; what it said by then counts."""

_MAX_ANSWERS = 32
"""Of one node in a search; they hold what a node keeps under a key at most, see RecordGate."""

_NUM_AT_ONCE = 32
"""Entries that are checked before others get their turn: what is new takes 0.2 ms for each."""


class Neighbourhood:
    """The neighbours of one node, and the initial peers, which it goes back to."""

    def __init__(self, node: DHTNode, p2p: P2P, initial_peers: Sequence[PeerAddress]) -> None:
        self._node = node
        self._p2p = p2p
        self.initial_peers = tuple(initial_peers)
        self._lost = LostNeighbours(Random())
        self._meeting_points: Sequence[PeerAddress] = ()

    def __len__(self) -> int:
        return len(self._table.uid_to_peer_id)

    def note_meeting_points(self, announced: Iterable[Announcement]) -> None:
        """Remember where others can join through those who say so, if there are any."""
        self._meeting_points = list_meeting_points(announced) or self._meeting_points

    async def restore(self) -> None:
        """Go back to the initial peers, and to others, after losing every neighbour."""
        if len(self):
            return
        self._node.blacklist.clear()
        await self._greet_listening([*self.initial_peers, *self._meeting_points])
        await asyncio.sleep(0)  # the answers enter the routing table in tasks of their own

    async def look_for_lost(self, announced: Iterable[Announcement], now: float) -> None:
        """Go back to the initial peers that are no neighbours, and to some others that were.

        An initial peer that begins its swarm again after a restart knows nobody, and would stay
        alone while the others know each other. So would the two parts of a network that was split,
        once the peers are gone through which they had joined. Those who are announced tell where
        they can be dialled; `now` is the wall second.
        """
        known = {peer_id.to_base58() for peer_id in self._table.uid_to_peer_id.values()}
        self._lost.note(known, announced, now)
        lost = [peer for peer in self.initial_peers if peer.peer_id not in known]
        if lost := [*lost, *self._lost.draw(_LOST_AT_ONCE)]:
            await self._greet_listening(lost)

    @property
    def _table(self) -> Any:
        return self._node.protocol.routing_table

    async def _greet_listening(self, peers: Sequence[PeerAddress]) -> None:
        # After a failed dial, libp2p refuses that address for 5 s, and longer each time.
        with suppress(DirectoryError):
            listening = await find_listening(peers)
            await asyncio.gather(*map(self._greet, listening))

    async def _greet(self, peer: PeerAddress) -> None:
        try:
            # A ping alone would need p2pd to remember an address, which it does for a while.
            async with asyncio.timeout(_ANSWER_SECONDS):
                await connect(self._p2p, peer.peer_id, peer.text.rpartition("/p2p/")[0])
        except (ShoalError, TimeoutError) as error:
            _logger.debug("the neighbour %s does not answer: %r", peer.text, error)
        else:
            await self._node.protocol.call_ping(PeerID.from_base58(peer.peer_id))


class LostNeighbours:
    """Remembers addresses of former neighbours: the newest ones, for a day.

    Who says goodbye is forgotten. Only who has answered as itself becomes a neighbour, so an
    announcement alone has nobody dialled.
    """

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._met: dict[PeerId, PeerAddress] = {}
        self._lost: dict[PeerId, tuple[PeerAddress, float]] = {}  # and since when, newest last

    def note(self, known: Collection[str], announced: Iterable[Announcement], now: float) -> None:
        """Note a neighbour at this wall second, with the address that it gives."""
        for peer_id in [peer_id for peer_id in self._met if peer_id not in known]:
            self._lost[peer_id] = self._met.pop(peer_id), now
        for peer in announced:
            if peer.state is PeerState.OFFLINE:
                self._met.pop(peer.peer_id, None)
                self._lost.pop(peer.peer_id, None)
            elif peer.peer_id in known and (address := find_meeting_point(peer)) is not None:
                self._met[peer.peer_id] = address
        for peer_id, (_, since) in list(self._lost.items()):
            is_too_old = now - since > LOST_SECONDS or len(self._lost) > MAX_LOST
            if is_too_old or peer_id in known:
                del self._lost[peer_id]

    def draw(self, num_most: int) -> list[PeerAddress]:
        """Return some of those that are lost, by lot."""
        lost = [address for address, _ in self._lost.values()]
        return self._rng.sample(lost, min(num_most, len(lost)))


def find_meeting_point(peer: Announcement) -> PeerAddress | None:
    """Return where others can join through a peer, if they can.

    None also where it says what is no address, such as 300.1.1.1: strangers name their hosts.
    """
    if (node := peer.as_node) is None:
        return None
    try:
        return PeerAddress.parse(str(node))
    except UsageError:
        return None


def list_meeting_points(announcements: Iterable[Announcement]) -> list[PeerAddress]:
    """Return addresses of some peers through which others can join."""
    found = (address for peer in announcements if (address := find_meeting_point(peer)))
    return list(islice(found, _MAX_MEETING_POINTS))


class Replicas:
    """Belongs to one node. What others send passes the gate, and is remembered there."""

    def __init__(self, node: DHTNode, p2p: P2P, gate: RecordGate) -> None:
        self._node = node
        self._p2p = p2p
        self._gate = gate
        self._known: dict[DHTID, dict[bytes, float]] = {}  # expiry by digest, of what has passed
        self._searches: set[asyncio.Task[Any]] = set()
        # Everybody asks for the same entries, and a digest takes a few microseconds.
        self._make_entry = lru_cache(maxsize=MAX_KNOWN)(Entry)

    async def serve(self) -> None:
        """From now on answer what is asked for records that stand here."""

        async def answer(question: bytes, _: object) -> bytes:
            key, known = decode_question(question)
            # What the asker refuses comes again each time, and must not keep the rest from it.
            stored = list(self._list_stored(DHTID.from_bytes(key)))
            random.shuffle(stored)
            return encode_answer(stored, known)

        await cast(Any, self._p2p)._client.add_unary_handler(QUESTION, answer)

    async def close(self) -> None:
        """Wait for searches that nobody waits for any more; call it when p2pd has ended."""
        if self._searches:
            await asyncio.wait(self._searches, timeout=_ANSWER_SECONDS)

    async def search(self, keys: Sequence[str]) -> None:
        """Have the gate see everything that stands under some keys."""
        if self._known:  # of keys that nobody asks for any more, one at a time
            self._list_known(next(iter(self._known)))
        await asyncio.gather(*(self._search(DHTID.generate(source=key)) for key in keys))

    async def store(self, key: str, subkey: str, value: bytes, expires_at: float) -> bool:
        """Store a record at the nodes that are nearest; return whether one of them took it."""
        key_id, entry = DHTID.generate(source=key), Entry(subkey, _pack(value), expires_at)
        candidates = deque(await self._find_nearest(key_id, exclude_self=not self._is_server))
        num_missing, is_stored = self._node.num_replicas, False
        while candidates and num_missing:
            chosen = [candidates.popleft() for _ in range(min(num_missing, len(candidates)))]
            answers = await asyncio.gather(*(self._store_at(p, key_id, entry) for p in chosen))
            num_missing -= sum(answer is not None for answer in answers)
            is_stored = is_stored or any(answers)
        return is_stored

    @property
    def _is_server(self) -> bool:
        return not cast(Any, self._node.protocol).client_mode

    async def _find_nearest(self, key_id: DHTID, *, exclude_self: bool = True) -> list[PeerID]:
        # Asked for another key with the same neighbours, nodes have no records to send along.
        sibling = DHTID(key_id ^ 1)
        search = asyncio.create_task(
            self._node.find_nearest_nodes(
                [sibling], k_nearest=_NUM_ASKED, exclude_self=exclude_self
            )
        )
        self._searches.add(search)
        search.add_done_callback(self._searches.discard)
        # hivemind loses tasks of a search that is cancelled, and asyncio would tell the user.
        found = await asyncio.shield(search)
        # Made-up nodes that are nearer must not displace those that we know.
        nodes = found[sibling] | dict(
            self._node.protocol.routing_table.get_nearest_neighbors(key_id, _NUM_ASKED)
        )
        nearest = (
            nodes[node_id]
            for node_id in sorted(nodes, key=key_id.xor_distance)
            if node_id == make_node_id(nodes[node_id])
        )
        alive = (peer_id for peer_id in nearest if peer_id not in self._node.blacklist)
        return list(islice(alive, _NUM_ASKED))

    async def _store_at(self, peer_id: PeerID, key_id: DHTID, entry: Entry) -> bool | None:
        """Return whether a node took a record; None without an answer."""
        if peer_id != self._node.peer_id:
            stored = await self._node.protocol.call_store(
                peer_id, [key_id], [entry.value], entry.expires_at, subkeys=[entry.subkey]
            )
            return None if stored is None else bool(stored) and all(stored)
        if not self._let_in(key_id, entry):
            return False
        return self._node.protocol.storage.store(
            key_id, entry.value, entry.expires_at, subkey=entry.subkey
        )

    async def _search(self, key_id: DHTID) -> None:
        """Ask one node, a second one, and then all others, which have little left to tell."""
        await self._let_in_new(key_id, list(self._list_stored(key_id)))
        replicas = await self._find_nearest(key_id)
        random.shuffle(replicas)  # it spreads the longest answers over all of them
        asking = iter(replicas)
        for num_asked in (1, 1, _NUM_ASKED):
            asked = islice(asking, num_asked)
            await asyncio.gather(*(self._learn_from(peer_id, key_id) for peer_id in asked))

    async def _learn_from(self, peer_id: PeerID, key_id: DHTID) -> None:
        """Ask a node until it has no more, or sends much that is of no use."""
        loop, seconds = asyncio.get_running_loop(), _NODE_SECONDS
        try:
            for _ in range(_MAX_ANSWERS):
                asked_at = loop.time()
                async with asyncio.timeout(seconds):
                    answer = await self._ask(peer_id, key_id)
                seconds -= loop.time() - asked_at
                num_new = await self._let_in_new(key_id, decode_answer(answer))
                if not num_new or not may_be_cut(answer):
                    return
        except (P2PDaemonError, P2PHandlerError, OSError, TimeoutError) as error:
            _logger.debug("%s did not send all records of a key: %r", peer_id, error)
        except RemoteProtocolError as error:
            _logger.debug(
                "%s answered a question for records with a malformed message: %s", peer_id, error
            )

    async def _ask(self, peer_id: PeerID, key_id: DHTID) -> bytes:
        question = encode_question(key_id.to_bytes(), self._list_known(key_id))
        client = cast(Any, self._p2p)._client
        return await client.call_unary_handler(peer_id, QUESTION, question)

    async def _let_in_new(self, key_id: DHTID, entries: Sequence[Entry]) -> int:
        """Have the gate see what is not known yet; return how much of it passed."""
        num_new = 0
        for number, entry in enumerate(entries, 1):
            if entry.digest not in self._known.get(key_id, ()):
                num_new += self._let_in(key_id, entry)
            if number % _NUM_AT_ONCE == 0:
                await asyncio.sleep(0)
        return num_new

    def _let_in(self, key_id: DHTID, entry: Entry) -> bool:
        """Return whether an entry passes the gate."""
        packed = _pack(entry.subkey)
        if not self._gate.accept(key_id.to_bytes(), packed, entry.value, entry.expires_at):
            return False
        known = self._known.setdefault(key_id, {})
        known[entry.digest] = entry.expires_at
        if len(known) > MAX_KNOWN:
            del known[next(iter(known))]
        return True

    def _list_known(self, key_id: DHTID) -> Sequence[bytes]:
        """Return the digests of what need not be sent again; forgets those that have expired."""
        now = self._gate.wall()
        known = self._known.pop(key_id, {})
        current = {digest: expires_at for digest, expires_at in known.items() if expires_at > now}
        if current:
            self._known[key_id] = current  # behind all others
        return list(current)

    def _list_stored(self, key_id: DHTID) -> Iterator[Entry]:
        stored: Any = self._node.protocol.storage.get(key_id)
        if stored is not None:
            for subkey, (value, expires_at) in list(stored.value.items()):
                yield self._make_entry(subkey, value, expires_at)


def _pack(value: str | bytes) -> bytes:
    return MSGPackSerializer.dumps(value)
