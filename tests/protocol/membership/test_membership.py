"""Who can prove and check what about a swarm, and who cannot."""

from __future__ import annotations

import pytest

from shoal.protocol.errors import RemoteProtocolError, UsageError
from shoal.protocol.identity import Identity
from shoal.protocol.membership.membership import (
    GREETING_NONCE_BYTES,
    MAX_REVOKED,
    NONCE_BYTES,
    Membership,
    Revocations,
    Role,
    begin_public,
    make_owner,
    make_public,
    make_user,
    read_public_greeting,
    read_revocations,
    sign_revocations,
)

OWNER, OTHER = make_owner(bytes(range(16))), make_owner(bytes(16))
SERVER, USER = OWNER.as_role(Role.SERVE), OWNER.as_role(Role.USE)
PUBLIC = make_public(bytes(range(16)))
PEER, OTHER_PEER = (Identity(bytes([n]) * 32).peer_id for n in (1, 2))
FINGERPRINT = "ab" * 32
NONCE, GREETING = bytes(NONCE_BYTES), bytes(GREETING_NONCE_BYTES)


def test_all_roles_belong_to_one_swarm() -> None:
    assert OWNER.swarm_id == SERVER.swarm_id == USER.swarm_id != OTHER.swarm_id
    assert [m.role for m in (OWNER, SERVER, USER)] == [Role.OWN, Role.SERVE, Role.USE]
    assert PUBLIC.role is Role.SERVE


def test_nobody_makes_more_of_a_code_than_it_holds() -> None:
    for membership, role in ((USER, Role.SERVE), (USER, Role.OWN), (SERVER, Role.OWN)):
        with pytest.raises(UsageError, match="may only"):
            membership.as_role(role)
    with pytest.raises(UsageError, match="only allows using"):
        USER.certify(PEER)
    with pytest.raises(UsageError, match="owner's code"):
        SERVER.sign_as_owner(b"message")


def test_keys_of_somebody_else_make_another_swarm() -> None:
    forged = make_user(USER.use_secret, OTHER.serve_key, USER.owner_key)

    assert forged.swarm_id != USER.swarm_id


def test_who_may_serve_is_checked_by_all_and_made_by_some() -> None:
    certificate = SERVER.certify(PEER)

    for member in (OWNER, SERVER, USER):
        assert member.is_certified(PEER, certificate)
    assert not USER.is_certified(OTHER_PEER, certificate)
    assert not USER.is_certified(PEER, OTHER.certify(PEER))
    assert not USER.is_certified(PEER, b"")
    assert len(certificate) == USER.certificate_bytes
    assert PUBLIC.is_certified(PEER, PUBLIC.certify(PEER))


@pytest.mark.parametrize("member", [OWNER, SERVER, USER], ids=lambda m: m.role)
def test_members_are_told_from_strangers(member: Membership) -> None:
    proof = member.prove_to(FINGERPRINT)

    assert SERVER.accepts(FINGERPRINT, proof)
    assert not SERVER.accepts("cd" * 32, proof)
    assert not SERVER.accepts(FINGERPRINT, OTHER.prove_to(FINGERPRINT))
    assert not SERVER.accepts(FINGERPRINT, b"")
    assert PUBLIC.accepts(FINGERPRINT, b"")
    assert PUBLIC.accepts(FINGERPRINT, proof)


def test_only_members_read_what_members_sealed() -> None:
    sealed = SERVER.seal(b"blocks 0:4", NONCE)

    assert USER.open(sealed) == b"blocks 0:4"
    assert b"blocks" not in sealed
    for stranger, content in ((OTHER, sealed), (USER, sealed[:-1]), (USER, b""), (USER, b"x" * 40)):
        with pytest.raises(RemoteProtocolError):
            stranger.open(content)
    assert PUBLIC.open(PUBLIC.seal(b"blocks", NONCE)) == b"blocks"


def test_greeting_tells_members_the_swarm_and_outsiders_no_more_than_they_may_know() -> None:
    private, public = (m.answer_greeting(GREETING, PEER) for m in (SERVER, PUBLIC))

    assert USER.is_same_swarm(private, GREETING, PEER)
    assert not OTHER.is_same_swarm(private, GREETING, PEER)
    assert not USER.is_same_swarm(private, b"1" * GREETING_NONCE_BYTES, PEER)
    assert not USER.is_same_swarm(private, GREETING, OTHER_PEER)
    assert SERVER.swarm_id not in private
    assert read_public_greeting(private, GREETING, PEER) is None
    assert read_public_greeting(public, GREETING, PEER) == PUBLIC


@pytest.mark.parametrize("answer", [b"", b"\0", b"\2" * 49, b"\0" * 49, b"\1" * 48, b"\0" * 50])
def test_answers_that_make_no_sense_are_refused(answer: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        read_public_greeting(answer, GREETING, PEER)


def test_peer_begins_the_same_public_swarm_every_time() -> None:
    begun = begin_public(PEER)

    assert begun == begin_public(PEER) != begin_public(OTHER_PEER)
    assert not begun.is_private


def test_revocations_come_back_and_are_the_owners_alone() -> None:
    revocations = Revocations(7, frozenset({PEER, OTHER_PEER}))

    record = sign_revocations(OWNER, revocations)

    assert read_revocations(USER, record) == revocations
    with pytest.raises(RemoteProtocolError, match="not signed by the owner"):
        read_revocations(OTHER, record)
    with pytest.raises(UsageError, match="owner's code"):
        sign_revocations(SERVER, revocations)


def test_revocations_that_were_changed_are_refused() -> None:
    record = sign_revocations(OWNER, Revocations(7, frozenset({PEER})))

    for index in range(len(record)):
        changed = record[:index] + bytes([record[index] ^ 1]) + record[index + 1 :]
        with pytest.raises(RemoteProtocolError):
            read_revocations(USER, changed)
    for length in range(len(record)):
        with pytest.raises(RemoteProtocolError):
            read_revocations(USER, record[:length])


def test_revocations_are_bounded() -> None:
    peer_ids = frozenset(Identity(n.to_bytes(32, "big")).peer_id for n in range(MAX_REVOKED + 1))
    most = Revocations(1, frozenset(sorted(peer_ids)[:MAX_REVOKED]))

    assert read_revocations(USER, sign_revocations(OWNER, most)) == most
    with pytest.raises(UsageError, match="at most 100"):
        sign_revocations(OWNER, Revocations(1, peer_ids))
    with pytest.raises(RemoteProtocolError, match="too long"):
        read_revocations(USER, b"\1" + bytes(64 + 8 + 32 * (MAX_REVOKED + 1)))
