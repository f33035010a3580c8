"""What a node of the DHT lets in, without a DHT."""

from typing import Any

import pytest
from announcements import MODEL, NOW, identity_of, make_announcement, sign
from record_gates import StoppedClock, digest, make_gate, pack

from shoal.protocol.ids import ModelId
from shoal.protocol.membership.membership import make_public
from shoal.protocol.net.dht.record_gate import RecordGate

MAIN, OTHER = make_public(bytes(16)), make_public(bytes(range(16)))


class Entry:
    """One honest entry of the DHT, to be passed to a gate with one thing changed."""

    def __init__(self, gate: RecordGate, number: int = 1, **changes: Any) -> None:
        announcement = make_announcement(number, **changes)
        self.key = digest(gate.key_of(announcement.model_id))
        self.subkey = pack(announcement.peer_id)
        self.value = pack(gate.wrap(sign(announcement, number)))
        self.expires_at = announcement.expires_at

    def is_accepted_by(self, gate: RecordGate) -> bool:
        return gate.accept(self.key, self.subkey, self.value, self.expires_at)


@pytest.fixture
def gate() -> RecordGate:
    return make_gate(MAIN)


@pytest.fixture
def entry(gate: RecordGate) -> Entry:
    return Entry(gate)


def test_gate_lets_in_and_remembers_what_a_peer_signed(gate: RecordGate, entry: Entry) -> None:
    assert entry.is_accepted_by(gate)
    assert entry.is_accepted_by(gate)
    assert gate.list_current(MODEL) == [make_announcement()]


def test_gate_refuses_an_entry_in_another_place(gate: RecordGate, entry: Entry) -> None:
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


def test_gate_refuses_a_good_record_in_a_bad_wrapping(gate: RecordGate, entry: Entry) -> None:
    as_text = b"\xda" + entry.value[1:]
    swarm_that_is_no_text = pack(b"\xff\0" + sign(make_announcement()))

    for value in (as_text, swarm_that_is_no_text):
        assert not gate.accept(entry.key, entry.subkey, value, entry.expires_at)


def test_gate_refuses_a_replay_of_an_older_record(gate: RecordGate, entry: Entry) -> None:
    newer = {"sequence": 2, "expires_at": NOW + 91}
    assert Entry(gate, **newer).is_accepted_by(gate)

    assert not entry.is_accepted_by(gate)
    assert gate.list_current(MODEL) == [make_announcement(**newer)]


def test_gate_refuses_an_expired_record_and_forgets_it(entry: Entry) -> None:
    clock = StoppedClock(NOW)
    gate = RecordGate(MAIN, clock, digest, pack)
    assert entry.is_accepted_by(gate)

    clock.wall_seconds = NOW + 90

    assert not entry.is_accepted_by(gate)
    assert gate.list_current(MODEL) == []


def test_gate_keeps_records_of_other_swarms_apart(gate: RecordGate) -> None:
    other = make_gate(OTHER)
    entry = Entry(other)

    assert entry.is_accepted_by(gate)  # it is stored for them
    assert gate.list_current(MODEL) == []


def test_gate_refuses_the_record_of_one_swarm_under_the_key_of_another(
    gate: RecordGate, entry: Entry
) -> None:
    other_key = digest(make_gate(OTHER).key_of(MODEL))

    assert not gate.accept(other_key, entry.subkey, entry.value, entry.expires_at)


def test_gate_has_room_for_what_we_announce_and_look_up() -> None:
    gate = make_gate(MAIN, max_records=2)
    gate.watch(ModelId("b" * 32))
    assert Entry(gate, model_id=ModelId("b" * 32)).is_accepted_by(gate)
    gate.add_own(MODEL, sign(make_announcement(2), 2))

    for number in range(1, 41):
        assert Entry(gate, number, model_id=ModelId(f"{number:032x}")).is_accepted_by(gate)

    assert len(gate.list_current(ModelId("b" * 32))) == 1
    assert gate.list_current(MODEL) == [make_announcement(2)]
    assert gate.list_current(ModelId(f"{1:032x}")) == []


def test_gate_tells_whose_record_had_to_go() -> None:
    gate = make_gate(MAIN, max_records=2)
    gone: list[tuple[str, str]] = []
    gate.when_displaced(lambda key, peer_id: gone.append((key, peer_id)))

    for number in range(1, 4):
        assert Entry(gate, number).is_accepted_by(gate)

    assert gate.list_current(MODEL) == [make_announcement(1), make_announcement(3)]
    assert gone == [(gate.key_of(MODEL), identity_of(2).peer_id)]
