# hivemind's types are partial; what we say ourselves is checked.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
"""The other nodes of the DHT: which of them are asked, what they tell, and how a node comes back.

hivemind forgets a neighbour that does not answer and never looks for it again; `Neighbourhood`
does. `RecordNodes` exchanges records with nodes.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import zip_longest
from typing import Any, TypeVar, cast

from ...endpoints import Endpoint, Relay
from ...errors import DirectoryError, RemoteProtocolError, ShoalError, UnavailableError, UsageError
from ...fair_share import name_network
from ...ids import MODEL_ID_CHARACTERS, ModelId, SessionId
from ...messages.codec import check_kind, decode_frame, encode_frame
from ...messages.records import MAX_RECORDS_BYTES, RecordFetch, Records
from ...records.announcements import Announcement
from ...records.swarm_records import SwarmRecords
from ..clock import Clock
from ..libp2p.hivemind_packages import importing_hivemind
from ..libp2p.multiaddrs import PeerAddress, find_listening
from ..libp2p.p2p_daemon import connect, list_peers
from ..tcp.dial_rules import DialRules
from .dht_node import make_node_id

with importing_hivemind():
    from hivemind.dht.node import DHTNode
    from hivemind.dht.routing import DHTID
    from hivemind.p2p import P2P, PeerID
    from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError, P2PHandlerError

_logger = logging.getLogger(__name__)

Rules = DialRules | None
"""Which announced addresses may be dialled; None: all of them."""

_Node = TypeVar("_Node", bound=Hashable)

_ANSWER_SECONDS = 1.5

_OPERATION_SECONDS = 5.0
"""How long an operation may take: with 16 questions at once, three rounds of only dead nodes."""

_QUESTION = "shoal.records.2"
"""The name of the libp2p protocol that carries a question for records there and an answer back."""

_NODE_SECONDS = 1.5
"""How long one answer of a node may take; it arrives where a link carries 0.3 Mbit/s. The nodes
that are asked alone have no longer for all of theirs."""

_MAX_ANSWERS = 32
"""Of one node in a search."""

_ENTER_SECONDS = 3.0

_NUM_NEAREST = 10
"""Nodes nearest to a key that are asked: some come and some go."""

_NUM_OTHERS = 6
"""Other nodes that are asked as well. An attacker can make identities that are nearest to a key
within milliseconds; these nodes are chosen without regard to the key."""

_MOST_GREETED = 16
"""Peers that are dialled at once when all neighbours are gone."""


def choose_nodes(
    nearest: Sequence[_Node],
    networks: Mapping[_Node, Hashable],
    trusted: Collection[_Node],
    rng: random.Random,
) -> list[_Node]:
    """Return the nodes to ask for the records of a key: the nearest ones, then some others.

    The others are first those that are `trusted`, as the owner gave their addresses; then one of
    each network by lot, so that many identities of one machine count as one. `networks` has all
    nodes that are known.
    """
    chosen = dict.fromkeys(nearest[:_NUM_NEAREST])
    others = [node for node in networks if node not in chosen]
    rng.shuffle(others)
    others.sort(key=lambda node: node not in trusted)
    used: set[Hashable] = set()
    for node in others:
        if node in trusted or networks[node] not in used:
            used.add(networks[node])
            chosen[node] = None
    return list(chosen)[: _NUM_NEAREST + _NUM_OTHERS]


class Neighbourhood:
    """The neighbours of one node, and the initial peers, which it goes back to."""

    def __init__(
        self,
        node: DHTNode,
        p2p: P2P,
        initial_peers: Sequence[PeerAddress],
        rules: Rules,
    ) -> None:
        """A peer has the `rules` of its transport for announced nodes as well."""
        self._rules = rules
        self._node = node
        self._p2p = p2p
        self._initial_peers = tuple(initial_peers)
        self._rng = random.Random()
        self._searches: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        return len(self._table.uid_to_peer_id)

    @property
    def peer_ids(self) -> set[str]:
        """The ids of the neighbours: of nodes that have asked or answered something."""
        return {str(peer_id) for peer_id in self._table.uid_to_peer_id.values()}

    async def find_nodes(self, key: str) -> list[PeerID]:
        """Return the nodes to ask for what stands under a key, and to bring it to."""
        return await self._search(DHTID.generate(source=key))

    async def enter(self) -> None:
        """Meet the nodes that are near our own, once some are known."""
        if len(self):
            with suppress(TimeoutError):
                async with asyncio.timeout(_ENTER_SECONDS):
                    await self._search(self._node.node_id)

    async def _search(self, key_id: DHTID) -> list[PeerID]:
        search = asyncio.create_task(self._find_nodes(key_id))
        self._searches.add(search)
        search.add_done_callback(self._searches.discard)
        # hivemind loses tasks and sockets of a search that is cancelled, and Python would say so.
        return await asyncio.shield(search)

    async def _find_nodes(self, key_id: DHTID) -> list[PeerID]:
        found = await self._node.find_nearest_nodes(
            [key_id], k_nearest=_NUM_NEAREST, exclude_self=True
        )
        # Made-up nodes that are nearer must not displace those that we know.
        nodes = found[key_id] | dict(self._table.get_nearest_neighbors(key_id, _NUM_NEAREST))
        nearest = [
            nodes[node_id]
            for node_id in sorted(nodes, key=key_id.xor_distance)
            if node_id == make_node_id(nodes[node_id])
            if nodes[node_id] not in self._node.blacklist
        ]
        trusted = {PeerID.from_base58(peer.peer_id) for peer in self._initial_peers}
        return choose_nodes(nearest, await self._find_networks(), trusted, self._rng)

    async def _find_networks(self) -> dict[PeerID, Hashable]:
        """Return all neighbours with the networks that they are connected from."""
        hosts: dict[str, str] = {}
        with suppress(ShoalError):
            hosts = {peer_id: text.split("/")[2] for peer_id, text in await list_peers(self._p2p)}
        return {
            peer_id: name_network(hosts.get(peer_id.to_base58()))
            for peer_id in self._table.uid_to_peer_id.values()
        }

    async def restore(self, known: Iterable[Announcement]) -> None:
        """After losing every neighbour, go back to the initial peers and to `known` ones."""
        if len(self):
            return
        self._node.blacklist.clear()
        peers = [*known]
        self._rng.shuffle(peers)
        # The first address of each before the second of any.
        turns = zip_longest(*(list_addresses([peer]) for peer in peers))
        others = [address for turn in turns for address in turn if address is not None]
        await self._greet_listening(self._initial_peers, others[:_MOST_GREETED])
        await asyncio.sleep(0)  # the answers enter the routing table in tasks of their own

    async def return_to_initial_peers(self) -> None:
        """Go back to the initial peers that are no neighbours.

        One that begins its swarm again after a restart knows nobody, and would stay alone while the
        others know each other.
        """
        neighbours = self.peer_ids | {str(self._p2p.peer_id)}
        away = [peer for peer in self._initial_peers if peer.peer_id not in neighbours]
        if away:
            await self._greet_listening(away, ())

    async def close(self) -> None:
        """Wait for searches that nobody waits for any more; call it when p2pd has ended."""
        if self._searches:
            await asyncio.wait(self._searches, timeout=_ANSWER_SECONDS)

    @property
    def _table(self) -> Any:
        return self._node.protocol.routing_table

    async def _greet_listening(
        self, peers: Sequence[PeerAddress], announced: Sequence[PeerAddress]
    ) -> None:
        allowed = [*filter(None, await asyncio.gather(*map(self._allow, announced)))]
        listening: list[PeerAddress] = []
        # After a failed dial, libp2p refuses that address for 5 s, and longer each time.
        with suppress(DirectoryError):
            listening = await find_listening([*peers, *allowed])
        for peer in allowed:
            if self._rules is not None and peer not in listening:
                self._rules.note_failure(peer.host)
        await asyncio.gather(*map(self._greet, listening))

    async def _allow(self, peer: PeerAddress) -> PeerAddress | None:
        """Return where an announced address leads, None where it must not be dialled."""
        if self._rules is None or peer.tcp_port is None:
            return peer
        with suppress(UnavailableError):
            place = Endpoint(peer.host, peer.tcp_port)
            found = await self._rules.resolve(place, _ANSWER_SECONDS)
            return PeerAddress.parse(str(Relay(found.host, found.port, peer.peer_id)))
        return None

    async def _greet(self, peer: PeerAddress) -> None:
        try:
            # A ping alone would need p2pd to remember an address, which it does for a while.
            async with asyncio.timeout(_ANSWER_SECONDS):
                await connect(self._p2p, peer.peer_id, peer.text.rpartition("/p2p/")[0])
        except (ShoalError, TimeoutError) as error:
            _logger.debug("the neighbour %s does not answer: %r", peer.text, error)
        else:
            await self._node.protocol.call_ping(PeerID.from_base58(peer.peer_id))


class RecordNodes:
    """Asks nodes of the DHT for records, and answers them, as peers do over their streams.

    Questions and answers are sealed where the swarm is private: only members are told anything.
    """

    def __init__(
        self,
        neighbourhood: Neighbourhood,
        p2p: P2P,
        records: SwarmRecords,
        clock: Clock,
        rng: random.Random,
    ) -> None:
        self._neighbourhood = neighbourhood
        self._client: Any = cast(Any, p2p)._client
        self._records = records
        self._clock = clock
        self._rng = rng

    async def search(self, model_id: ModelId) -> bool:
        """Ask one node, a second one, and then all others, which have little left to tell.

        Return whether one of them answered.
        """
        heard: set[PeerID] = set()
        with suppress(TimeoutError):
            async with asyncio.timeout(_OPERATION_SECONDS):
                nodes = await self._find_nodes(model_id)
                self._rng.shuffle(nodes)  # it spreads the longest answers over all of them
                for node in nodes[:2]:  # neither may take the time for the others
                    with suppress(TimeoutError):
                        async with asyncio.timeout(_NODE_SECONDS):
                            await self._learn_from(node, model_id, heard)
                await asyncio.gather(*(self._learn_from(n, model_id, heard) for n in nodes[2:]))
        return bool(heard)

    async def bring(self, model_id: ModelId, value: bytes) -> list[bool]:
        """Bring a value to nodes; return of each that answers whether it keeps it."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_OPERATION_SECONDS):
                nodes = await self._find_nodes(model_id)
                fetch = RecordFetch(SessionId(secrets.token_bytes(16)), value, b"", 1)
                answers = await asyncio.gather(*(self._ask(n, model_id, fetch) for n in nodes))
                return [answer.has_own for answer in answers if answer is not None]
        return []

    async def _find_nodes(self, model_id: ModelId) -> list[PeerID]:
        key = f"shoal directory 3\0{self._records.membership.swarm_id.hex()}\0{model_id}"
        return await self._neighbourhood.find_nodes(key)

    async def _learn_from(self, node: PeerID, model_id: ModelId, heard: set[PeerID]) -> None:
        """Ask a node until it has nothing new; note whether it is heard."""
        for _ in range(_MAX_ANSWERS):
            fetch = self._records.make_fetch(model_id, self._clock.wall(), self._rng)
            answer = await self._ask(node, model_id, fetch)
            if answer is None:
                return
            heard.add(node)
            new = [value for value in answer.records if not self._records.is_known(value)]
            num_taken, now = 0, self._clock.wall()
            for num in self._records.take_in_turns(model_id, new, now):
                num_taken += num
                await asyncio.sleep(0)
            if not num_taken or sum(map(len, answer.records)) < MAX_RECORDS_BYTES // 2:
                return

    async def _ask(self, node: PeerID, model_id: ModelId, fetch: RecordFetch) -> Records | None:
        """Return the answer of a node to a question, None where there is none."""
        question = self._records.seal(model_id.encode() + encode_frame(fetch))
        try:
            async with asyncio.timeout(_NODE_SECONDS):
                answer = await self._client.call_unary_handler(node, _QUESTION, question)
            records = check_kind(decode_frame(self._records.open(answer)), Records, "a node")
            if records.question != fetch.question:
                raise RemoteProtocolError("the answer is to another question")
            return records
        except (P2PDaemonError, P2PHandlerError, OSError, TimeoutError) as error:
            _logger.debug("%s did not answer a question for records: %r", node, error)
        except RemoteProtocolError as error:
            _logger.debug("%s answered a question for records with junk: %s", node, error)
        return None

    async def answer_questions(self) -> None:
        """From now on answer what is asked for records."""

        async def handle(question: bytes, sender: PeerID) -> bytes:
            content = self._records.open(question)
            model_id = ModelId(content[:MODEL_ID_CHARACTERS].decode("ascii", "replace"))
            fetch = check_kind(decode_frame(content[MODEL_ID_CHARACTERS:]), RecordFetch, "a node")
            now, records = self._clock.wall(), self._records
            answer = records.answer(str(sender), model_id, fetch, now, self._rng)
            return records.seal(encode_frame(answer))

        await self._client.add_unary_handler(_QUESTION, handle)


def list_addresses(known: Iterable[Announcement]) -> list[PeerAddress]:
    """Return where those can be joined that say so, at any of their hosts.

    Some say what is no address, such as 300.1.1.1: strangers name their hosts.
    """
    found: list[PeerAddress] = []
    for peer in known:
        for node in peer.as_nodes:
            with suppress(UsageError):
                found.append(PeerAddress.parse(str(node)))
    return found
