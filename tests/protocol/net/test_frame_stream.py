"""Large frames on their way, and what a stranger may not do with them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest

from shoal.protocol.errors import (
    ErrorCode,
    RefusedError,
    SilentError,
    UnavailableError,
)
from shoal.protocol.limits import (
    MAX_FRAME_BYTES,
    MAX_PIECE_BYTES,
    MAX_SMALL_FRAME_BYTES,
    MIN_BYTES_PER_SECOND,
)
from shoal.protocol.net.frame_stream import LENGTH, FrameStream, Framing

LARGE = bytes(range(256)) * (3 * MAX_PIECE_BYTES // 256) + b"end"
FIRST, SECOND, *_ = Framing().pack(LARGE)
WHOLE = b"".join(Framing().pack(LARGE))


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


@pytest.mark.parametrize("num_bytes", [MAX_FRAME_BYTES, MAX_SMALL_FRAME_BYTES + 1])
async def test_frame_that_was_begun_and_is_not_finished_ends_the_stream(num_bytes: int) -> None:
    stream = FrameStream("peer")
    stream.data_received(LENGTH.pack(num_bytes) + bytes(num_bytes - 1))
    with pytest.raises(SilentError, match="part of a frame"):
        await stream.receive()
    assert 5 < asyncio.get_running_loop().time() < 10
    over = asyncio.create_task(stream.wait_over())
    await asyncio.sleep(0)
    assert not over.done(), "the answer to it still has to leave"
    over.cancel()


@pytest.mark.parametrize(("times_slowest", "arrives"), [(1.3, True), (0.8, False)])
async def test_large_frame_may_come_over_a_slow_line(times_slowest: float, arrives: bool) -> None:
    """However long it takes: several streams may share a home's uplink."""
    stream = FrameStream("peer")
    num_bytes = int(times_slowest * MIN_BYTES_PER_SECOND)
    receiving = asyncio.create_task(stream.receive())
    for start in range(0, len(WHOLE), num_bytes):
        stream.data_received(WHOLE[start : start + num_bytes])
        await asyncio.sleep(1)

    if arrives:
        assert await receiving == LARGE
    else:
        with pytest.raises(SilentError):
            await receiving


async def test_sender_of_a_refused_frame_hears_the_reason_within_a_minute() -> None:
    @asynccontextmanager
    async def gate(num_bytes: int) -> AsyncGenerator[None]:
        raise RefusedError(ErrorCode.BUSY, "no room")
        yield

    stream = FrameStream("peer")
    stream.set_gate(gate)
    stream.data_received(LENGTH.pack(MAX_FRAME_BYTES))
    receiving = asyncio.create_task(stream.receive())
    num_seconds = 0
    while not receiving.done():
        stream.data_received(bytes(2 * MIN_BYTES_PER_SECOND))
        await asyncio.sleep(1)
        num_seconds += 1

    with pytest.raises(RefusedError, match="no room"):
        await receiving
    assert 50 < num_seconds < 70


async def test_stream_that_broke_does_not_look_at_what_it_had_read() -> None:
    stream = FrameStream("peer", framing := Framing())
    stream.data_received(LENGTH.pack(0) * 1000)
    num_before = framing.num_ended
    stream.connection_lost(None)

    await stream.close()

    assert framing.num_ended == num_before


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
