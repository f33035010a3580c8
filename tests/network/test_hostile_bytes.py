"""What strangers may write on a connection once it has become a stream."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from raw_connection import dial_raw

from shoal.protocol.limits import MAX_FRAME_BYTES
from shoal.protocol.net.frame_stream import MAX_FRAMES_AT_ONCE, Framing, Mark
from shoal.protocol.net.tcp.tcp_transport import TcpTransport
from shoal.protocol.net.transport import Stream

pytestmark = pytest.mark.network


def run(
    serve: Callable[[Stream], Awaitable[None]],
    attack: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> None:
    """Let somebody attack a server over a stream; asyncio may have nothing to complain about."""
    complaints: list[dict[str, Any]] = []

    async def test() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, what: complaints.append(what))
        transport = TcpTransport()
        endpoint = (await transport.listen("127.0.0.1", 0, serve)).endpoint
        async with asyncio.timeout(20), dial_raw(endpoint) as (reader, writer):
            await attack(reader, writer)
        await transport.close()

    asyncio.run(test())
    gc.collect()
    assert complaints == []


async def flood_with(content: bytes, writer: asyncio.StreamWriter) -> None:
    while True:
        writer.write(content)
        await writer.drain()
        await asyncio.sleep(0)  # a failed write is told in a turn of the loop, and drain takes none


def test_who_goes_on_behind_his_end_is_cut_off_and_his_frames_still_count() -> None:
    frames: list[bytes | None] = []

    async def serve(stream: Stream) -> None:
        await stream.wait_over()
        frames.extend([await stream.receive(), await stream.receive()])

    async def attack(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"".join(Framing().pack(b"before")) + Framing().pack_mark(Mark.END))
        with pytest.raises(ConnectionError):
            await flood_with(bytes(2**16), writer)

    run(serve, attack)
    assert frames == [b"before", None]


@pytest.mark.parametrize("frame", [b"", bytes(2**14)], ids=["tiny", "large"])
def test_who_floods_a_stream_that_was_closed_is_cut_off(frame: bytes) -> None:
    """Else he would keep us reading. It takes less than the seconds for which he may go on."""
    packed = b"".join(Framing().pack(frame))
    num_sent = 0

    async def serve(stream: Stream) -> None:
        await stream.close()

    async def attack(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async def send() -> None:
            nonlocal num_sent
            while True:
                writer.write(portion)
                await writer.drain()
                await asyncio.sleep(0)  # as above
                num_sent += len(portion)

        portion = packed * max(1, 2**14 // len(packed))
        with pytest.raises(ConnectionError):
            await send()

    run(serve, attack)
    # What was dropped, and what the system holds of a connection.
    assert num_sent < 2 * MAX_FRAME_BYTES + 16 * 2**20


def count_waiting(stream: Stream) -> int:
    """Receive what has been cut into frames, without letting the event loop turn."""
    num_received = 0
    while True:
        receiving = stream.receive()
        try:
            receiving.send(None)
        except StopIteration as returned:
            if returned.value is None:
                return num_received
            num_received += 1
        else:
            receiving.close()
            return num_received


def test_tiny_frames_come_in_portions_and_none_is_lost() -> None:
    num_frames = 20_000
    is_sent = asyncio.Event()
    num_waiting = num_received = 0

    async def serve(stream: Stream) -> None:
        nonlocal num_waiting, num_received
        await is_sent.wait()
        await asyncio.sleep(0.1)  # for all of it to arrive, if nothing held it up
        num_received = num_waiting = count_waiting(stream)
        while await stream.receive() is not None:
            num_received += 1

    async def attack(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"".join(Framing().pack(b"")) * num_frames + Framing().pack_mark(Mark.END))
        await writer.drain()
        is_sent.set()
        await reader.read()

    run(serve, attack)
    assert 0 < num_waiting <= 2 * MAX_FRAMES_AT_ONCE
    assert num_received == num_frames
