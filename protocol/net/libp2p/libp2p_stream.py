"""A stream of frames over the byte stream that libp2p gives us, the same at both ends.

Every message is its length, 4 bytes, little-endian, and its bytes. An empty message, which begins
no frame, says that nothing more follows. Bytes that end without it are a break: p2pd ends them the
same way whether the other end hung up, died or was cut off.

A frame is one message, or several where it is large: its length, 4 bytes, then its bytes,
MAX_PIECE_BYTES in each message and what is left in the last.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import Callable
from copy import copy
from typing import Any

from ...errors import (
    LocalProtocolError,
    RefusedError,
    RemoteProtocolError,
    ShoalError,
    UnavailableError,
)
from ...limits import MAX_FRAME_BYTES, MAX_PIECE_BYTES
from ..tcp.tcp_stream import pack_frame
from ..transport import FrameGate, open_gate

log = logging.getLogger(__name__)

_LENGTH = struct.Struct("<I")
_END = _LENGTH.pack(0)

MAX_MESSAGE_BYTES = _LENGTH.size + MAX_PIECE_BYTES
"""The largest message: the first one of a large frame."""

_FRAME_SECONDS = 60.0
"""How long a frame may take from its first piece to the last: the largest one needs 54 seconds at
2.5 megabits a second. Who stops half-way would keep memory that others need."""

_LINGER_SECONDS = 5.0
"""How long a closed stream waits for the other end to read what was sent and to close as well."""

_WINDOW_BYTES = 64 * 2**10
"""With more than this waiting to be read, no further message is taken in: then the other end has to
wait, too. Until then a break is noticed, however little anybody reads."""

_WAITING_MESSAGE_BYTES = 64
"""Memory that each unread message takes in addition to its bytes, which may be a handful."""


def begin_frame(message: bytes) -> tuple[bytes, int]:
    """Return the first piece of a frame and how many bytes of it are missing.

    Raises RemoteProtocolError for a frame beyond the limit and for a message that begins none.

    >>> begin_frame(b"\\x07\\x00\\x00\\x00a token")
    (b'a token', 0)
    """
    if len(message) < _LENGTH.size:
        raise RemoteProtocolError("a message is too short to begin a frame")
    (num_bytes,) = _LENGTH.unpack_from(message)
    if num_bytes > MAX_FRAME_BYTES:
        raise RemoteProtocolError(f"a frame of {num_bytes} bytes is beyond {MAX_FRAME_BYTES}")
    piece = message[_LENGTH.size :]
    return piece, count_missing(piece, num_bytes)


def count_missing(piece: bytes, num_missing: int) -> int:
    """Return how many bytes of a frame are missing behind a piece, of those missing before it.

    Raises RemoteProtocolError unless the piece is as large as it has to be: small ones would let
    a frame take as many messages as it has bytes.
    """
    expected = min(num_missing, MAX_PIECE_BYTES)
    if len(piece) != expected:
        raise RemoteProtocolError(f"a piece of a frame has {len(piece)} bytes, not {expected}")
    return num_missing - expected


class StreamEnd:
    """One end of a stream: at most one read in progress, and how it all ended.

    For libraries whose reads cannot be cancelled without breaking the stream. A read is a task
    that outlives its reader: a cancelled `receive` leaves it to the next one, and no frame is
    lost. Frames travel in pieces. A subclass brings `_read` and `_write` for the messages that
    carry them, which raise errors of ours only, and `close`.
    """

    def __init__(self) -> None:
        self._gate: FrameGate = open_gate
        self._reading: asyncio.Task[bytes | None] | None = None
        self._is_closed = False
        self._refusal: ShoalError | None = None  # behind it nothing is received
        self._fault: ShoalError | None = None
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def is_broken(self) -> bool:
        return self._fault is not None

    def set_gate(self, gate: FrameGate) -> None:
        self._gate = gate

    async def send(self, frame: bytes) -> None:
        if len(frame) > MAX_FRAME_BYTES:
            raise LocalProtocolError(f"a frame of {len(frame)} bytes is beyond {MAX_FRAME_BYTES}")
        if self._is_closed:
            raise LocalProtocolError("the stream was closed here")
        if self._fault is not None:
            raise UnavailableError(str(self._fault)) from self._fault
        try:
            for message in pack_frame(frame):
                await self._write(message)
        except asyncio.CancelledError:
            self.break_off("a send was cancelled half-way")
            raise
        except UnavailableError as error:
            self.break_off(str(error))
            raise

    async def receive(self) -> bytes | None:
        if self._is_closed:
            return None
        if self._fault is not None:
            raise copy(self._fault)
        if self._refusal is not None:
            raise copy(self._refusal)
        if self._reading is None:
            self._reading = asyncio.create_task(self._read_frame())
            self._reading.add_done_callback(_retrieve)
        await asyncio.wait({self._reading, self._over}, return_when=asyncio.FIRST_COMPLETED)
        if self._over.done():
            return await self.receive()
        try:
            frame = self._reading.result()
        except ShoalError as error:
            # Not kept itself: its traceback holds what has come of a large frame, and us.
            self._reading = None
            if isinstance(error, UnavailableError):
                self.end(error)
            else:
                self._refusal = copy(error)
            raise
        if frame is not None:
            self._reading = None
        return frame

    async def wait_over(self) -> None:
        await asyncio.wait({self._over})

    def break_off(self, reason: str) -> None:
        """Make every use of the stream from now on raise UnavailableError."""
        self.end(UnavailableError(reason))

    def end(self, fault: ShoalError | None = None) -> None:
        """Note how the stream ended, the first time: closed here, or broken by a fault."""
        if not self._over.done():
            self._fault = copy(fault)
            self._is_closed = fault is None
            self._over.set_result(None)

    async def stop_reading(self) -> None:
        """Cancel the read in progress and wait for it to be gone."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait({self._reading})
            self._reading = None

    async def _read_frame(self) -> bytes | None:
        """Read one frame, with the gate's consent where it is large."""
        message = await self._read()
        if message is None:
            return None
        piece, num_missing = begin_frame(message)
        if not num_missing:
            return piece
        pieces = [piece]
        try:
            async with self._gate(len(piece) + num_missing):
                await self._read_rest(num_missing, pieces.append)
                return b"".join(pieces)
        except RefusedError:
            # A sender that is still busy would not receive the reason.
            await self._read_rest(num_missing, len)
            raise
        finally:
            pieces.clear()  # also where whoever hears of an error keeps its traceback

    async def _read_rest(self, num_missing: int, take: Callable[[bytes], object]) -> None:
        try:
            async with asyncio.timeout(_FRAME_SECONDS):
                while num_missing:
                    piece = await self._read()
                    if piece is None:
                        raise UnavailableError("the other end stopped in the middle of a frame")
                    num_missing = count_missing(piece, num_missing)
                    take(piece)
        except TimeoutError as error:
            detail = f"a frame was begun and not finished within {_FRAME_SECONDS:g} s"
            raise RemoteProtocolError(detail) from error

    async def _read(self) -> bytes | None:
        raise NotImplementedError

    async def _write(self, message: bytes) -> None:
        raise NotImplementedError


class Libp2pStream(StreamEnd):
    """One end of a stream, over the socket through which p2pd carries it."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        remote_host: str | None,
        name: str,
        release: Callable[[Libp2pStream], None],
    ) -> None:
        super().__init__()
        self.remote_host = remote_host
        self._reader = reader
        self._writer = writer
        self._name = name
        self._release = release
        self._arrived: asyncio.Queue[bytes | RemoteProtocolError] = asyncio.Queue()
        self._num_arrived_bytes = 0
        self._max_message_bytes = MAX_MESSAGE_BYTES
        self._room = asyncio.Event()
        self._has_other_ended = False
        self._arriving = asyncio.create_task(self._take_in())
        self._leaving: asyncio.Task[None] | None = None

    def limit(self, max_bytes: int) -> None:
        """Take messages up to this size from now on."""
        self._max_message_bytes = max_bytes

    async def say(self, message: bytes) -> None:
        """Send one message beside all frames; used before the first of them."""
        await self._write(message)

    async def hear(self) -> bytes:
        """Return what the other end said with `say`; empty when it ended the stream instead."""
        return await self._read() or b""

    async def close(self) -> None:
        self.end()
        self._room.set()
        leaving = self._leave()
        if self.is_broken:
            await asyncio.wait({leaving})

    async def abort(self, reason: str) -> None:
        """Break the stream off, or cut its lingering short."""
        self.break_off(reason)
        leaving = self._leave()
        leaving.cancel()
        await asyncio.wait({leaving})

    async def wait_gone(self) -> None:
        """Wait until a closed stream holds nothing any more."""
        await asyncio.wait({self._leave()})

    def _leave(self) -> asyncio.Task[None]:
        """Return the task that ends the stream, begun at the first call."""
        if self._leaving is None:
            self._leaving = asyncio.create_task(self._hang_up())
            self._leaving.add_done_callback(self._let_go)  # also if it is cancelled before it runs
        return self._leaving

    def _let_go(self, _: asyncio.Task[None]) -> None:
        for task in (self._arriving, self._reading):
            if task is not None:
                task.cancel()
        self._writer.transport.abort()
        self._release(self)

    async def _hang_up(self) -> None:
        """See a closed stream to its end: what was sent still arrives, what comes is dropped.

        Who hung up with something unread would have p2pd drop what is still on its way out.
        """
        await self.stop_reading()
        if self.is_broken:
            return
        try:
            async with asyncio.timeout(_LINGER_SECONDS):
                self._writer.write(_END)
                await asyncio.wait({self._arriving})
                self._writer.close()
                await self._writer.wait_closed()
        except (TimeoutError, OSError):
            log.debug("the stream to %s did not close cleanly", self._name)

    async def _take_in(self) -> None:
        """Take in what arrives, as far as there is room, to learn at once when the stream breaks.

        Ends with the stream. Once it was closed here, nothing is kept.
        """
        try:
            while message := await self._take_message():
                if self._is_closed:
                    await asyncio.sleep(0)  # dropping a flood of tiny ones must hold up nobody
                    continue
                self._arrived.put_nowait(message)
                self._num_arrived_bytes += len(message) + _WAITING_MESSAGE_BYTES
                while self._num_arrived_bytes > _WINDOW_BYTES and not self._is_closed:
                    self._room.clear()
                    await self._room.wait()
            self._has_other_ended = True
            self._arrived.put_nowait(b"")
        except RemoteProtocolError as error:
            self._arrived.put_nowait(error)
            # What follows means nothing; who is still busy sending it would not hear our answer.
            while await self._reader.read(_WINDOW_BYTES):
                pass
        except (EOFError, OSError):
            self.break_off(f"{self._name} went away")

    async def _take_message(self) -> bytes:
        (num_bytes,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
        if num_bytes > self._max_message_bytes:
            raise RemoteProtocolError(f"a message of {num_bytes} bytes is too large")
        return await self._reader.readexactly(num_bytes)

    async def _read(self) -> bytes | None:
        message = await self._arrived.get()
        if isinstance(message, RemoteProtocolError):
            raise copy(message)  # else, by its traceback, it would hold itself
        if not message:
            return None
        self._num_arrived_bytes -= len(message) + _WAITING_MESSAGE_BYTES
        self._room.set()
        return message

    async def _write(self, message: bytes) -> None:
        if self._has_other_ended:
            raise UnavailableError(f"{self._name} ended the stream")
        try:
            self._writer.write(_LENGTH.pack(len(message)) + message)
            await self._writer.drain()
        except OSError as error:
            raise UnavailableError(f"{self._name} went away") from error


def _retrieve(task: asyncio.Task[Any]) -> None:
    """Take note of a task's error, which the stream reports in its own time or not at all."""
    if not task.cancelled():
        task.exception()
