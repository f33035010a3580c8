"""Large frames on their way, and what a stranger may not do with them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest

from shoal.protocol.errors import ErrorCode, RefusedError, RemoteProtocolError, UnavailableError
from shoal.protocol.limits import MAX_FRAME_BYTES, MAX_PIECE_BYTES, MAX_SMALL_FRAME_BYTES
from shoal.protocol.net.frame_stream import LENGTH, FrameStream, Framing

LARGE = bytes(range(256)) * (3 * MAX_PIECE_BYTES // 256) + b"end"
FIRST, SECOND, *_ = Framing().pack(LARGE)


def hear(stream: FrameStream, *frames: bytes) -> None:
    for frame in frames:
        for piece in Framing().pack(frame):
            stream.data_received(piece)


async def test_stream_that_ends_within_a_frame_is_broken() -> None:
    stream = FrameStream("peer")
    stream.data_received(FIRST)
    receiving = asyncio.create_task(stream.receive())
    await asyncio.sleep(0)
    stream.connection_lost(None)
    with pytest.raises(UnavailableError):
        await receiving


@pytest.mark.parametrize(
    ("num_bytes", "least_seconds", "most_seconds"),
    [(MAX_FRAME_BYTES, 54, 60), (len(LARGE), 5, 10), (MAX_SMALL_FRAME_BYTES + 1, 5, 10)],
)
async def test_frame_that_was_begun_and_is_not_finished_ends_the_stream(
    num_bytes: int, least_seconds: float, most_seconds: float
) -> None:
    stream = FrameStream("peer")
    stream.data_received(LENGTH.pack(num_bytes) + bytes(num_bytes - 1))
    with pytest.raises(RemoteProtocolError, match="not finished"):
        await stream.receive()
    assert least_seconds < asyncio.get_running_loop().time() < most_seconds
    over = asyncio.create_task(stream.wait_over())
    await asyncio.sleep(0)
    assert not over.done(), "the answer to it still has to leave"
    over.cancel()


async def test_gate_is_asked_about_large_frames_before_they_are_taken() -> None:
    log: list[object] = []

    @asynccontextmanager
    async def gate(num_bytes: int) -> AsyncGenerator[None]:
        log.append(num_bytes)
        yield
        log.append("complete")

    stream = FrameStream("peer")
    stream.set_gate(gate)
    hear(stream, b"small", LARGE)
    assert log == []

    assert await stream.receive() == b"small"
    assert await stream.receive() == LARGE
    await asyncio.sleep(1)
    assert log == [len(LARGE), "complete"]


async def test_rest_of_a_refused_frame_is_read_and_dropped() -> None:
    """Or its sender, who is busy sending, would not hear why."""

    @asynccontextmanager
    async def gate(num_bytes: int) -> AsyncGenerator[None]:
        raise RefusedError(ErrorCode.BUSY, "no room")
        yield

    stream = FrameStream("peer")
    stream.set_gate(gate)
    hear(stream, LARGE, b"next")

    for _ in range(2):
        with pytest.raises(RefusedError, match="no room"):
            await stream.receive()
