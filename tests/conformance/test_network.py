"""The conformance suite of networks: for a client and for a peer, over each implementation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import cast

import pytest
from announcements import MODEL, identity_of, make_announcement, sign
from async_tests import RunAsync
from transport_seam import echo

from shoal.protocol.errors import UnavailableError
from shoal.protocol.membership.join_code import JoinCode
from shoal.protocol.net.clock import SystemClock
from shoal.protocol.net.dht.internet import InternetNetwork
from shoal.protocol.net.libp2p.multiaddrs import split_multiaddr
from shoal.protocol.net.memory.loopback import LoopbackNetwork
from shoal.protocol.net.memory.memory_directory import MemoryDirectoryStore
from shoal.protocol.net.memory.memory_network import MemoryNetwork
from shoal.protocol.net.network import Network, Presence

CLOCK = SystemClock()
IDENTITY = identity_of(1)

Join = Callable[[Presence | None], Network]
"""Return the network of one more process: in a new swarm, or that of a peer."""


def join_in_memory() -> Join:
    hosts, store = LoopbackNetwork(), MemoryDirectoryStore()
    names = iter(("peer", "client"))
    return lambda first: MemoryNetwork(hosts, store, CLOCK, next(names))


def join_internet() -> Join:
    def join(first: Presence | None) -> Network:
        dialled = () if first is None else cast(list[str], first.addresses.facts["dialled"])
        return InternetNetwork(CLOCK, initial_peers=dialled)

    return join


@pytest.fixture(params=["memory", pytest.param("internet", marks=pytest.mark.network)])
def join(request: pytest.FixtureRequest) -> Join:
    return {"memory": join_in_memory, "internet": join_internet}[request.param]()


@pytest.fixture
def presence(join: Join, run_async: RunAsync) -> Iterator[Presence]:
    """A peer that echoes."""
    presence: Presence = run_async(join(None).serve(IDENTITY, echo))
    yield presence
    run_async(presence.close())


@pytest.fixture
def network(join: Join, presence: Presence) -> Network:
    """The network of another process."""
    return join(presence)


@pytest.mark.network
async def test_peer_on_this_machine_says_where_others_join_through_it() -> None:
    presence = await join_internet()(None).serve(IDENTITY, echo)
    try:
        (dialled,) = cast(list[str], presence.addresses.facts["dialled"])
        assert split_multiaddr(dialled) == ("127.0.0.1", presence.directory_port)
    finally:
        await presence.close()


@pytest.mark.network
async def test_code_of_a_peer_that_has_joined_outlives_the_first_one() -> None:
    join = join_internet()
    first = await join(None).serve(IDENTITY, echo)
    try:
        second = await join(first).serve(identity_of(2), echo)
        try:
            (code,) = cast(dict[str, str], second.addresses.facts["join_codes"]).values()
            dialled = [
                cast(list[str], peer.addresses.facts["dialled"])[0] for peer in (second, first)
            ]
            assert list(JoinCode.parse(code).addresses) == dialled
        finally:
            await second.close()
    finally:
        await first.close()


async def test_client_finds_a_peer_and_dials_what_it_announced(
    presence: Presence, network: Network
) -> None:
    announced = make_announcement(1, CLOCK.wall(), endpoints=tuple(presence.addresses.endpoints))
    await presence.directory.announce(sign(announced))
    transport, directory = await network.connect()
    try:
        (found,) = await directory.lookup(MODEL)
        assert found == announced
        stream = await transport.open_stream(found.endpoints[0])
        await stream.send(b"hello")
        assert await stream.receive() == b"hello"
        await stream.close()
    finally:
        await transport.close()
        await directory.close()


async def test_peer_that_others_can_dial_has_no_relays(
    presence: Presence, network: Network
) -> None:
    assert presence.identity is IDENTITY
    assert [listener.endpoint for listener in presence.listeners] == [*presence.addresses.endpoints]
    assert list(presence.relays) == []
    assert presence.addresses.relay_port == 0
    assert not await presence.renew_relays(MODEL)


async def test_peer_that_has_left_answers_nobody_and_may_leave_again(
    presence: Presence, network: Network
) -> None:
    transport, directory = await network.connect()
    try:
        await presence.close()
        await presence.close()
        with pytest.raises(UnavailableError):
            await transport.open_stream(presence.addresses.endpoints[0])
    finally:
        await transport.close()
        await directory.close()
