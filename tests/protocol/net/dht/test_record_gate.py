"""What a node of the DHT lets in, without a DHT."""

import pytest
from record_gates import MODEL, Announce, IdentityOf, StoppedClock, digest, pack

from shoal.protocol.identity import Identity
from shoal.protocol.ids import ModelId
from shoal.protocol.membership.membership import make_public
from shoal.protocol.net.dht.record_gate import RecordGate
from shoal.protocol.records.announcements import Announcement, sign_announcement

MAIN, OTHER = make_public(bytes(16)), make_public(bytes(range(16)))


class Entry:
    """One honest entry of the DHT, to be passed to a gate with one thing changed."""

    def __init__(self, gate: RecordGate, identity: Identity, announcement: Announcement) -> None:
        self.key = digest(gate.key_of(announcement.model_id))
        self.subkey = pack(announcement.peer_id)
        self.value = pack(gate.wrap(sign_announcement(identity, announcement)))
        self.expires_at = announcement.expires_at

    def is_accepted_by(self, gate: RecordGate) -> bool:
        return gate.accept(self.key, self.subkey, self.value, self.expires_at)


@pytest.fixture
def clock(now: float) -> StoppedClock:
    return StoppedClock(now)


@pytest.fixture
def gate(clock: StoppedClock) -> RecordGate:
    return RecordGate(MAIN, clock, digest, pack)


@pytest.fixture
def entry(gate: RecordGate, announce: Announce, identity_of: IdentityOf) -> Entry:
    return Entry(gate, identity_of(1), announce())


def test_gate_lets_in_and_remembers_what_a_peer_signed(
    gate: RecordGate, entry: Entry, announce: Announce
) -> None:
    assert entry.is_accepted_by(gate)
    assert entry.is_accepted_by(gate)
    assert gate.list_current(MODEL) == [announce()]


def test_gate_refuses_an_entry_in_another_place(
    gate: RecordGate, entry: Entry, identity_of: IdentityOf
) -> None:
    wrong_key = digest(gate.key_of(ModelId("b" * 32)))
    wrong_subkey = pack(identity_of(2).peer_id)

    assert not gate.accept(wrong_key, entry.subkey, entry.value, entry.expires_at)
    assert not gate.accept(entry.key, wrong_subkey, entry.value, entry.expires_at)
    assert not gate.accept(entry.key, entry.subkey, entry.value, entry.expires_at + 0.001)
    assert not gate.accept(entry.key, entry.subkey, entry.value, float("nan"))
    assert gate.list_current(MODEL) == []


@pytest.mark.parametrize(
    "value", [b"", b"\xc4", b"\xc4\x05abc", b"\xc5\x00\x01a", b"\xc0", pack(b""), pack(b"\xff\0x")]
)
def test_gate_refuses_what_is_no_record(gate: RecordGate, entry: Entry, value: bytes) -> None:
    assert not gate.accept(entry.key, entry.subkey, value, entry.expires_at)


def test_gate_refuses_a_good_record_in_a_bad_wrapping(
    gate: RecordGate, entry: Entry, announce: Announce, identity_of: IdentityOf
) -> None:
    record = sign_announcement(identity_of(1), announce())
    as_text = b"\xda" + entry.value[1:]
    swarm_that_is_no_text = pack(b"\xff\0" + record)

    for value in (as_text, swarm_that_is_no_text):
        assert not gate.accept(entry.key, entry.subkey, value, entry.expires_at)


def test_gate_refuses_a_replay_of_an_older_record(
    gate: RecordGate, entry: Entry, announce: Announce, identity_of: IdentityOf, now: float
) -> None:
    newer = announce(sequence=2, expires_at=now + 91)
    assert Entry(gate, identity_of(1), newer).is_accepted_by(gate)

    assert not entry.is_accepted_by(gate)
    assert gate.list_current(MODEL) == [newer]


def test_gate_refuses_an_expired_record_and_forgets_it(
    gate: RecordGate, entry: Entry, clock: StoppedClock, now: float
) -> None:
    assert entry.is_accepted_by(gate)

    clock.wall_seconds = now + 90

    assert not entry.is_accepted_by(gate)
    assert gate.list_current(MODEL) == []


def test_gate_keeps_records_of_other_swarms_apart(
    gate: RecordGate, clock: StoppedClock, announce: Announce, identity_of: IdentityOf
) -> None:
    other = RecordGate(OTHER, clock, digest, pack)
    entry = Entry(other, identity_of(1), announce())

    assert entry.is_accepted_by(gate)  # it is stored for them
    assert gate.list_current(MODEL) == []


def test_gate_refuses_the_record_of_one_swarm_under_the_key_of_another(
    gate: RecordGate, clock: StoppedClock, entry: Entry
) -> None:
    other_key = digest(RecordGate(OTHER, clock, digest, pack).key_of(MODEL))

    assert not gate.accept(other_key, entry.subkey, entry.value, entry.expires_at)


def test_gate_has_room_for_what_we_announce_and_look_up(
    clock: StoppedClock, announce: Announce, identity_of: IdentityOf
) -> None:
    gate = RecordGate(MAIN, clock, digest, pack, max_records=2)
    gate.watch(ModelId("b" * 32))
    assert Entry(gate, identity_of(1), announce(model_id=ModelId("b" * 32))).is_accepted_by(gate)
    gate.add_own(MODEL, sign_announcement(identity_of(2), announce(2)))

    for number in range(1, 41):
        stored = announce(number, model_id=ModelId(f"{number:032x}"))
        assert Entry(gate, identity_of(number), stored).is_accepted_by(gate)

    assert len(gate.list_current(ModelId("b" * 32))) == 1
    assert gate.list_current(MODEL) == [announce(2)]
    assert gate.list_current(ModelId(f"{1:032x}")) == []


def test_gate_tells_whose_record_had_to_go(
    clock: StoppedClock, announce: Announce, identity_of: IdentityOf
) -> None:
    gate = RecordGate(MAIN, clock, digest, pack, max_records=2)
    gone: list[tuple[str, str]] = []
    gate.when_displaced(lambda key, peer_id: gone.append((key, peer_id)))

    for number in range(1, 4):
        assert Entry(gate, identity_of(number), announce(number)).is_accepted_by(gate)

    assert gate.list_current(MODEL) == [announce(1), announce(3)]
    assert gone == [(gate.key_of(MODEL), identity_of(2).peer_id)]
