"""Which nodes of the DHT are asked for records, and what is made of their answers. No process."""

# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false
from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from announcements import MODEL
from dht_records import make_entries, make_gate, number_peer
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DHTLocalStorage
from hivemind.p2p import PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError
from hivemind.proto import dht_pb2

from shoal.protocol.net.dht import neighbourhood
from shoal.protocol.net.dht.gated_node import harden, make_node_id
from shoal.protocol.net.dht.neighbourhood import Replicas
from shoal.protocol.net.dht.record_gate import (
    MAX_ANSWER_BYTES,
    Entry,
    decode_question,
    encode_answer,
)

pytestmark = pytest.mark.network

NUM_MANY = 600
Answer = Callable[[bytes], Awaitable[bytes]]


class World:
    """A reader of the DHT, and the nodes that hivemind finds for it, by what they answer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, nodes: Sequence[Answer]) -> None:
        monkeypatch.setattr(neighbourhood.random, "shuffle", lambda things: None)
        self.gate = make_gate()
        self.key = self.gate.watch(MODEL)
        self.num_asked = 0
        peers = [number_peer(1000 + number) for number in range(len(nodes))]
        key_id = DHTID.generate(source=self.key)
        # As hivemind finds them: the nearest first.
        peers.sort(key=lambda peer: make_node_id(peer).xor_distance(key_id))
        self._answers = dict(zip(peers, nodes, strict=True))
        self.found = {make_node_id(peer): peer for peer in peers}
        self.table: dict[DHTID, PeerID] = {}
        self.node: Any = SimpleNamespace(
            peer_id=number_peer(999),
            num_replicas=5,
            blacklist=set(),
            find_nearest_nodes=self._find,
            protocol=SimpleNamespace(
                client_mode=True, storage=DHTLocalStorage(), routing_table=self
            ),
        )
        p2p: Any = SimpleNamespace(_client=SimpleNamespace(call_unary_handler=self._call))
        self.replicas = Replicas(self.node, p2p, self.gate)

    @property
    def num_found(self) -> int:
        return len(self.gate.list_current(MODEL))

    def get_nearest_neighbors(self, key_id: DHTID, k: int) -> list[tuple[DHTID, PeerID]]:
        return list(self.table.items())[:k]

    async def _find(self, queries: Sequence[DHTID], **_: Any) -> Any:
        return dict.fromkeys(queries, self.found)

    async def _call(self, peer_id: PeerID, _: str, question: bytes) -> bytes:
        self.num_asked += 1
        return await self._answers[peer_id](question)


def hold(entries: Sequence[Entry]) -> Answer:
    async def answer(question: bytes) -> bytes:
        return encode_answer(entries, decode_question(question)[1])

    return answer


async def be_gone(_: bytes) -> bytes:
    raise P2PDaemonError("gone")


async def be_silent(_: bytes) -> bytes:
    await asyncio.Event().wait()
    return b""


def test_what_does_not_fit_into_one_answer_comes_with_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entries = make_entries(NUM_MANY)
    assert sum(len(entry.encode()) for entry in entries) > MAX_ANSWER_BYTES
    world = World(monkeypatch, [hold(entries)])

    asyncio.run(world.replicas.search([world.key]))

    assert world.num_found == NUM_MANY
    assert world.num_asked > 1


async def test_what_came_counts_while_another_node_is_still_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nodes = [be_gone, be_gone, hold(make_entries(1)), be_silent]
    world = World(monkeypatch, nodes)
    searching = asyncio.create_task(world.replicas.search([world.key]))

    for _ in range(100):
        await asyncio.sleep(0)
    searching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await searching

    assert world.num_found == 1


def test_node_that_sends_much_of_no_use_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    junk = [Entry(f"peer {number}", bytes(1000), 2e9) for number in range(500)]
    world = World(monkeypatch, [hold(junk)])

    asyncio.run(world.replicas.search([world.key]))

    assert (world.num_asked, world.num_found) == (1, 0)


async def test_others_get_their_turn_while_many_records_are_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A signature takes 0.1 ms, and a peer serves sessions meanwhile."""
    entries = make_entries(200)
    world = World(monkeypatch, [hold(entries)])
    steps: list[int] = []
    searching = asyncio.create_task(world.replicas.search([world.key]))

    while not searching.done():
        before = world.num_found
        await asyncio.sleep(0)
        steps.append(world.num_found - before)

    assert world.num_found == 200
    assert max(steps) <= 50


def test_made_up_nodes_do_not_hide_those_that_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """A liar is ten nodes that are nearer than any, and one that is not its own."""
    liar, honest = hold([]), hold(make_entries(1))
    world = World(monkeypatch, [liar, honest])
    (_, liars_peer), (honest_id, honest_peer) = world.found.items()
    world.table = {honest_id: honest_peer}
    key_id = DHTID.generate(source=world.key)

    world.found = {DHTID(key_id ^ number): liars_peer for number in range(2, 12)}
    asyncio.run(world.replicas.search([world.key]))
    assert world.num_found == 1


def test_nodes_named_with_ids_of_others_and_records_nobody_asked_for_are_dropped() -> None:
    honest, liar = number_peer(1), number_peer(2)
    ids = [make_node_id(honest), make_node_id(honest), DHTID(5), DHTID(6)]
    result = dht_pb2.FindResult(
        type=dht_pb2.FOUND_DICTIONARY,
        value=b"junk",
        nearest_node_ids=[node_id.to_bytes() for node_id in ids],
        nearest_peer_ids=[peer.to_bytes() for peer in (honest, liar, liar, honest)],
    )

    class Stub:
        async def rpc_find(self, _: Any, **options: float) -> Any:
            return dht_pb2.FindResponse(results=[result] * 3)

        async def rpc_ping(self) -> str:
            return "as before"

    protocol: Any = SimpleNamespace(get_stub=lambda peer: Stub(), update_routing_table=None)
    harden(protocol)
    stub = protocol.get_stub(honest)
    request = dht_pb2.FindRequest(keys=[bytes(20)])
    answer = asyncio.run(stub.rpc_find(request, timeout=1.0))

    (only,) = answer.results
    assert only.type == dht_pb2.NOT_FOUND
    assert not only.value
    assert list(only.nearest_peer_ids) == [honest.to_bytes()]
    assert list(only.nearest_node_ids) == [make_node_id(honest).to_bytes()]
    assert asyncio.run(stub.rpc_ping()) == "as before"


def test_what_was_known_of_keys_that_nobody_asks_for_any_more_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(monkeypatch, [hold(make_entries(1))])
    known = world.replicas._known
    known[DHTID(1)], known[DHTID(2)] = {b"expired.": 1.0}, {b"expired.": 1.0}
    known[DHTID(3)] = {b"current.": 4e9}

    for _ in range(4):
        asyncio.run(world.replicas.search([world.key]))

    assert set(known) == {DHTID(3), DHTID.generate(source=world.key)}
