"""Whoever holds many streams leaves room for others, whatever carries them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from libp2p_parts import connected_p2pds
from raw_connection import dial_raw

from shoal.protocol.errors import UnavailableError
from shoal.protocol.net.relays.reach import Scope
from shoal.protocol.net.tcp import tcp_listener
from shoal.protocol.net.tcp.tcp_transport import TcpTransport
from shoal.protocol.net.transport import Stream, Transport

pytestmark = [
    pytest.mark.network,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


async def wait(stream: Stream) -> None:
    """Serve a stream like a peer that still loads its blocks."""
    await stream.wait_over()


async def open_many(transport: Transport, endpoint: Any, number: int) -> list[Stream]:
    """Return as many of so many streams as can be had."""
    streams: list[Stream] = []
    for _ in range(number):
        try:
            streams.append(await transport.open_stream(endpoint))
        except UnavailableError:
            break
    return streams


async def open_silent(dialler: Any, server: Any, protocol: str) -> list[Any]:
    from shoal.protocol.net.libp2p.p2p_daemon import open_byte_stream

    peer_id = str(server.peer_id)
    return [await open_byte_stream(dialler, peer_id, protocol) for _ in range(12)]


def abort(silent: list[Any]) -> None:
    for _, writer in silent:
        writer.transport.abort()


async def test_who_says_nothing_over_libp2p_keeps_nobody_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from shoal.protocol.net.libp2p import libp2p_transport

    monkeypatch.setattr(libp2p_transport, "MAX_HANDSHAKES", 8)
    monkeypatch.setattr(libp2p_transport, "MAX_STREAMS", 8)

    async with connected_p2pds(1, 2) as ((server,), (silent, honest)):
        serving = libp2p_transport.Libp2pTransport(server)
        dialling = libp2p_transport.Libp2pTransport(honest)
        endpoint = (await serving.listen("127.0.0.1", 0, wait)).endpoint
        streams = await open_silent(silent, server, libp2p_transport.PROTOCOL)

        stream = await dialling.open_stream(endpoint)

        await stream.close()
        abort(streams)
        for transport in (dialling, serving):
            await transport.close()


async def test_who_holds_many_streams_over_libp2p_keeps_nobody_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from shoal.protocol.net.libp2p import libp2p_transport

    monkeypatch.setattr(libp2p_transport, "MAX_STREAMS", 8)

    async with connected_p2pds(1, 2) as ((server,), p2ps):
        serving = libp2p_transport.Libp2pTransport(server)
        greedy, other = (libp2p_transport.Libp2pTransport(p2p) for p2p in p2ps)
        endpoint = (await serving.listen("127.0.0.1", 0, wait)).endpoint

        assert len(await open_many(greedy, endpoint, 12)) == 3
        assert await open_many(other, endpoint, 1)

        for transport in (greedy, other, serving):
            await transport.close()


async def test_who_asks_nothing_to_be_dialled_back_keeps_few_streams(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from shoal.protocol.net.relays import reachability

    monkeypatch.setattr(reachability, "MAX_QUESTIONS", 8)

    async with connected_p2pds(1, 2) as ((server,), (silent, honest)):
        await reachability.answer_dial_back(server)
        serving = TcpTransport()
        endpoint = (await serving.listen("127.0.0.1", 0, wait)).endpoint
        streams = await open_silent(silent, server, reachability.PROTOCOL)

        # Streams reach the other end in any order.
        async with asyncio.timeout(reachability.ANSWER_SECONDS / 2), asyncio.TaskGroup() as group:
            reading = [group.create_task(reader.read()) for reader, _ in streams]
            ended, kept = await asyncio.wait(reading, return_when=asyncio.FIRST_COMPLETED)
            for task in kept:
                task.cancel()
        assert {task.result() for task in ended} == {b""}
        assert (
            await reachability.find_reach(honest, endpoint, endpoint.host)
        ).scope is Scope.NETWORK

        abort(streams)
        await serving.close()


async def test_one_address_leaves_streams_over_tcp_to_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody else counts them while a peer loads its blocks."""
    monkeypatch.setattr(tcp_listener, "MAX_STREAMS", 8)

    serving, greedy = TcpTransport(), TcpTransport()
    endpoint = (await serving.listen("127.0.0.1", 0, wait)).endpoint

    assert len(await open_many(greedy, endpoint, 12)) == 5
    async with dial_raw(endpoint, from_host="127.0.0.2"):
        assert len(await open_many(greedy, endpoint, 1)) == 0

    for transport in (greedy, serving):
        await transport.close()


async def test_large_hello_over_libp2p_is_refused_before_it_has_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from shoal.protocol.net.libp2p import libp2p_transport

    monkeypatch.setattr(libp2p_transport, "HELLO_SECONDS", 60.0)

    async with connected_p2pds(1, 2) as ((server,), (stranger, _)):
        serving = libp2p_transport.Libp2pTransport(server)
        await serving.listen("127.0.0.1", 0, wait)
        streams = await open_silent(stranger, server, libp2p_transport.PROTOCOL)
        reader, writer = streams[0]

        writer.write((64 * 2**10).to_bytes(4, "little"))

        async with asyncio.timeout(10):
            assert await reader.read() == b""
        abort(streams)
        await serving.close()
