"""In a private swarm every kind of transport takes streams of members only."""

from __future__ import annotations

import pytest
from transport_seam import Seam, echo

from shoal.protocol.endpoints import Endpoint
from shoal.protocol.errors import ErrorCode, NotAMemberError
from shoal.protocol.membership.membership import Membership, Role, make_owner, make_public
from shoal.protocol.net.memory.loopback import LoopbackTransport
from shoal.protocol.net.tcp.tcp_transport import TcpTransport
from shoal.protocol.net.transport import Listener, Stream, StreamServer, Transport

OWNER, STRANGER = make_owner(bytes(range(16))), make_owner(bytes(16))
SERVER, USER = OWNER.as_role(Role.SERVE), OWNER.as_role(Role.USE)
PUBLIC = make_public(bytes(16))


class PrivateSeam(Seam):
    """Makes transports that belong to a swarm."""

    def member(self, membership: Membership | None, host: str = "server") -> Transport:
        made: Transport
        if self.name == "loopback":
            made = LoopbackTransport(self._network, host, membership)
        else:
            made = TcpTransport(membership=membership)
        self._transports.append(made)
        return made

    async def listen_as(self, membership: Membership, serve: StreamServer = echo) -> Listener:
        return await self.member(membership).listen(self.host(), 0, serve)


@pytest.fixture(params=["loopback", pytest.param("tcp-tls", marks=pytest.mark.network)])
def seam(request: pytest.FixtureRequest) -> PrivateSeam:
    return PrivateSeam(request.param)


async def ask(transport: Transport, endpoint: Endpoint) -> bytes | None:
    stream = await transport.open_stream(endpoint)
    try:
        await stream.send(b"hello")
        return await stream.receive()
    finally:
        await stream.close()


@pytest.mark.parametrize("member", [OWNER, SERVER, USER], ids=lambda m: m.role)
def test_members_of_every_role_come_in(seam: PrivateSeam, member: Membership) -> None:
    async def test() -> None:
        listener = await seam.listen_as(SERVER)

        assert await ask(seam.member(member, "client"), listener.endpoint) == b"hello"

    seam.run(test)


@pytest.mark.parametrize(
    ("dialler", "complaint"),
    [
        (None, "belongs to a private swarm; ask its owner"),
        (PUBLIC, "belongs to a private swarm; ask its owner"),
        (STRANGER, "does not belong to the swarm of this join code"),
        (STRANGER.as_role(Role.USE), "does not belong to the swarm of this join code"),
    ],
)
def test_others_are_turned_away_before_anything_is_served(
    seam: PrivateSeam, dialler: Membership | None, complaint: str
) -> None:
    served: list[Stream] = []

    async def serve(stream: Stream) -> None:
        served.append(stream)

    async def test() -> None:
        listener = await seam.listen_as(SERVER, serve)
        transport = seam.member(dialler, "client")
        for _ in range(2):
            with pytest.raises(NotAMemberError, match=complaint) as caught:
                await transport.open_stream(listener.endpoint)
            assert caught.value.code is ErrorCode.NOT_A_MEMBER

    seam.run(test)
    assert served == []


def test_member_is_welcome_in_public_places(seam: PrivateSeam) -> None:
    async def test() -> None:
        listener = await seam.listen_as(PUBLIC)

        assert await ask(seam.member(USER, "client"), listener.endpoint) == b"hello"

    seam.run(test)


def test_proof_made_for_one_peer_is_worth_nothing_at_another(seam: PrivateSeam) -> None:
    async def test() -> None:
        listener = await seam.listen_as(SERVER)
        elsewhere = USER.prove_to("ab" * 32)

        assert not SERVER.accepts(listener.endpoint.fingerprint, elsewhere)
        assert SERVER.accepts(
            listener.endpoint.fingerprint, USER.prove_to(listener.endpoint.fingerprint)
        )

    seam.run(test)
