"""The state that both ends of a stream share when the library below cannot cancel a read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from copy import copy
from typing import Any

from ..errors import (
    LocalProtocolError,
    RefusedError,
    RemoteProtocolError,
    ShoalError,
    UnavailableError,
)
from ..limits import MAX_FRAME_BYTES
from .pieces import begin_frame, count_missing, cut_frame
from .transport import FrameGate, open_gate

_FRAME_SECONDS = 60.0
"""How long a frame may take from its first piece to the last: the largest one needs 54 seconds at
2.5 megabits a second. Who stops half-way would keep memory that others need."""


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
            for message in cut_frame(frame):
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
            # Who is still busy sending would not hear why.
            await self._read_rest(num_missing, len)
            raise
        finally:
            pieces.clear()  # also where whoever hears of an error keeps its traceback

    async def _read_rest(self, num_missing: int, take: Callable[[bytes], object]) -> None:
        """Read the rest of a frame that has begun."""
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


def _retrieve(task: asyncio.Task[Any]) -> None:
    """Take note of a task's error, which the stream reports in its own time or not at all."""
    if not task.cancelled():
        task.exception()
