"""What strangers may write on a connection once it has become a stream."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from raw_connection import dial_raw

from shoal.protocol.net.frame_cutter import Mark, pack_frame, pack_mark
from shoal.protocol.net.tcp_transport import TcpTransport
from shoal.protocol.net.transport import Stream

pytestmark = pytest.mark.network


def run(
    serve: Callable[[Stream], Awaitable[None]],
    attack: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> None:
    """Let somebody attack a server over a stream."""

    async def test() -> None:
        transport = TcpTransport()
        endpoint = (await transport.listen("127.0.0.1", 0, serve)).endpoint
        async with asyncio.timeout(20), dial_raw(endpoint) as (reader, writer):
            await attack(reader, writer)
        await transport.close()

    asyncio.run(test())


def test_who_goes_on_behind_his_end_is_cut_off_and_his_frames_still_count() -> None:
    frames: list[bytes | None] = []

    async def serve(stream: Stream) -> None:
        await stream.wait_over()
        frames.extend([await stream.receive(), await stream.receive()])

    async def attack(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"".join(pack_frame(b"before")) + pack_mark(Mark.END))
        with pytest.raises(ConnectionError):
            while True:
                writer.write(bytes(2**16))
                await writer.drain()

    run(serve, attack)
    assert frames == [b"before", None]
