"""What strangers may ask of a node of the DHT, and what it believes of others. No process."""

# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false
from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.p2p import PeerID
from hivemind.proto import dht_pb2
from swarm_values import number_peer
from virtual_time import run_virtual

from shoal.protocol.errors import RefusedError, RemoteProtocolError
from shoal.protocol.net.dht.dht_node import (
    CERTAIN_QUESTIONS,
    MAX_FIND_BYTES,
    MAX_KEYS,
    MOST_QUESTIONS,
    bound_questions,
    harden,
    make_node_id,
)

pytestmark = pytest.mark.network

KEY = DHTID(2**100)
GREEDY, HONEST = (PeerID.from_base58(number_peer(number)) for number in (2001, 2002))


class Node:
    """A node of the DHT with what stands before it, and no network."""

    def __init__(self, protocol: DHTProtocol) -> None:
        self.protocol = protocol
        self.num_pings = self.num_answers = 0
        self.handlers: dict[str, Any] = {"DHTProtocol.rpc_ping": self._ping}
        bound_questions(protocol, self.handlers)

    @classmethod
    async def make(cls) -> Node:
        p2p: Any = SimpleNamespace(peer_id=PeerID.from_base58(number_peer(2000)))
        protocol = await DHTProtocol.create(
            p2p,
            make_node_id(p2p.peer_id),
            bucket_size=20,
            depth_modulo=5,
            num_replicas=5,
            wait_timeout=1.0,
            client_mode=True,  # registers nothing at the p2p that is none
        )
        return cls(protocol)

    async def _ping(self, message: bytes, sender: PeerID) -> bytes:
        self.num_pings += 1
        return message

    async def ask(self, name: str, message: bytes, sender: PeerID = HONEST) -> bytes:
        answer = await self.handlers[f"DHTProtocol.rpc_{name}"](message, sender)
        self.num_answers += 1
        return answer

    async def find(self, num_keys: int) -> Any:
        request = dht_pb2.FindRequest(keys=[KEY.to_bytes()] * num_keys)
        answer = await self.ask("find", request.SerializeToString())
        return dht_pb2.FindResponse.FromString(answer).results


async def test_question_is_answered_for_few_keys_and_with_nodes_only() -> None:
    node = await Node.make()
    node.protocol.routing_table.add_or_update_node(make_node_id(GREEDY), GREEDY)
    node.protocol.storage.store(KEY, b"value", 2e9)

    (only,) = await node.find(1)
    assert (only.type, only.value) == (dht_pb2.NOT_FOUND, b"")
    assert list(only.nearest_peer_ids) == [GREEDY.to_bytes()]
    results = await node.find(2 * MAX_KEYS)
    assert [len(result.nearest_peer_ids) for result in results] == [1] * MAX_KEYS + [0] * MAX_KEYS
    with pytest.raises(RemoteProtocolError):
        await node.find(MAX_FIND_BYTES // 20)


async def test_nothing_is_stored_as_nodes_of_hivemind_would() -> None:
    node = await Node.make()
    request = dht_pb2.StoreRequest(
        keys=[KEY.to_bytes()], values=[b"v"], expiration_time=[2e9], in_cache=[False]
    )

    with pytest.raises(RemoteProtocolError):
        await node.ask("store", request.SerializeToString())

    assert len(node.protocol.storage) == len(node.protocol.cache) == 0


async def ask_until_refused(node: Node, kind: str, message: bytes = b"") -> None:
    for _ in range(2 * MOST_QUESTIONS):
        await node.ask(kind, message, GREEDY)


async def test_one_stranger_leaves_to_others_what_they_need() -> None:
    node = await Node.make()

    for kind in ("ping", "find"):
        with pytest.raises(RefusedError):
            await ask_until_refused(node, kind)
    num_answered = node.num_pings

    for _ in range(CERTAIN_QUESTIONS):
        await node.find(1)
    assert MOST_QUESTIONS * 3 // 4 <= num_answered == node.num_pings


def test_each_key_of_a_question_counts_as_one() -> None:
    """Or else 400 bytes cost 2 ms at a node with many neighbours, as often as short questions."""

    async def story() -> None:
        node = await Node.make()
        request = dht_pb2.FindRequest(keys=[KEY.to_bytes()] * MAX_KEYS)

        with pytest.raises(RefusedError):
            await ask_until_refused(node, "find", request.SerializeToString())

        assert node.num_answers == MOST_QUESTIONS * 3 // 4 // MAX_KEYS
        assert len(await node.find(1)) == 1

    run_virtual(story())


async def test_node_with_the_id_of_another_one_is_no_neighbour() -> None:
    node = await Node.make()
    harden(node.protocol)
    note: Any = node.protocol.update_routing_table

    await note(DHTID(KEY ^ 1), GREEDY)
    await note(make_node_id(HONEST), GREEDY)
    assert not node.protocol.routing_table.uid_to_peer_id

    await note(make_node_id(GREEDY), GREEDY)
    assert list(node.protocol.routing_table.uid_to_peer_id.values()) == [GREEDY]


async def test_new_node_is_handed_nothing() -> None:
    node = await Node.make()
    node.protocol.storage.store(KEY, b"value", 2e9)
    asked: list[PeerID] = []
    node.protocol.get_stub = asked.append
    harden(node.protocol)

    await node.protocol.update_routing_table(make_node_id(GREEDY), GREEDY)

    assert not asked


def test_nodes_named_with_ids_of_others_and_records_nobody_asked_for_are_dropped() -> None:
    honest, liar = (PeerID.from_base58(number_peer(number)) for number in (1, 2))
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
