"""What a node of the DHT lets strangers store and look up at once. No process."""

# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false
from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from announcements import MODEL
from dht_records import make_entries, make_gate, number_peer
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.p2p import PeerID
from hivemind.proto import dht_pb2
from hivemind.utils import MSGPackSerializer

from shoal.protocol.errors import RemoteProtocolError
from shoal.protocol.limits import MAX_ANNOUNCEMENT_BYTES
from shoal.protocol.membership.membership import NONCE_BYTES, SWARM_ID_BYTES
from shoal.protocol.net.dht.gated_node import (
    MAX_FIND_BYTES,
    MAX_KEYS,
    MAX_RECORDS,
    MAX_STORE_BYTES,
    MAX_STORED_AT_ONCE,
    NUM_FOR_CERTAIN,
    WINDOW_SECONDS,
    GateValidator,
    RecordIntake,
    harden,
    make_node_id,
)
from shoal.protocol.net.dht.record_gate import Entry

pytestmark = pytest.mark.network

GREEDY, HONEST = number_peer(2001), number_peer(2002)


class Node:
    """A node of the DHT with what stands before it, and no network."""

    def __init__(self, protocol: DHTProtocol) -> None:
        self.protocol = protocol
        self.gate = make_gate()
        self.key = DHTID.generate(source=self.gate.watch(MODEL))
        protocol.record_validator = GateValidator(self.gate)
        self.now = 0.0
        self.intake = RecordIntake(protocol, lambda: self.now)

    @classmethod
    async def make(cls) -> Node:
        p2p: Any = SimpleNamespace(peer_id=number_peer(2000))
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

    @property
    def num_stored(self) -> int:
        stored: Any = self.protocol.storage.get(self.key)
        return len(stored.value) if stored else 0

    def encode(self, entries: Sequence[Entry]) -> bytes:
        """Return what hivemind's nodes send to have entries stored, each under its own sub-key."""
        request = dht_pb2.StoreRequest(
            keys=[self.key.to_bytes()] * len(entries),
            subkeys=[MSGPackSerializer.dumps(entry.subkey) for entry in entries],
            values=[entry.value for entry in entries],
            expiration_time=[entry.expires_at for entry in entries],
            in_cache=[False] * len(entries),
        )
        return request.SerializeToString()

    async def store(self, entries: Sequence[Entry], sender: PeerID = HONEST) -> list[bool]:
        answer = await self.intake.store(self.encode(entries), sender)
        return list(dht_pb2.StoreResponse.FromString(answer).store_ok)


def cut(entries: Sequence[Entry]) -> list[Sequence[Entry]]:
    starts = range(0, len(entries), MAX_STORED_AT_ONCE)
    return [entries[start : start + MAX_STORED_AT_ONCE] for start in starts]


@pytest.mark.parametrize("num_senders", [1, 10])
async def test_flood_of_valid_records_is_checked_in_portions_and_others_do_not_wait_for_it(
    num_senders: int,
) -> None:
    node = await Node.make()
    *flood, honest = make_entries(10 * MAX_STORED_AT_ONCE + 1)
    flooding = [
        asyncio.create_task(node.store(part, number_peer(3000 + number % num_senders)))
        for number, part in enumerate(cut(flood))
    ]
    announcing = asyncio.create_task(node.store([honest]))
    num_before, steps = 0, list[int]()

    while not all(task.done() for task in flooding):
        if not announcing.done():
            num_before = node.num_stored
        stored = node.num_stored
        await asyncio.sleep(0)
        steps.append(node.num_stored - stored)

    assert await announcing == [True]
    assert num_before <= (num_senders + 1) * MAX_STORED_AT_ONCE
    assert max(steps) <= MAX_STORED_AT_ONCE + 1
    assert node.num_stored == len(flood) + 1


async def test_one_sender_has_half_of_a_window_checked_and_others_what_they_need() -> None:
    node = await Node.make()
    junk = [Entry(f"peer {number}", b"\xc4\x00", 2e9) for number in range(MAX_RECORDS)]
    junk_parts = cut(junk)
    entries = make_entries(NUM_FOR_CERTAIN + 1)
    asked: list[int] = []
    accept = node.gate.accept

    def count(*record: Any) -> bool:
        asked.append(1)
        return accept(*record)

    node.gate.accept = count

    for part in junk_parts:
        assert not any(await node.store(part, GREEDY))
    assert MAX_RECORDS // 2 - MAX_STORED_AT_ONCE < len(asked) <= MAX_RECORDS // 2
    for number in range(200):  # as many as come, each gets its few
        assert not any(await node.store(junk[:NUM_FOR_CERTAIN], number_peer(3000 + number)))
    assert all(await node.store(entries[:-1]))
    assert not all(await node.store(entries[-1:]))

    node.now += WINDOW_SECONDS
    assert all(await node.store(entries[-1:]))


async def test_messages_that_no_node_sends_are_refused_unread() -> None:
    node = await Node.make()
    entries = make_entries(MAX_STORED_AT_ONCE + 1)
    dictionary = DictionaryDHTValue()
    dictionary.store(entries[0].subkey, entries[0].value, entries[0].expires_at)
    whole = dht_pb2.StoreRequest.FromString(node.encode(entries[:1]))
    whole.subkeys[0], whole.values[0] = b"", MSGPackSerializer.dumps(dictionary)
    short = dht_pb2.StoreRequest.FromString(node.encode(entries[:2]))
    del short.subkeys[1]

    too_many = await node.store(entries)
    answers = [
        dht_pb2.StoreResponse.FromString(await node.intake.store(message, HONEST)).store_ok
        for message in (
            whole.SerializeToString(),
            short.SerializeToString(),
            b"",
            bytes(MAX_STORE_BYTES + 1),
        )
    ]

    assert too_many == [False] * len(entries)
    assert [list(answer) for answer in answers] == [[False], [False, False], [], []]
    assert node.num_stored == 0
    assert all(await node.store(entries[:-1]))


async def test_as_many_of_the_largest_records_as_one_message_may_have_fit_into_it() -> None:
    node = await Node.make()
    certificate_and_tag = 64 + 16
    sealed = SWARM_ID_BYTES + NONCE_BYTES + certificate_and_tag + MAX_ANNOUNCEMENT_BYTES
    value = MSGPackSerializer.dumps(bytes(sealed))
    entry = Entry(HONEST.to_base58(), value, 2e9)
    assert len(node.encode([entry] * MAX_STORED_AT_ONCE)) < MAX_STORE_BYTES


async def test_question_is_answered_for_few_keys_and_without_what_stands_there() -> None:
    node = await Node.make()
    await node.store(make_entries(1))
    node.protocol.routing_table.add_or_update_node(make_node_id(GREEDY), GREEDY)

    async def find(num_keys: int) -> Any:
        request = dht_pb2.FindRequest(keys=[node.key.to_bytes()] * num_keys)
        answer = await node.intake.find(request.SerializeToString(), HONEST)
        return dht_pb2.FindResponse.FromString(answer).results

    assert node.num_stored == 1
    (only,) = await find(1)
    assert (only.type, only.value) == (dht_pb2.NOT_FOUND, b"")
    assert list(only.nearest_peer_ids) == [GREEDY.to_bytes()]
    results = await find(2 * MAX_KEYS)
    assert [len(result.nearest_peer_ids) for result in results] == [1] * MAX_KEYS + [0] * MAX_KEYS
    with pytest.raises(RemoteProtocolError):
        await find(MAX_FIND_BYTES // 20)


async def test_node_with_the_id_of_another_one_is_no_neighbour() -> None:
    node = await Node.make()
    harden(node.protocol)
    note: Any = node.protocol.update_routing_table

    await note(DHTID(node.key ^ 1), GREEDY)
    await note(make_node_id(HONEST), GREEDY)
    assert not node.protocol.routing_table.uid_to_peer_id

    await note(make_node_id(GREEDY), GREEDY)
    assert list(node.protocol.routing_table.uid_to_peer_id.values()) == [GREEDY]


async def test_new_node_is_handed_no_records() -> None:
    node = await Node.make()
    await node.store(make_entries(1))
    asked: list[PeerID] = []
    node.protocol.get_stub = asked.append
    harden(node.protocol)

    await node.protocol.update_routing_table(make_node_id(GREEDY), GREEDY)

    assert node.num_stored == 1
    assert not asked
