"""What a node of a private swarm lets in: what members signed and sealed, and nothing else."""

from __future__ import annotations

import random

import pytest
from record_gates import MODEL, Announce, IdentityOf, StoppedClock, digest, pack

from shoal.protocol.errors import RevokedError, UsageError
from shoal.protocol.ids import PeerId
from shoal.protocol.membership.membership import (
    Membership,
    Revocations,
    Role,
    make_owner,
    make_public,
    sign_revocations,
)
from shoal.protocol.net.dht.record_gate import RecordGate
from shoal.protocol.records.announcements import sign_announcement

OWNER, STRANGER = make_owner(bytes(range(16))), make_owner(bytes(16))
SERVER, USER = OWNER.as_role(Role.SERVE), OWNER.as_role(Role.USE)


class Scene:
    """Gates of different members, and records of peers on their way to them."""

    def __init__(self, now: float, announce: Announce, identity_of: IdentityOf) -> None:
        self.clock = StoppedClock(now)
        self._announce = announce
        self._identity_of = identity_of

    def gate(self, membership: Membership) -> RecordGate:
        return RecordGate(membership, self.clock, digest, pack)

    def peer_id(self, number: int) -> PeerId:
        return self._identity_of(number).peer_id

    def hand_over(
        self,
        gate: RecordGate,
        number: int = 1,
        *,
        place: RecordGate | None = None,
        value: bytes | None = None,
        writer: Membership = SERVER,
    ) -> bool:
        """Have a gate asked to keep the record of a peer; return whether it did."""
        announcement = self._announce(number)
        if value is None:
            value = self.gate(writer).wrap(self.sign(number))
        key = digest((place or gate).key_of(MODEL))
        return gate.accept(key, pack(announcement.peer_id), pack(value), announcement.expires_at)

    def sign(self, number: int) -> bytes:
        return sign_announcement(self._identity_of(number), self._announce(number))

    def publish(
        self,
        gate: RecordGate,
        revocations: Revocations,
        *,
        owner: Membership = OWNER,
        lifetime_seconds: float = 90,
    ) -> bool:
        """Have a gate asked to keep an owner's list; return whether it did."""
        writer = self.gate(owner)
        value = writer.wrap_revocations(sign_revocations(owner, revocations))
        return gate.accept(
            digest(writer.revocations_key),
            pack(RecordGate.REVOCATIONS),
            pack(value),
            self.clock.wall() + lifetime_seconds,
        )


@pytest.fixture
def scene(now: float, announce: Announce, identity_of: IdentityOf) -> Scene:
    return Scene(now, announce, identity_of)


def found(gate: RecordGate) -> set[str]:
    return {peer.peer_id for peer in gate.list_current(MODEL)}


@pytest.mark.parametrize("reader", [OWNER, SERVER, USER], ids=lambda m: m.role)
def test_members_find_who_may_serve(scene: Scene, reader: Membership) -> None:
    gate = scene.gate(reader)

    assert scene.hand_over(gate)
    assert found(gate) == {scene.peer_id(1)}


def test_peer_that_no_member_let_serve_is_ignored(scene: Scene) -> None:
    gate = scene.gate(USER)
    sealed_by_a_user = USER.swarm_id + USER.seal(bytes(64) + scene.sign(1), bytes(12))
    certificate_of_another = SERVER.certify(scene.peer_id(2))
    borrowed = USER.swarm_id + USER.seal(certificate_of_another + scene.sign(1), bytes(12))

    for value in (sealed_by_a_user, borrowed):
        assert not scene.hand_over(gate, value=value)
    assert found(gate) == set()


def test_strangers_neither_write_nor_read(scene: Scene) -> None:
    gate, stranger = scene.gate(USER), scene.gate(STRANGER)

    assert not scene.hand_over(gate, writer=STRANGER)
    assert not scene.hand_over(gate, value=SERVER.swarm_id + scene.sign(1))
    assert not scene.hand_over(stranger, place=gate, writer=SERVER)
    assert found(gate) == found(stranger) == set()


def test_outsider_on_the_directory_sees_no_content_and_finds_no_key(scene: Scene) -> None:
    value = scene.gate(SERVER).wrap(scene.sign(1))

    assert scene.peer_id(1).encode() not in value
    assert b"endpoints" not in value
    public = scene.gate(make_public(bytes(16)))
    assert not scene.hand_over(public, place=scene.gate(SERVER), value=value)
    assert scene.gate(SERVER).key_of(MODEL) != public.key_of(MODEL)


def test_private_swarm_stores_nothing_for_others(scene: Scene) -> None:
    public = make_public(bytes(16))

    assert not scene.hand_over(scene.gate(SERVER), place=scene.gate(public), writer=public)


def test_records_of_users_are_not_even_made(scene: Scene) -> None:
    with pytest.raises(UsageError, match="only allows using"):
        scene.gate(USER).wrap(scene.sign(1))


def test_revoked_peer_is_ignored_at_once_and_from_then_on(scene: Scene) -> None:
    gate = scene.gate(USER)
    assert scene.hand_over(gate, 1)
    assert scene.hand_over(gate, 2)

    assert scene.publish(gate, Revocations(1, frozenset({scene.peer_id(1)})))

    assert found(gate) == {scene.peer_id(2)}
    assert not scene.hand_over(gate, 1)


def test_revoked_peer_cannot_announce_itself(scene: Scene) -> None:
    gate = scene.gate(SERVER)
    scene.publish(gate, Revocations(1, frozenset({scene.peer_id(1)})))

    with pytest.raises(RevokedError, match="has revoked"):
        gate.add_own(MODEL, scene.sign(1))


def test_newest_list_of_the_owner_counts_whoever_brings_it(scene: Scene) -> None:
    gate = scene.gate(SERVER)
    first, second = Revocations(1, frozenset({scene.peer_id(1)})), Revocations(2, frozenset())

    assert scene.publish(gate, second)
    assert not scene.publish(gate, first)
    assert not scene.publish(gate, Revocations(3), owner=STRANGER)
    assert not scene.publish(gate, Revocations(3), lifetime_seconds=1e9)
    assert gate.revocations == second
    handed_on = scene.gate(USER)
    assert handed_on.accept(
        digest(gate.revocations_key),
        pack(RecordGate.REVOCATIONS),
        pack(gate.wrap_revocations()),
        scene.clock.wall() + 90,
    )
    assert handed_on.revocations == second


def test_public_swarm_has_nobody_who_could_revoke(scene: Scene) -> None:
    gate = scene.gate(make_public(bytes(16)))
    value = bytes(16) + bytes(1 + 64 + 8)
    key = digest(gate.revocations_key)

    assert not gate.accept(key, pack(RecordGate.REVOCATIONS), pack(value), scene.clock.wall() + 90)
    assert gate.wrap_revocations() == b""


def test_junk_is_refused_without_a_word(scene: Scene) -> None:
    rng = random.Random(4)
    genuine = scene.gate(SERVER).wrap(scene.sign(1))
    for membership in (USER, make_public(bytes(16))):
        gate = scene.gate(membership)
        keys = (digest(gate.key_of(MODEL)), digest(gate.revocations_key), b"another key")
        for _ in range(1000):
            value = bytearray(rng.choice([genuine, membership.swarm_id + rng.randbytes(200), b""]))
            for _ in range(1 + rng.randrange(3)):
                place = rng.randrange(len(value) + 1)
                value[place : place + rng.randrange(9)] = rng.randbytes(rng.randrange(9))
            if bytes(value) == genuine:
                continue
            subkey = pack(rng.choice([RecordGate.REVOCATIONS, scene.peer_id(1), "junk"]))

            assert not gate.accept(
                rng.choice(keys), subkey, pack(bytes(value)), scene.clock.wall() + 90
            )
        assert found(gate) == set()
