"""Valid records of strangers must not keep a node of the DHT from answering. Starts real p2pds."""

# pyright: reportAttributeAccessIssue=false
import asyncio
import time
from typing import Any

import pytest
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.proto import dht_pb2
from hivemind.utils import MSGPackSerializer

from shoal.protocol.endpoints import Endpoint
from shoal.protocol.identity import Identity
from shoal.protocol.ids import ModelId
from shoal.protocol.net.clock import SystemClock
from shoal.protocol.net.dht.hivemind_directory import HivemindDirectory
from shoal.protocol.records.announcements import Announcement, PeerState, sign_announcement
from shoal.protocol.spans import Span

pytestmark = pytest.mark.network

MODEL = ModelId("a" * 32)


@pytest.fixture
def expires_at() -> float:
    """Each test takes it when it begins: that may be long after they were collected."""
    return time.time() + 300


def make_large_record(number: int, expires_at: float) -> tuple[Announcement, bytes]:
    """Return what a peer may announce, nearly as large as it may be."""
    identity = Identity(number.to_bytes(32, "big"))
    announcement = Announcement(
        peer_id=identity.peer_id,
        model_id=MODEL,
        num_blocks=8,
        span=Span(0, 8),
        state=PeerState.ONLINE,
        endpoints=(Endpoint("h" * 250, 65535, "c" * 64),) * 8,
        min_version=1,
        max_version=1,
        weights="int8",
        compute_dtype="bf16",
        sequence=1,
        issued_at=expires_at - 300,
        expires_at=expires_at,
        software="s" * 64,
    )
    return announcement, sign_announcement(identity, announcement)


def make_records(
    directory: HivemindDirectory, num_records: int, expires_at: float
) -> dict[str, bytes]:
    """Return valid values by sub-key, as they stand under the key of the model."""
    records = [make_large_record(number, expires_at) for number in range(num_records)]
    return {
        announcement.peer_id: MSGPackSerializer.dumps(directory._gate.wrap(record))
        for announcement, record in records
    }


def fill(directory: HivemindDirectory, records: dict[str, bytes], expires_at: float) -> None:
    """Have a node store records, of those that pass, as if they had come one by one for long."""
    protocol, gate = directory._node.protocol, directory._gate
    key = DHTID.generate(source=gate.key_of(MODEL))
    for subkey, value in records.items():
        if gate.accept(key.to_bytes(), MSGPackSerializer.dumps(subkey), value, expires_at):
            protocol.storage.store_subkey(key, subkey, value, expires_at)


def test_flooded_node_still_answers(expires_at: float) -> None:
    async def main() -> None:
        flooded = await HivemindDirectory.join((), identity=None, clock=SystemClock())
        reader = await HivemindDirectory.join(
            flooded.addresses, identity=None, clock=SystemClock(), client_mode=True
        )
        try:
            fill(flooded, make_records(flooded, 2000, expires_at), expires_at)

            theirs = await flooded.lookup(MODEL)
            found = await reader.lookup(MODEL)
            while 0 < len(found) < len(theirs):  # each lookup brings more of them
                num_before = len(found)
                found = await reader.lookup(MODEL)
                assert len(found) > num_before

            assert len(found) > 900
            assert sorted(found, key=str) == sorted(theirs, key=str)
        finally:
            await reader.close()
            await flooded.close()

    asyncio.run(main())


def test_valid_records_in_large_messages_are_not_stored_and_keep_nobody_from_announcing(
    expires_at: float,
) -> None:
    """Two messages of 1,500 records each: a whole dictionary, and as many keys."""

    async def main() -> None:
        clock = SystemClock()
        honest = await HivemindDirectory.join((), identity=None, clock=clock)
        stranger = await HivemindDirectory.join(honest.addresses, identity=None, clock=clock)
        try:
            records = make_records(honest, 1500, expires_at)
            key = DHTID.generate(source=honest._gate.key_of(MODEL)).to_bytes()
            dictionary = DictionaryDHTValue()
            for subkey, value in records.items():
                dictionary.store(subkey, value, expires_at)
            many = dht_pb2.StoreRequest(
                keys=[key] * len(records),
                subkeys=map(MSGPackSerializer.dumps, records),
                values=records.values(),
                expiration_time=[expires_at] * len(records),
                in_cache=[False] * len(records),
            )
            whole = dht_pb2.StoreRequest(
                keys=[key],
                subkeys=[b""],
                values=[MSGPackSerializer.dumps(dictionary)],
                expiration_time=[expires_at],
                in_cache=[False],
            )
            assert honest._p2p.peer_id is not None
            stub: Any = stranger._node.protocol.get_stub(honest._p2p.peer_id)

            answers = [await stub.rpc_store(message, timeout=30) for message in (many, whole)]

            assert not any(any(answer.store_ok) for answer in answers)
            assert not await honest.lookup(MODEL)
            announcement, record = make_large_record(1, expires_at)
            await stranger.announce(record)
            assert honest._gate.list_current(MODEL) == [announcement]
        finally:
            await stranger.close()
            await honest.close()

    asyncio.run(main())


def test_one_record_in_the_cache_does_not_hide_the_others() -> None:
    """hivemind lets strangers say where a record is kept, and answers from the cache first."""

    async def main() -> None:
        clock = SystemClock()
        honest = await HivemindDirectory.join((), identity=None, clock=clock)
        stranger = await HivemindDirectory.join(honest.addresses, identity=None, clock=clock)
        reader = await HivemindDirectory.join(
            honest.addresses, identity=None, clock=clock, client_mode=True
        )
        try:
            announcement, record = make_large_record(1, time.time() + 60)
            await honest.announce(record)
            theirs, record = make_large_record(2, time.time() + 300)
            protocol, gate = stranger._node.protocol, stranger._gate
            assert honest._p2p.peer_id is not None

            await protocol.call_store(
                honest._p2p.peer_id,
                [DHTID.generate(source=gate.key_of(MODEL))],
                [MSGPackSerializer.dumps(gate.wrap(record))],
                theirs.expires_at,
                subkeys=[theirs.peer_id],
                in_cache=True,
            )
            await stranger.close()

            assert announcement in await reader.lookup(MODEL)
        finally:
            for directory in (reader, stranger, honest):
                await directory.close()

    asyncio.run(main())
