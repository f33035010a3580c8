"""Which swarm one joins, from what the peers there answer; without a network."""

from __future__ import annotations

import asyncio

import pytest
from virtual_time import run_virtual

from shoal.protocol.errors import (
    DirectoryError,
    RemoteProtocolError,
    UnavailableError,
    WrongSwarmError,
)
from shoal.protocol.identity import Identity
from shoal.protocol.ids import PeerId
from shoal.protocol.membership.membership import Membership, Role, make_owner, make_public
from shoal.protocol.net.libp2p.multiaddrs import PeerAddress
from shoal.protocol.net.libp2p.swarm_question import answer, find_swarm

OWNER, STRANGER = make_owner(bytes(range(16))), make_owner(bytes(16))
USER = OWNER.as_role(Role.USE)
PUBLIC, OTHER_PUBLIC = make_public(bytes(16)), make_public(bytes(range(16)))
PEERS = [
    PeerAddress.parse(f"/ip4/192.0.2.{n}/tcp/4001/p2p/{Identity(bytes([n]) * 32).peer_id}")
    for n in range(1, 4)
]


def find(ours: Membership | None, *answers: Membership | bytes | None) -> tuple[Membership, int]:
    """Return the swarm that is found, and how many peers are left to join through."""
    said = {peer.peer_id: answers[i] for i, peer in enumerate(PEERS[: len(answers)])}

    async def ask(peer_id: PeerId, nonce: bytes) -> bytes:
        theirs = said[peer_id]
        if theirs is None:
            await asyncio.Event().wait()
        if theirs == b"hung up":
            raise UnavailableError("it hung up")
        return answer(theirs, peer_id, nonce) if isinstance(theirs, Membership) else theirs or b""

    membership, left = run_virtual(find_swarm(PEERS[: len(answers)], ours, ask))
    return membership, len(left)


def test_member_joins_through_peers_of_its_swarm_and_those_that_may_be() -> None:
    assert find(USER, OWNER) == (USER, 1)
    assert find(USER, STRANGER, OWNER) == (USER, 1)
    assert find(USER, PUBLIC, OWNER, None) == (USER, 2)
    assert find(USER, b"junk", OWNER, b"hung up") == (USER, 2)


@pytest.mark.parametrize("ours", [None, PUBLIC], ids=str)
def test_peers_that_answer_come_before_those_that_are_silent(ours: Membership | None) -> None:
    async def ask(peer_id: PeerId, nonce: bytes) -> bytes:
        if peer_id != PEERS[1].peer_id:
            raise UnavailableError("nobody listens")
        return answer(PUBLIC, peer_id, nonce)

    _, peers = run_virtual(find_swarm(PEERS, ours, ask))

    assert peers == [PEERS[1], PEERS[0], PEERS[2]]


@pytest.mark.parametrize("theirs", [STRANGER, PUBLIC, b"junk", b""], ids=str)
def test_swarm_of_others_is_called_a_wrong_secret(theirs: Membership | bytes) -> None:
    with pytest.raises(WrongSwarmError, match="wrong secret"):
        find(USER, theirs)


def test_code_of_another_public_swarm_is_called_that() -> None:
    assert find(PUBLIC, PUBLIC, OTHER_PUBLIC, None) == (PUBLIC, 2)
    for theirs in (OTHER_PUBLIC, OWNER):
        with pytest.raises(WrongSwarmError, match=r"wrong swarm: .* does not belong to the swarm"):
            find(PUBLIC, theirs, None)


def test_without_a_code_only_public_swarms_are_open() -> None:
    assert find(None, PUBLIC, None) == (PUBLIC, 2)
    with pytest.raises(WrongSwarmError, match="not a member"):
        find(None, OWNER)
    with pytest.raises(WrongSwarmError, match="different swarms"):
        find(None, PUBLIC, OTHER_PUBLIC)
    with pytest.raises(DirectoryError, match="does not say which swarm"):
        find(None, b"junk")


@pytest.mark.parametrize("ours", [None, USER, PUBLIC], ids=str)
def test_silence_is_no_swarm(ours: Membership | None) -> None:
    with pytest.raises(DirectoryError, match="no initial peer answers"):
        find(ours, None, b"hung up")


def test_question_of_another_length_is_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="malformed"):
        answer(PUBLIC, PEERS[0].peer_id, b"short")
