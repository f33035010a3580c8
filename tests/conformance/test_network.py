"""The conformance suite of networks: for a client and for a peer, over each implementation."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, cast

import pytest
from announcements import describe_peer
from transport_seam import echo

from shoal.protocol.errors import UnavailableError
from shoal.protocol.identity import Identity
from shoal.protocol.ids import ModelId
from shoal.protocol.net.clock import SystemClock
from shoal.protocol.net.dht.internet import InternetNetwork
from shoal.protocol.net.memory.loopback import LoopbackNetwork
from shoal.protocol.net.memory.memory_directory import MemoryDirectoryStore
from shoal.protocol.net.memory.memory_network import MemoryNetwork
from shoal.protocol.net.network import Network, Presence
from shoal.protocol.records.announcements import sign_announcement
from shoal.protocol.spans import Span

CLOCK = SystemClock()
IDENTITY = Identity(bytes([1]) * 32)
MODEL = ModelId("a" * 32)

Join = Callable[[Presence | None], Network]
"""Return the network of one more process: in a new swarm, or that of a peer."""


def join_in_memory() -> Join:
    hosts, store = LoopbackNetwork(), MemoryDirectoryStore()
    names = iter(("peer", "client"))
    return lambda first: MemoryNetwork(hosts, store, CLOCK, next(names))


def join_internet() -> Join:
    def join(first: Presence | None) -> Network:
        dialled = () if first is None else cast(list[str], first.facts["dialled"])
        return InternetNetwork(CLOCK, initial_peers=dialled)

    return join


@pytest.fixture(params=["memory", pytest.param("internet", marks=pytest.mark.network)])
def run(request: pytest.FixtureRequest) -> Callable[[Any], None]:
    """Runs a test with a peer that echoes, and the network of another process."""
    make_join = {"memory": join_in_memory, "internet": join_internet}[request.param]

    def run_test(test: Callable[[Presence, Network], Coroutine[Any, Any, None]]) -> None:
        async def main() -> None:
            join = make_join()
            presence = await join(None).serve(IDENTITY, echo)
            try:
                await test(presence, join(presence))
            finally:
                await presence.close()

        asyncio.run(main())

    return run_test


def test_client_finds_a_peer_and_dials_what_it_announced(run: Callable[[Any], None]) -> None:
    async def test(presence: Presence, network: Network) -> None:
        now = CLOCK.wall()
        announced = describe_peer(
            peer_id=presence.identity.peer_id,
            model_id=MODEL,
            num_blocks=4,
            span=Span(0, 4),
            endpoints=(presence.endpoint,),
            issued_at=now,
            expires_at=now + 90,
        )
        await presence.directory.announce(sign_announcement(IDENTITY, announced))
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

    run(test)


def test_peer_that_others_can_dial_has_no_relays(run: Callable[[Any], None]) -> None:
    async def test(presence: Presence, network: Network) -> None:
        assert presence.identity is IDENTITY
        assert [listener.endpoint for listener in presence.listeners] == [presence.endpoint]
        assert (list(presence.relays), presence.relay_port) == ([], 0)
        assert not await presence.renew_relays(MODEL)

    run(test)


def test_peer_that_has_left_answers_nobody_and_may_leave_again(run: Callable[[Any], None]) -> None:
    async def test(presence: Presence, network: Network) -> None:
        transport, directory = await network.connect()
        try:
            await presence.close()
            await presence.close()
            with pytest.raises(UnavailableError):
                await transport.open_stream(presence.endpoint)
        finally:
            await transport.close()
            await directory.close()

    run(test)
