"""Streams over bytes: what strangers may write into them, over a pair of sockets."""

from __future__ import annotations

import asyncio
import gc
import socket
import struct
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import pytest

from shoal.protocol.errors import RemoteProtocolError, UnavailableError
from shoal.protocol.net.libp2p.libp2p_stream import MAX_MESSAGE_BYTES, Libp2pStream
from shoal.protocol.net.tcp.tcp_stream import pack_frame


def pack(*messages: bytes) -> bytes:
    return b"".join(struct.pack("<I", len(message)) + message for message in messages)


@asynccontextmanager
async def stream_and_stranger() -> AsyncIterator[tuple[Libp2pStream, asyncio.StreamWriter]]:
    """Yield a stream, and the raw other end of its socket."""
    ours, theirs = socket.socketpair()
    stream = Libp2pStream(*await asyncio.open_connection(sock=ours), None, "peer", lambda _: None)
    _, writer = await asyncio.open_connection(sock=theirs)
    try:
        yield stream, writer
    finally:
        await stream.abort("the test is over")
        writer.transport.abort()
        await asyncio.sleep(0)  # for the transports to close their sockets


def test_end_is_told_from_a_break() -> None:
    async def test() -> None:
        async with stream_and_stranger() as (stream, stranger):
            stranger.write(pack(*pack_frame(b"frame"), b""))
            stranger.close()
            assert await stream.receive() == b"frame"
            assert await stream.receive() is None

        async with stream_and_stranger() as (stream, stranger):
            stranger.write(pack(*pack_frame(b"frame")))
            stranger.close()
            async with asyncio.timeout(5):
                await stream.wait_over()
            with pytest.raises(UnavailableError):
                await stream.receive()

    asyncio.run(test())


def test_break_is_noticed_behind_frames_that_nobody_has_read() -> None:
    async def test() -> None:
        async with stream_and_stranger() as (stream, stranger):
            stranger.write(pack(*pack_frame(bytes(20_000)), *pack_frame(bytes(20_000))))
            stranger.close()

            async with asyncio.timeout(5):
                await stream.wait_over()

    asyncio.run(test())


def test_no_more_is_taken_in_than_the_window_and_one_message() -> None:
    async def test() -> None:
        async with stream_and_stranger() as (_, stranger):
            stranger.write(pack(*pack_frame(bytes(200_000))) * 20)

            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await stranger.drain()
            assert stranger.transport.get_write_buffer_size() > 2_000_000

    asyncio.run(test())


def test_tiny_messages_take_no_more_memory_than_others() -> None:
    async def test() -> None:
        async with stream_and_stranger() as (stream, stranger):
            tracemalloc.start()
            try:
                stranger.write(pack(*pack_frame(b"")) * 16_000)
                await stranger.drain()
                await asyncio.sleep(0.1)  # as long as anything comes, if it were without end
                num_bytes, _ = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
            assert num_bytes < 300_000
            for _ in range(16_000):
                assert await stream.receive() == b""

    asyncio.run(test())


def test_dropping_tiny_messages_lets_others_have_their_turns() -> None:
    async def test() -> None:
        async with stream_and_stranger() as (stream, stranger):
            await stream.close()
            stranger.write(pack(*[b"x"] * 5000, b""))
            gone = asyncio.create_task(stream.wait_gone())
            num_turns = 0
            while not gone.done():
                await asyncio.sleep(0)
                num_turns += 1

            assert num_turns > 5000

    asyncio.run(test())


def test_message_beyond_the_limit_is_the_fault_of_the_other_end_who_hears_our_answer() -> None:
    async def test() -> None:
        ours, theirs = socket.socketpair()
        stream = Libp2pStream(
            *await asyncio.open_connection(sock=ours), None, "peer", lambda _: None
        )
        reader, writer = await asyncio.open_connection(sock=theirs)
        writer.write(struct.pack("<I", MAX_MESSAGE_BYTES + 1) + bytes(1_000_000))

        for _ in range(2):
            with pytest.raises(RemoteProtocolError):
                await stream.receive()
        await stream.send(b"too large")
        await stream.close()

        expected = pack(*pack_frame(b"too large"), b"")
        assert await reader.readexactly(len(expected)) == expected
        writer.close()
        await stream.wait_gone()

    asyncio.run(test())


async def break_in_half_a_frame(stream: Libp2pStream, stranger: asyncio.StreamWriter) -> None:
    stranger.close()
    with pytest.raises(UnavailableError):
        await stream.receive()


async def close_in_half_a_frame(stream: Libp2pStream, stranger: asyncio.StreamWriter) -> None:
    receiving = asyncio.create_task(stream.receive())
    await stream.close()
    assert await receiving is None
    stranger.close()


async def refuse_half_a_frame(stream: Libp2pStream, stranger: asyncio.StreamWriter) -> None:
    stranger.write(struct.pack("<I", MAX_MESSAGE_BYTES + 1))
    for _ in range(2):
        with pytest.raises(RemoteProtocolError):
            await stream.receive()
    stranger.close()


@pytest.mark.parametrize("end", [break_in_half_a_frame, close_in_half_a_frame, refuse_half_a_frame])
def test_half_a_frame_is_gone_with_its_stream_without_a_garbage_collection(
    end: Callable[[Libp2pStream, asyncio.StreamWriter], Awaitable[None]],
) -> None:
    """Any number of them could wait for the next one."""

    async def test() -> None:
        async with stream_and_stranger() as (stream, stranger):
            stranger.write(pack(*list(pack_frame(bytes(8 * 2**20)))[:-1]))
            with suppress(TimeoutError):
                async with asyncio.timeout(0.2):
                    await stream.receive()
            await end(stream, stranger)
            await stream.close()
            await stream.wait_gone()

    gc.disable()
    tracemalloc.start()
    try:
        asyncio.run(test())
        num_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        gc.enable()
    assert num_bytes < 2**19
