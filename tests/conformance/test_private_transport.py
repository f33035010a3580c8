"""In a private swarm every kind of transport takes streams of members only."""

from __future__ import annotations

import pytest
from transport_seam import Seam, echo

from shoal.protocol.endpoints import Endpoint
from shoal.protocol.errors import ErrorCode, NotAMemberError
from shoal.protocol.membership.membership import Membership, Role, make_owner, make_public
from shoal.protocol.net.transport import Stream, Transport

OWNER, STRANGER = make_owner(bytes(range(16))), make_owner(bytes(16))
SERVER, USER = OWNER.as_role(Role.SERVE), OWNER.as_role(Role.USE)
PUBLIC = make_public(bytes(16))


pytestmark = pytest.mark.parametrize(
    "seam", ["loopback", pytest.param("tcp", marks=pytest.mark.network)], indirect=True
)


async def ask(transport: Transport, endpoint: Endpoint) -> bytes | None:
    stream = await transport.open_stream(endpoint)
    try:
        await stream.send(b"hello")
        return await stream.receive()
    finally:
        await stream.close()


@pytest.mark.parametrize("member", [OWNER, SERVER, USER], ids=lambda m: m.role)
async def test_members_of_every_role_come_in(seam: Seam, member: Membership) -> None:
    listener = await seam.listen(echo, SERVER)

    assert await ask(seam.transport("client", member), listener.endpoint) == b"hello"


@pytest.mark.parametrize(
    ("dialler", "complaint"),
    [
        (None, "belongs to a private swarm; ask its owner"),
        (PUBLIC, "belongs to a private swarm; ask its owner"),
        (STRANGER, "does not belong to the swarm of this join code"),
        (STRANGER.as_role(Role.USE), "does not belong to the swarm of this join code"),
    ],
)
async def test_others_are_turned_away_before_anything_is_served(
    seam: Seam, dialler: Membership | None, complaint: str
) -> None:
    served: list[Stream] = []

    async def serve(stream: Stream) -> None:
        served.append(stream)

    listener = await seam.listen(serve, SERVER)
    transport = seam.transport("client", dialler)
    for _ in range(2):
        with pytest.raises(NotAMemberError, match=complaint) as caught:
            await transport.open_stream(listener.endpoint)
        assert caught.value.code is ErrorCode.NOT_A_MEMBER

    assert served == []


async def test_member_is_welcome_in_public_places(seam: Seam) -> None:
    listener = await seam.listen(echo, PUBLIC)

    assert await ask(seam.transport("client", USER), listener.endpoint) == b"hello"


async def test_proof_made_for_one_peer_is_worth_nothing_at_another(seam: Seam) -> None:
    listener = await seam.listen(echo, SERVER)
    elsewhere = USER.prove_to("ab" * 32)

    assert not SERVER.accepts(listener.endpoint.fingerprint, elsewhere)
    assert SERVER.accepts(
        listener.endpoint.fingerprint, USER.prove_to(listener.endpoint.fingerprint)
    )
