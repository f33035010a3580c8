"""Streams over p2pd: what strangers may write into them, over a pair of sockets."""

from __future__ import annotations

import asyncio
import gc
import socket
import struct
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager

import pytest
from async_tests import RunAsync

from shoal.protocol.errors import RemoteProtocolError, UnavailableError
from shoal.protocol.limits import MAX_FRAME_BYTES, MAX_PIECE_BYTES
from shoal.protocol.net.libp2p.libp2p_stream import Libp2pStream, MessageFraming, pack_message

END = pack_message(b"")
TOO_LARGE = struct.pack("<II", MAX_FRAME_BYTES + 5, MAX_FRAME_BYTES + 1)


def pack(*frames: bytes) -> bytes:
    return b"".join(piece for frame in frames for piece in MessageFraming().pack(frame))


@pytest.fixture
def run_async() -> Iterator[RunAsync]:
    """Sockets take real time."""
    with asyncio.Runner() as runner:
        yield runner.run


@asynccontextmanager
async def stream_and_stranger() -> AsyncIterator[tuple[Libp2pStream, asyncio.StreamWriter]]:
    """Yield a stream, and the raw other end of its socket."""
    ours, theirs = socket.socketpair()
    _, writer = await asyncio.open_connection(sock=theirs)
    writer.write(pack_message(b"hello"))
    stream = await Libp2pStream.accept(*await asyncio.open_connection(sock=ours), None)
    assert await stream.receive() == b"hello"
    try:
        yield stream, writer
    finally:
        stream.break_off("the test is over")
        await stream.wait_lost()
        writer.transport.abort()
        await asyncio.sleep(0)  # for the transports to close their sockets


async def test_end_is_told_from_a_break() -> None:
    async with stream_and_stranger() as (stream, stranger):
        stranger.write(pack(b"frame") + END)
        stranger.close()
        assert await stream.receive() == b"frame"
        assert await stream.receive() is None

    async with stream_and_stranger() as (stream, stranger):
        stranger.write(pack(b"frame"))
        stranger.close()
        async with asyncio.timeout(5):
            await stream.wait_over()
        assert await stream.receive() == b"frame"
        with pytest.raises(UnavailableError):
            await stream.receive()


@pytest.mark.parametrize("num_bytes", [MAX_PIECE_BYTES + 1, 4 * MAX_PIECE_BYTES])
async def test_end_in_the_middle_of_a_frame_is_an_end_and_no_lie(num_bytes: int) -> None:
    """An older peer says it when it closes a stream on which it is sending."""
    async with stream_and_stranger() as (stream, stranger):
        stranger.write(next(MessageFraming().pack(bytes(num_bytes))) + END)

        assert await stream.receive() is None


async def test_break_is_noticed_behind_frames_that_nobody_has_read() -> None:
    async with stream_and_stranger() as (stream, stranger):
        stranger.write(pack(bytes(10_000), bytes(10_000)))
        stranger.close()

        async with asyncio.timeout(5):
            await stream.wait_over()


async def test_no_more_is_taken_in_than_the_window_and_one_message() -> None:
    async with stream_and_stranger() as (_, stranger):
        stranger.write(pack(bytes(200_000)) * 20)

        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.001):
                await stranger.drain()
        assert stranger.transport.get_write_buffer_size() > 2_000_000


async def test_tiny_messages_take_no_more_memory_than_others() -> None:
    async with stream_and_stranger() as (stream, stranger):
        tracemalloc.start()
        try:
            stranger.write(pack(b"") * 16_000)
            await stranger.drain()
            await asyncio.sleep(0.1)  # as long as anything comes, if it were without end
            num_bytes, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert num_bytes < 300_000
        for _ in range(16_000):
            assert await stream.receive() == b""


async def test_dropping_tiny_messages_lets_others_have_their_turns() -> None:
    async with stream_and_stranger() as (stream, stranger):
        await stream.close()
        stranger.write(pack(b"") * 1000 + END)
        gone = asyncio.create_task(stream.wait_lost())
        num_turns = 0
        while not gone.done():
            await asyncio.sleep(0)
            num_turns += 1

        assert num_turns > 10


async def test_frame_beyond_the_limit_is_the_fault_of_the_other_end_who_hears_our_answer() -> None:
    ours, theirs = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=theirs)
    writer.write(pack_message(b"hello"))
    stream = await Libp2pStream.accept(*await asyncio.open_connection(sock=ours), None)
    assert await stream.receive() == b"hello"
    writer.write(TOO_LARGE + bytes(1_000_000))

    for _ in range(2):
        with pytest.raises(RemoteProtocolError):
            await stream.receive()
    await stream.send(b"too large")
    await stream.close()

    expected = pack(b"too large") + END
    assert await reader.readexactly(len(expected)) == expected
    writer.close()
    await stream.wait_lost()


async def test_stream_that_ended_before_it_was_taken_over_is_broken() -> None:
    ours, theirs = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=ours)
    theirs.sendall(pack_message(b"hello"))
    theirs.close()
    while not reader.at_eof():
        await reader.read(100)
    stream = Libp2pStream(reader, writer, "peer", None)
    with pytest.raises(UnavailableError):
        await stream.receive()
    await stream.wait_lost()


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
    stranger.write(TOO_LARGE)
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
            stranger.transport.set_write_buffer_limits(0)
            receiving = asyncio.create_task(stream.receive())
            stranger.writelines(list(MessageFraming().pack(bytes(8 * 2**20)))[:-1])
            await stranger.drain()  # else asyncio's own buffers are left, and counted below
            receiving.cancel()
            await asyncio.wait([receiving])
            await end(stream, stranger)
            await stream.close()
            await stream.wait_lost()

    gc.disable()
    tracemalloc.start()
    try:
        asyncio.run(test())
        num_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        gc.enable()
    assert num_bytes < 2**19
