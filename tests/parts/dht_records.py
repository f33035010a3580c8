"""Valid records of as many peers as a test needs, as they stand in the DHT."""

from __future__ import annotations

from directory_processes import CLOCK, announce_now
from hivemind.dht.routing import DHTID
from hivemind.p2p import PeerID
from hivemind.utils import MSGPackSerializer

from shoal.protocol.identity import Identity
from shoal.protocol.membership.membership import make_public
from shoal.protocol.net.dht.record_gate import Entry, RecordGate
from shoal.protocol.records.announcements import sign_announcement


def number_identity(number: int) -> Identity:
    return Identity(number.to_bytes(32, "big"))


def number_peer(number: int) -> PeerID:
    return PeerID.from_base58(number_identity(number).peer_id)


def make_gate() -> RecordGate:
    def digest(key: str) -> bytes:
        return DHTID.generate(source=key).to_bytes()

    return RecordGate(make_public(bytes(16)), CLOCK, digest, MSGPackSerializer.dumps)


def make_entries(num_entries: int) -> list[Entry]:
    """Return valid entries of as many peers."""
    gate, entries = make_gate(), list[Entry]()
    for number in range(num_entries):
        identity = number_identity(number)
        announcement = announce_now(1, peer_id=identity.peer_id)
        value = gate.wrap(sign_announcement(identity, announcement))
        packed = MSGPackSerializer.dumps(value)
        entries.append(Entry(identity.peer_id, packed, announcement.expires_at))
    return entries
