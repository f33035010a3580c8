"""What a node of a private swarm lets in: what members signed and sealed, and nothing else."""

from __future__ import annotations

import random

import pytest
from announcements import MODEL, NOW, identity_of, make_announcement, sign
from record_gates import digest, make_gate, pack

from shoal.protocol.errors import RevokedError, UsageError
from shoal.protocol.membership.membership import (
    Membership,
    Revocations,
    Role,
    make_owner,
    make_public,
    sign_revocations,
)
from shoal.protocol.net.dht.record_gate import RecordGate

OWNER, STRANGER = make_owner(bytes(range(16))), make_owner(bytes(16))
SERVER, USER = OWNER.as_role(Role.SERVE), OWNER.as_role(Role.USE)
RECORD = sign(make_announcement())


def hand_over(
    gate: RecordGate,
    number: int = 1,
    *,
    place: RecordGate | None = None,
    value: bytes | None = None,
    writer: Membership = SERVER,
) -> bool:
    """Have a gate asked to keep the record of a peer; return whether it did."""
    announcement = make_announcement(number)
    if value is None:
        value = make_gate(writer).wrap(sign(announcement, number))
    key = digest((place or gate).key_of(MODEL))
    return gate.accept(key, pack(announcement.peer_id), pack(value), announcement.expires_at)


def publish(
    gate: RecordGate,
    revocations: Revocations,
    *,
    owner: Membership = OWNER,
    lifetime_seconds: float = 90,
) -> bool:
    """Have a gate asked to keep an owner's list; return whether it did."""
    value = make_gate(owner).wrap_revocations(sign_revocations(owner, revocations))
    return hand_over_list(gate, make_gate(owner).revocations_key, value, lifetime_seconds)


def hand_over_list(gate: RecordGate, key: str, value: bytes, lifetime_seconds: float = 90) -> bool:
    expires_at = NOW + lifetime_seconds
    return gate.accept(digest(key), pack(RecordGate.REVOCATIONS), pack(value), expires_at)


def found(gate: RecordGate) -> set[str]:
    return {peer.peer_id for peer in gate.list_current(MODEL)}


@pytest.mark.parametrize("reader", [OWNER, SERVER, USER], ids=lambda m: m.role)
def test_members_find_who_may_serve(reader: Membership) -> None:
    gate = make_gate(reader)

    assert hand_over(gate)
    assert found(gate) == {identity_of(1).peer_id}


def test_peer_that_no_member_let_serve_is_ignored() -> None:
    gate = make_gate(USER)
    sealed_by_a_user = USER.swarm_id + USER.seal(bytes(64) + RECORD, bytes(12))
    certificate_of_another = SERVER.certify(identity_of(2).peer_id)
    borrowed = USER.swarm_id + USER.seal(certificate_of_another + RECORD, bytes(12))

    for value in (sealed_by_a_user, borrowed):
        assert not hand_over(gate, value=value)
    assert found(gate) == set()


def test_strangers_neither_write_nor_read() -> None:
    gate, stranger = make_gate(USER), make_gate(STRANGER)

    assert not hand_over(gate, writer=STRANGER)
    assert not hand_over(gate, value=SERVER.swarm_id + RECORD)
    assert not hand_over(stranger, place=gate, writer=SERVER)
    assert found(gate) == found(stranger) == set()


def test_outsider_on_the_directory_sees_no_content_and_finds_no_key() -> None:
    value = make_gate(SERVER).wrap(RECORD)

    assert identity_of(1).peer_id.encode() not in value
    assert b"endpoints" not in value
    public = make_gate(make_public(bytes(16)))
    assert not hand_over(public, place=make_gate(SERVER), value=value)
    assert make_gate(SERVER).key_of(MODEL) != public.key_of(MODEL)


def test_private_swarm_stores_nothing_for_others() -> None:
    public = make_public(bytes(16))

    assert not hand_over(make_gate(SERVER), place=make_gate(public), writer=public)


def test_records_of_users_are_not_even_made() -> None:
    with pytest.raises(UsageError, match="only allows using"):
        make_gate(USER).wrap(RECORD)


def test_revoked_peer_is_ignored_at_once_and_from_then_on() -> None:
    gate = make_gate(USER)
    assert hand_over(gate, 1)
    assert hand_over(gate, 2)

    assert publish(gate, Revocations(1, frozenset({identity_of(1).peer_id})))

    assert found(gate) == {identity_of(2).peer_id}
    assert not hand_over(gate, 1)


def test_revoked_peer_cannot_announce_itself() -> None:
    gate = make_gate(SERVER)
    publish(gate, Revocations(1, frozenset({identity_of(1).peer_id})))

    with pytest.raises(RevokedError, match="has revoked"):
        gate.add_own(MODEL, RECORD)


def test_newest_list_of_the_owner_counts_whoever_brings_it() -> None:
    gate = make_gate(SERVER)
    first, second = Revocations(1, frozenset({identity_of(1).peer_id})), Revocations(2, frozenset())

    assert publish(gate, second)
    assert not publish(gate, first)
    assert not publish(gate, Revocations(3), owner=STRANGER)
    assert not publish(gate, Revocations(3), lifetime_seconds=1e9)
    assert gate.revocations == second
    handed_on = make_gate(USER)
    assert hand_over_list(handed_on, gate.revocations_key, gate.wrap_revocations())
    assert handed_on.revocations == second


def test_newer_list_is_stored_though_the_older_one_expires_later() -> None:
    gate, gone = make_gate(SERVER), list[tuple[str, str]]()
    publish(gate, Revocations(1), lifetime_seconds=91)
    gate.when_displaced(lambda key, subkey: gone.append((key, subkey)))

    assert publish(gate, Revocations(1))
    assert gone == []
    assert publish(gate, Revocations(2))
    assert gone == [(gate.revocations_key, RecordGate.REVOCATIONS)]


def test_public_swarm_has_nobody_who_could_revoke() -> None:
    gate = make_gate(make_public(bytes(16)))

    assert not hand_over_list(gate, gate.revocations_key, bytes(16) + bytes(1 + 64 + 8))
    assert gate.wrap_revocations() == b""


def test_junk_is_refused_without_a_word() -> None:
    rng = random.Random(4)
    genuine = make_gate(SERVER).wrap(RECORD)
    for membership in (USER, make_public(bytes(16))):
        gate = make_gate(membership)
        keys = (digest(gate.key_of(MODEL)), digest(gate.revocations_key), b"another key")
        for _ in range(1000):
            value = bytearray(rng.choice([genuine, membership.swarm_id + rng.randbytes(200), b""]))
            for _ in range(1 + rng.randrange(3)):
                place = rng.randrange(len(value) + 1)
                value[place : place + rng.randrange(9)] = rng.randbytes(rng.randrange(9))
            if bytes(value) == genuine:
                continue
            subkey = pack(rng.choice([RecordGate.REVOCATIONS, identity_of(1).peer_id, "junk"]))

            assert not gate.accept(rng.choice(keys), subkey, pack(bytes(value)), NOW + 90)
        assert found(gate) == set()
