"""Whether a peer can be dialled, as those find out who try."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from libp2p_parts import connected_p2pds

from shoal.protocol.endpoints import Endpoint
from shoal.protocol.identity import Identity
from shoal.protocol.net.addresses import list_own_hosts
from shoal.protocol.net.clock import SystemClock
from shoal.protocol.net.relays.reach import Scope
from shoal.protocol.net.tcp.tcp_transport import TcpTransport
from shoal.protocol.net.transport import Stream

OWN = "127.0.0.1"

pytestmark = [
    pytest.mark.network,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


async def never(stream: Stream) -> None:
    raise AssertionError("nobody opens a stream here")


@asynccontextmanager
async def open_scene(num_others: int = 1) -> AsyncGenerator[tuple[Any, Endpoint]]:
    """Yield the p2pd of who asks others, and an endpoint that they can dial."""
    from shoal.protocol.net.relays.reachability import answer_dial_back

    transport = TcpTransport()
    async with connected_p2pds(num_others) as (others, (asking,)):
        for other in others:
            await answer_dial_back(other)
        yield asking, (await transport.listen("127.0.0.1", 0, never)).endpoint
        await transport.close()


async def test_open_port_is_reached_and_no_other() -> None:
    """The question has no host, so that no third party can be named: who asks compares."""
    from shoal.protocol.net.relays.reachability import find_reach

    async with open_scene() as (asking, endpoint):
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            closed_port = unused.getsockname()[1]
            expected = {
                endpoint: Scope.NETWORK,
                Endpoint("127.0.0.1", closed_port, endpoint.fingerprint): Scope.NOBODY,
                Endpoint("127.0.0.1", endpoint.port, "0" * 64): Scope.NOBODY,
                Endpoint("peer.example", endpoint.port, endpoint.fingerprint): Scope.NETWORK,
            }

            found = {at: (await find_reach(asking, at, OWN)).scope for at in expected}
            assert found == expected


async def test_peer_asks_once_more_when_nobody_has_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Older peers answer a second question of one host with "not tried" for ten seconds."""
    from shoal.protocol.net.relays import reachability

    verdicts = [reachability.NOT_TRIED, reachability.NOT_REACHED]

    async def answer_as_before(p2p: Any) -> None:
        async def serve(info: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
            await reader.readexactly(reachability.QUESTION.size)
            writer.write(verdicts.pop(0) + b"127.0.0.1")
            await writer.drain()
            writer.close()

        await p2p.add_binary_stream_handler(reachability.PROTOCOL, serve)

    monkeypatch.setattr(reachability, "answer_dial_back", answer_as_before)
    monkeypatch.setattr(reachability, "PAUSE_SECONDS", 0.1)

    async with open_scene() as (asking, endpoint):
        assert (await reachability.find_reach(asking, endpoint, OWN)).scope is Scope.NOBODY
        assert not verdicts


async def test_those_on_this_machine_are_not_asked() -> None:
    """They are known by the addresses of the machine, whatever it announces."""
    from shoal.protocol.net.libp2p.multiaddrs import PeerAddress
    from shoal.protocol.net.libp2p.p2p_daemon import (
        start_reading_p2pd,
        start_serving_p2pd,
        stop_p2pd,
    )
    from shoal.protocol.net.relays import reachability

    own_hosts = list_own_hosts("0.0.0.0")
    if not own_hosts:
        pytest.skip("this machine is in no network")
    asked: list[str] = []

    async def serve(info: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(str(info.addr))
        await reader.readexactly(reachability.QUESTION.size)
        writer.write(reachability.REACHED + b"10.0.0.9")
        await writer.drain()
        writer.close()

    async with AsyncExitStack() as stack:
        neighbour = await start_serving_p2pd([], None, own_hosts[0], 0)
        stack.push_async_callback(stop_p2pd, neighbour)
        await neighbour.add_binary_stream_handler(reachability.PROTOCOL, serve)
        (address,) = await neighbour.get_visible_maddrs()
        asking = await start_reading_p2pd([PeerAddress.parse(str(address))], None)
        stack.push_async_callback(stop_p2pd, asking)
        endpoint = Endpoint("peer.example", 4001, "0" * 64)

        reach = await reachability.find_reach(asking, endpoint, "0.0.0.0")
        assert (reach.scope, asked) == (Scope.UNKNOWN, [])
        elsewhere = await reachability.find_reach(asking, endpoint, "10.99.99.99")
        assert (elsewhere.scope, len(asked)) == (Scope.NETWORK, 1)


async def test_program_of_this_machine_is_no_stranger_whatever_is_announced() -> None:
    from shoal.protocol.net.dht.internet import InternetNetwork, Listening

    own_hosts = list_own_hosts("0.0.0.0")
    if not own_hosts:
        pytest.skip("this machine is in no network")
    strangers: list[str] = []
    network = InternetNetwork(
        SystemClock(),
        listening=Listening("0.0.0.0", announce_host="peer.example"),
        note_stranger=lambda host, is_local: strangers.append(host),
    )
    is_served = asyncio.Event()

    async def serve(stream: Stream) -> None:
        is_served.set()

    async with AsyncExitStack() as stack:
        presence = await network.serve(Identity(bytes(32)), serve)
        stack.push_async_callback(presence.close)
        client = TcpTransport()
        stack.push_async_callback(client.close)
        await client.open_stream(replace(presence.addresses.endpoints[0], host=own_hosts[0]))
        async with asyncio.timeout(60):  # only a broken test waits
            await is_served.wait()

    assert strangers == []
