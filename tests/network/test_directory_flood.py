"""Valid records of strangers must not keep a node of the DHT from answering. Starts real p2pds."""

import asyncio
import time

import pytest
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.utils import MSGPackSerializer

from shoal.protocol.announcements import Announcement, PeerState, sign_announcement
from shoal.protocol.endpoints import Endpoint
from shoal.protocol.identity import Identity
from shoal.protocol.ids import ModelId
from shoal.protocol.net.clock import SystemClock
from shoal.protocol.net.hivemind_directory import HivemindDirectory
from shoal.protocol.spans import Span

pytestmark = pytest.mark.network

MODEL = ModelId("a" * 32)


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


def flood(directory: HivemindDirectory, num_records: int, batch_size: int) -> None:
    """Hand in records in batches, as `rpc_store` does with what a stranger sends."""
    protocol, gate = directory._node.protocol, directory._gate
    key, expires_at = DHTID.generate(source=gate.key_of(MODEL)), time.time() + 300
    for first in range(0, num_records, batch_size):
        batch = DictionaryDHTValue()
        for number in range(first, first + batch_size):
            announcement, record = make_large_record(number, expires_at)
            value = MSGPackSerializer.dumps(gate.wrap(record))
            batch.store(announcement.peer_id, value, expires_at)
        assert protocol._validate_dictionary(key.to_bytes(), batch)
        for peer_id, entry in batch.items():
            protocol.storage.store_subkey(key, peer_id, entry.value, entry.expiration_time)


@pytest.mark.parametrize("batch_size", [1, 500])
def test_flooded_node_still_answers(batch_size: int) -> None:
    async def main() -> None:
        flooded = await HivemindDirectory.join((), identity=None, clock=SystemClock())
        reader = await HivemindDirectory.join(
            flooded.addresses, identity=None, clock=SystemClock(), client_mode=True
        )
        try:
            flood(flooded, 2000, batch_size)

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
