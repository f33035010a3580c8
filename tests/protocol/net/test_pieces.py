"""Frames that travel in pieces, and what a stranger's pieces may not do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest
from virtual_time import run_virtual

from shoal.protocol.errors import ErrorCode, RefusedError, RemoteProtocolError, UnavailableError
from shoal.protocol.limits import MAX_FRAME_BYTES, MAX_PIECE_BYTES
from shoal.protocol.net.libp2p.libp2p_stream import MAX_MESSAGE_BYTES, StreamEnd, begin_frame
from shoal.protocol.net.tcp.tcp_stream import pack_frame

LARGE = bytes(range(256)) * (3 * MAX_PIECE_BYTES // 256) + b"end"


class ScriptedEnd(StreamEnd):
    """The end of a stream at which given messages arrive; None ends it, then nothing comes."""

    def __init__(self, *messages: bytes | None) -> None:
        super().__init__()
        self._messages = list(messages)
        self.num_left = len(self._messages)

    async def _read(self) -> bytes | None:
        if not self._messages:
            await asyncio.Event().wait()
        self.num_left -= 1
        return self._messages.pop(0)


@pytest.mark.parametrize(
    "size", [0, 1, MAX_PIECE_BYTES - 1, MAX_PIECE_BYTES, MAX_PIECE_BYTES + 1, MAX_FRAME_BYTES]
)
def test_frame_of_any_size_comes_back_from_its_pieces(size: int) -> None:
    async def test() -> None:
        frame = LARGE * (size // len(LARGE) + 1)
        messages = list(pack_frame(frame[:size]))
        stream = ScriptedEnd(*messages, *pack_frame(b"next"))

        assert await stream.receive() == frame[:size]
        assert await stream.receive() == b"next"
        assert max(map(len, messages)) <= MAX_MESSAGE_BYTES
        assert len(messages) == max(1, -(-size // MAX_PIECE_BYTES))

    run_virtual(test())


FIRST, SECOND, *_ = pack_frame(LARGE)


@pytest.mark.parametrize(
    "messages",
    [
        (b"",),
        (b"\1\0\0",),
        (b"\2\0\0\0a",),
        (b"\1\0\0\0ab",),
        (b"\xff\xff\xff\xff" + FIRST[4:],),
        ((MAX_FRAME_BYTES + 1).to_bytes(4, "little") + FIRST[4:],),
        (FIRST[:-1],),
        (FIRST + b"x",),
        (FIRST, b""),
        (FIRST, SECOND[:-1]),
        (FIRST, SECOND + b"x"),
    ],
)
def test_pieces_of_another_size_are_the_fault_of_the_other_end(messages: tuple[bytes, ...]) -> None:
    async def test() -> None:
        stream = ScriptedEnd(*messages)
        for _ in range(2):
            with pytest.raises(RemoteProtocolError):
                await stream.receive()
        assert not stream.is_broken, "the answer to it still has to leave"

    run_virtual(test())


def test_stream_that_ends_within_a_frame_is_broken() -> None:
    async def test() -> None:
        with pytest.raises(UnavailableError):
            await ScriptedEnd(FIRST, None).receive()

    run_virtual(test())


def test_frame_that_was_begun_and_is_not_finished_ends_the_stream() -> None:
    async def test() -> None:
        stream = ScriptedEnd(FIRST, SECOND)
        with pytest.raises(RemoteProtocolError, match="not finished"):
            await stream.receive()
        assert 20 < asyncio.get_running_loop().time() < 120

    run_virtual(test())


def test_gate_is_asked_about_large_frames_while_they_arrive() -> None:
    async def test() -> None:
        log: list[object] = []

        @asynccontextmanager
        async def gate(num_bytes: int) -> AsyncGenerator[None]:
            log.append((num_bytes, stream.num_left))
            yield
            log.append(stream.num_left)

        stream = ScriptedEnd(*pack_frame(b"small"), *pack_frame(LARGE))
        stream.set_gate(gate)

        assert await stream.receive() == b"small"
        assert await stream.receive() == LARGE

        assert log == [(len(LARGE), 3), 0]

    run_virtual(test())


def test_rest_of_a_refused_frame_is_read_and_dropped() -> None:
    """Or its sender, who is busy sending, would not hear why."""

    async def test() -> None:
        @asynccontextmanager
        async def gate(num_bytes: int) -> AsyncGenerator[None]:
            raise RefusedError(ErrorCode.BUSY, "no room")
            yield

        stream = ScriptedEnd(*pack_frame(LARGE), *pack_frame(b"next"))
        stream.set_gate(gate)

        for _ in range(2):
            with pytest.raises(RefusedError, match="no room"):
                await stream.receive()
        assert stream.num_left == 1

    run_virtual(test())


def test_first_piece_says_how_much_is_missing() -> None:
    assert begin_frame(FIRST) == (LARGE[:MAX_PIECE_BYTES], len(LARGE) - MAX_PIECE_BYTES)
