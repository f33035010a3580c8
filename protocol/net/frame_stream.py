"""One end of a stream of frames, over a connection that carries bytes.

A frame travels as its length, 4 bytes, little-endian, and its bytes. Lengths that no frame has are
marks: nothing more comes, in good order, or because the listener has no room. `Framing` is pure:
bytes in and frames out. `libp2p/` has another one.
"""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from copy import copy
from enum import IntEnum
from typing import cast

from ..errors import (
    LocalProtocolError,
    RefusedError,
    RemoteProtocolError,
    ShoalError,
    SilentError,
    UnavailableError,
)
from ..limits import (
    MAX_FRAME_BYTES,
    MAX_PIECE_BYTES,
    MAX_SMALL_FRAME_BYTES,
    MIN_BYTES_PER_SECOND,
)
from .addresses import set_keepalive
from .transport import FrameGate, open_gate

_LINGER_SECONDS = 5.0
"""How long a closed stream waits for the other end to read what was sent and to close as well."""

_PROGRESS_SECONDS = 6.0
"""How often the progress of a large frame is checked. A sender that was slower than
MIN_BYTES_PER_SECOND is given up: it would keep memory that others need."""

_DROPPED_FRAME_SECONDS = 60.0
"""How long the rest of a refused frame is read, before its sender hears the reason."""

_MAX_WAITING_BYTES = 64 * 2**10
"""Of frames that nobody has received yet. Beyond it, nothing more is read."""

_WAITING_FRAME_BYTES = 64
"""Memory that each unread frame takes in addition to its bytes, of which it may have none."""

LENGTH = struct.Struct("<I")

MAX_FRAMES_AT_ONCE = 64
"""Cut in one go, also where they are dropped, and kept unread: tens of thousands of tiny ones may
arrive together, and would hold up everybody else."""

_MAX_DROPPED_FRAMES = 1024
_MAX_DROPPED_BYTES = 2 * MAX_FRAME_BYTES
"""Limits on input after receiving has stopped. A sender in the middle of a large frame still reads
the reason; a sender that exceeds the limits is disconnected."""


class Mark(IntEnum):
    """Values of the length field that are marks instead of lengths."""

    END = 0xFFFFFFFF
    TOO_MANY_STREAMS = 0xFFFFFFFE
    MEMBERS_ONLY = 0xFFFFFFFD


class Framing:
    """Cuts what arrives into frames, and packs those that leave.

    A frame larger than MAX_SMALL_FRAME_BYTES is held: `held_bytes` says how large it is, and
    nothing is cut before `admit` says what becomes of it.
    """

    def __init__(self) -> None:
        self.mark: Mark | None = None
        """The mark that ended the stream; everything after it is ignored."""
        self.held_bytes = 0
        self.has_more = False
        """Whether there were too many frames for one go; feeding nothing goes on with them."""
        self.num_ended = 0
        """Frames that came to their end, kept or dropped."""
        self.max_bytes = MAX_FRAME_BYTES
        self._drops_all = False
        self._keeps = True
        self._rest = bytearray()
        self._parts: list[bytes] = []
        self._num_missing = 0
        self._num_ahead = 0
        """Bytes of the frame up to the next header, or to its end."""
        self._is_over = False

    def pack(self, frame: bytes) -> Iterator[bytes]:
        """Yield a frame as it travels, in pieces: encrypting a large one at once would take long.

        >>> list(Framing().pack(b"a token"))
        [b'\\x07\\x00\\x00\\x00a token']
        """
        yield LENGTH.pack(len(frame)) + frame[:MAX_PIECE_BYTES]
        for start in range(MAX_PIECE_BYTES, len(frame), MAX_PIECE_BYTES):
            yield frame[start : start + MAX_PIECE_BYTES]

    def pack_mark(self, mark: Mark) -> bytes:
        """Return a mark as it travels."""
        return LENGTH.pack(mark)

    def admit(self) -> None:
        """Let the frame that is held come."""
        self.held_bytes = 0

    def drop_all(self) -> None:
        """Drop all frames from now on, also the one that is coming or held."""
        self._drops_all = True
        self._keeps = False
        self._parts.clear()
        self.held_bytes = 0

    def abandon(self) -> None:
        """Drop all frames, and do not look at what comes."""
        self.drop_all()
        self._is_over = True
        self._rest.clear()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the frames that are whole with these bytes, MAX_FRAMES_AT_ONCE at most.

        Raises RemoteProtocolError when the other end begins a frame beyond `max_bytes`. Whatever
        comes behind that or behind a mark means nothing, and is dropped.
        """
        self.has_more = False
        if self._is_over:
            return
        self._rest += data
        num_ended_before = self.num_ended
        while self._rest and not self.held_bytes:
            if self.num_ended - num_ended_before == MAX_FRAMES_AT_ONCE:
                self.has_more = True
                return
            if not self._num_ahead and not self._read_header():
                return
            part = bytes(self._rest[: self._num_ahead])
            del self._rest[: self._num_ahead]
            self._num_ahead -= len(part)
            self._num_missing -= len(part)
            if self._keeps:
                self._parts.append(part)
            if self._num_missing:
                continue
            self.num_ended += 1
            if self._keeps:
                frame = part if len(self._parts) == 1 else b"".join(self._parts)
                self._parts.clear()
                yield frame

    def _read_header(self) -> bool:
        """Read the next header, if it is there; return whether bytes of a frame come now."""
        if len(self._rest) < LENGTH.size:
            return False
        (num_bytes,) = LENGTH.unpack_from(self._rest)
        del self._rest[: LENGTH.size]
        if num_bytes > self.max_bytes:
            mark = next((mark for mark in Mark if mark == num_bytes), None)
            self._end(mark, f"a frame of {num_bytes} bytes is beyond the limit")
            return False
        return self._begin(num_bytes, num_bytes)

    def _begin(self, num_bytes: int, num_ahead: int) -> bool:
        """Begin a frame with so many bytes up to the next header; return whether they come now."""
        self._num_missing, self._num_ahead = num_bytes, num_ahead
        self._keeps = not self._drops_all
        if num_bytes > MAX_SMALL_FRAME_BYTES and self._keeps:
            self.held_bytes = num_bytes
        return not self.held_bytes

    def _end(self, mark: Mark | None, complaint: str) -> None:
        """Take nothing more, for a mark. Raises RemoteProtocolError without one."""
        self._is_over = True
        self._rest.clear()
        self.mark = mark
        if mark is None:
            raise RemoteProtocolError(complaint)


class FrameStream(asyncio.Protocol):
    """A stream, and what asyncio calls about the connection under it.

    Sending needs no task and receiving only one for large frames, while a gate is asked about
    them. `label` names the other end in errors.
    """

    def __init__(self, label: str, framing: Framing | None = None) -> None:
        self.remote_host: str | None = None
        loop = asyncio.get_running_loop()
        self._label = label
        self._gate: FrameGate = open_gate
        self._framing = framing or Framing()
        self._frames: deque[bytes] = deque()
        self._num_waiting_bytes = 0
        self._arrival: asyncio.Future[None] | None = None  # a receive that waits
        self._large_frame_task: asyncio.Task[None] | None = None  # until the frame is here
        self._large_frame_passed: asyncio.Future[None] | None = None
        self._num_ended_before = 0
        self._catching_up: asyncio.Handle | None = None  # with frames beyond those of one go
        self._drained: asyncio.Future[None] | None = None
        self._is_sending = False
        self._is_closed = False
        self._fault: ShoalError | None = None
        self._refusal: ShoalError | None = None
        self._lingering: asyncio.TimerHandle | None = None
        self._over: asyncio.Future[None] = loop.create_future()
        self.lost: asyncio.Future[None] = loop.create_future()
        """Done when the connection is gone."""
        self._transport: asyncio.Transport | None = None
        self._is_paused = False
        self._num_ended_before_drop: int | None = None  # what comes is dropped if it is known
        self._num_dropped_bytes = 0
        self._num_bytes = 0  # that have arrived

    def set_gate(self, gate: FrameGate) -> None:
        self._gate = gate

    async def send(self, frame: bytes) -> None:
        if len(frame) > MAX_FRAME_BYTES:
            raise LocalProtocolError(f"a frame of {len(frame)} bytes is beyond {MAX_FRAME_BYTES}")
        if self._is_closed:
            raise LocalProtocolError("the stream was closed here")
        self._is_sending = True
        try:
            for piece in self._framing.pack(frame):
                self._write(piece)
                if self._drained is not None:
                    await asyncio.wait({self._drained})
        except asyncio.CancelledError:
            self.break_off("a send was cancelled half-way")
            raise
        finally:
            self._is_sending = False

    async def receive(self) -> bytes | None:
        while not self._is_closed:
            if self._frames:
                frame = self._frames.popleft()
                self._num_waiting_bytes -= len(frame) + _WAITING_FRAME_BYTES
                self._regulate()
                return frame
            if self._refusal is not None:
                raise copy(self._refusal)
            if self._fault is not None:
                raise copy(self._fault)
            if self._framing.mark is not None:
                return None
            if self._framing.held_bytes and self._large_frame_task is None:
                self._large_frame_task = asyncio.create_task(
                    self._receive_large_frame(self._framing.held_bytes)
                )
            self._arrival = asyncio.get_running_loop().create_future()
            await self._arrival
        return None

    async def wait_over(self) -> None:
        await asyncio.wait({self._over})

    async def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        # A mark would stand in the middle of the frame that another task is at.
        is_cut = self._is_sending
        self._end(UnavailableError("closed in the middle of a frame") if is_cut else None)
        transport = self._transport
        if self._fault is not None or transport is None or transport.is_closing():
            self._framing.abandon()
            self._drop_all()
            self._abort()
            return
        transport.write(self._framing.pack_mark(Mark.END))
        self._drop_all()  # hangs up, if the other end said the same before
        if self._framing.mark is None:
            loop = asyncio.get_running_loop()
            self._lingering = loop.call_later(_LINGER_SECONDS, self._abort)

    def break_off(self, reason: str) -> None:
        """Make every use of the stream from now on raise UnavailableError, at both ends."""
        self._end(UnavailableError(reason))
        self._abort()

    def limit(self, max_bytes: int) -> None:
        """Take frames up to this size from now on."""
        self._framing.max_bytes = max_bytes

    def hang_up_with(self, mark: Mark) -> None:
        """Tell the other end why it has no stream, and hang up."""
        self._is_closed = True
        self._end()
        if self._transport is not None:
            # Twice: who tries to speak TLS with us needs five bytes to see that this is none.
            self._transport.write(2 * self._framing.pack_mark(mark))
            self._transport.close()

    @property
    def mark(self) -> Mark | None:
        """The last message of the other end, if it will send no more."""
        return self._framing.mark

    async def wait_lost(self) -> None:
        """Wait until the connection is gone, and what served it."""
        waiting: set[asyncio.Future[None]] = {self.lost} if self._transport is not None else set()
        if self._large_frame_task is not None:
            waiting.add(self._large_frame_task)
        if waiting:
            await asyncio.wait(waiting)

    # The methods that asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.remote_host = str(transport.get_extra_info("peername")[0])
        set_keepalive(transport.get_extra_info("socket"))

    def data_received(self, data: bytes) -> None:
        self._num_bytes += len(data)
        if data and self._framing.mark is not None:
            self._abort()  # who goes on behind his own end would keep us reading
            return
        if self._has_dropped_enough(len(data)):
            self._abort()
            return
        try:
            for frame in self._framing.feed(data):
                self._frames.append(frame)
                self._num_waiting_bytes += len(frame) + _WAITING_FRAME_BYTES
        except RemoteProtocolError as error:
            self._refuse(error)
        is_past = self._framing.num_ended > self._num_ended_before or self._refusal is not None
        if self._large_frame_passed is not None and is_past:
            self._large_frame_passed.set_result(None)
            self._large_frame_passed = None
        if self._is_closed and self._framing.mark is not None and self._transport is not None:
            self._transport.close()
        self._regulate()
        self._wake()

    def _has_dropped_enough(self, num_bytes: int) -> bool:
        """Count what is dropped from now on; return whether the other end does not listen."""
        if self._num_ended_before_drop is None:
            return False
        self._num_dropped_bytes += num_bytes
        num_frames = self._framing.num_ended - self._num_ended_before_drop
        return num_frames > _MAX_DROPPED_FRAMES or self._num_dropped_bytes > _MAX_DROPPED_BYTES

    def connection_lost(self, exc: Exception | None) -> None:
        detail = "the other end went away" if exc is None else f"the connection broke: {exc}"
        # Also behind the end of the other side: nothing can be sent any more.
        is_orderly = self._framing.mark is not None
        self._end(None if is_orderly else UnavailableError(f"{self._label}: {detail}"))
        self.resume_writing()
        if self._lingering is not None:
            self._lingering.cancel()
        if not self.lost.done():
            self.lost.set_result(None)

    def pause_writing(self) -> None:
        self._drained = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        drained, self._drained = self._drained, None
        if drained is not None and not drained.done():
            drained.set_result(None)

    def _write(self, data: bytes) -> None:
        if self._fault is not None:
            raise UnavailableError(str(self._fault)) from self._fault
        if self._framing.mark is not None or self._transport is None:
            raise UnavailableError(f"{self._label} ended the stream")
        if self._transport.is_closing():
            raise UnavailableError(f"{self._label}: the other end went away")
        self._transport.write(data)

    async def _receive_large_frame(self, num_bytes: int) -> None:
        """Take a large frame with the gate's consent: a task, for a receive may be cancelled."""
        try:
            async with self._gate(num_bytes):
                self._framing.admit()
                if not await self._wait_large_frame():
                    self._refuse(SilentError(f"{self._label} sent part of a frame and stopped"))
        except RefusedError as error:
            # A sender that is still busy would not receive the reason.
            self._framing.drop_all()
            with suppress(TimeoutError):
                async with asyncio.timeout(_DROPPED_FRAME_SECONDS):
                    await self._wait_large_frame()
            self._refuse(error)
        finally:
            self._large_frame_task = None
            self._wake()

    async def _wait_large_frame(self) -> bool:
        """Wait until the large frame has come or the stream is over; return whether it went on."""
        self._large_frame_passed = passing = asyncio.get_running_loop().create_future()
        self._num_ended_before = self._framing.num_ended
        self.data_received(b"")
        ends, done = {passing, self._over}, set[asyncio.Future[None]]()
        goes_on = True
        while not done and goes_on:
            num_bytes_before = self._num_bytes
            done, _ = await asyncio.wait(
                ends, timeout=_PROGRESS_SECONDS, return_when=asyncio.FIRST_COMPLETED
            )
            progress_bytes = self._num_bytes - num_bytes_before
            goes_on = progress_bytes >= _PROGRESS_SECONDS * MIN_BYTES_PER_SECOND
        self._large_frame_passed = None
        return bool(done) or goes_on

    def _refuse(self, error: ShoalError) -> None:
        """Receive nothing more, and drop further bytes: a busy sender would not hear the reason."""
        self._refusal = self._refusal or copy(error)
        self._drop_all()

    def _drop_all(self) -> None:
        self._framing.drop_all()
        if self._num_ended_before_drop is None:
            self._num_ended_before_drop = self._framing.num_ended
        self._frames.clear()
        self._num_waiting_bytes = 0
        self.data_received(b"")

    def _regulate(self) -> None:
        """Read on, or let the other end wait."""
        has_many = len(self._frames) >= MAX_FRAMES_AT_ONCE
        is_full = has_many or self._num_waiting_bytes > _MAX_WAITING_BYTES
        is_full = is_full or self._framing.held_bytes > 0
        has_more = self._framing.has_more
        if has_more and not is_full and self._catching_up is None:
            self._catching_up = asyncio.get_running_loop().call_soon(self._catch_up)
        must_pause = is_full or has_more
        if must_pause == self._is_paused or self._transport is None:
            return
        self._is_paused = must_pause
        if not self._transport.is_closing():
            if must_pause:
                self._transport.pause_reading()
            else:
                self._transport.resume_reading()

    def _catch_up(self) -> None:
        self._catching_up = None
        self.data_received(b"")

    def _end(self, fault: ShoalError | None = None) -> None:
        """Note how the stream ended, the first time: closed here, or broken by a fault."""
        if not self._over.done():
            self._fault = fault
            self._over.set_result(None)
            if self._large_frame_task is not None:
                self._large_frame_task.cancel()
        self._wake()

    def _abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _wake(self) -> None:
        arrival, self._arrival = self._arrival, None
        if arrival is not None and not arrival.done():
            arrival.set_result(None)
