"""Valid records of strangers must not keep a node of the DHT from answering. Starts real p2pds."""

# pyright: reportAttributeAccessIssue=false
import pytest
from announcements import MODEL
from dht_records import number_identity
from directory_processes import CLOCK, Directories, announce_now
from hivemind.dht.routing import DHTID
from hivemind.utils import MSGPackSerializer

from shoal.protocol.endpoints import Endpoint
from shoal.protocol.net.dht.hivemind_directory import HivemindDirectory
from shoal.protocol.records.announcements import Announcement, sign_announcement

pytestmark = pytest.mark.network


def make_large_record(number: int, expires_at: float) -> tuple[Announcement, bytes]:
    """Return what a peer may announce, nearly as large as it may be."""
    identity = number_identity(number)
    announcement = announce_now(
        1,
        peer_id=identity.peer_id,
        endpoints=(Endpoint("h" * 250, 65535, "c" * 64),) * 8,
        expires_at=expires_at,
        software="s" * 64,
    )
    return announcement, sign_announcement(identity, announcement)


def fill(directory: HivemindDirectory, num_records: int) -> None:
    """Have a node store records, of those that pass, as if they had come one by one for long."""
    protocol, gate = directory._node.dht.protocol, directory._gate
    key = DHTID.generate(source=gate.key_of(MODEL))
    expires_at = CLOCK.wall() + 250
    for number in range(num_records):
        announcement, record = make_large_record(number, expires_at)
        value = MSGPackSerializer.dumps(gate.wrap(record))
        subkey = MSGPackSerializer.dumps(announcement.peer_id)
        if gate.accept(key.to_bytes(), subkey, value, expires_at):
            protocol.storage.store_subkey(key, announcement.peer_id, value, expires_at)


async def test_flooded_node_still_answers(dht: Directories) -> None:
    flooded = await dht.join()
    reader = await dht.read(flooded.addresses)
    fill(flooded, 2000)

    theirs = await flooded.lookup(MODEL)
    found = await reader.lookup(MODEL)
    while 0 < len(found) < len(theirs):  # each lookup brings more of them
        num_before = len(found)
        found = await reader.lookup(MODEL)
        assert len(found) > num_before

    assert len(found) > 900
    assert sorted(found, key=str) == sorted(theirs, key=str)


async def test_one_record_in_the_cache_does_not_hide_the_others(dht: Directories) -> None:
    """hivemind lets strangers say where a record is kept, and answers from the cache first."""
    honest = await dht.join()
    stranger = await dht.join(honest.addresses)
    reader = await dht.read(honest.addresses)
    announcement, record = make_large_record(1, CLOCK.wall() + 60)
    await honest.announce(record)
    theirs, record = make_large_record(2, CLOCK.wall() + 250)
    protocol, gate = stranger._node.dht.protocol, stranger._gate
    assert honest._access.p2p.peer_id is not None

    await protocol.call_store(
        honest._access.p2p.peer_id,
        [DHTID.generate(source=gate.key_of(MODEL))],
        [MSGPackSerializer.dumps(gate.wrap(record))],
        theirs.expires_at,
        subkeys=[theirs.peer_id],
        in_cache=True,
    )
    await stranger.close()

    assert announcement in await reader.lookup(MODEL)
