"""A stream of frames over the byte stream that libp2p gives us, the same at both ends.

Every message is its length, 4 bytes, little-endian, and its bytes. An empty message, which begins
no frame, says that nothing more follows. Bytes that end without it are a break: p2pd ends them the
same way whether the other end hung up, died or was cut off.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import Callable
from copy import copy

from ...errors import RemoteProtocolError, UnavailableError
from ..pieces import MAX_MESSAGE_BYTES
from ..stream_end import StreamEnd

log = logging.getLogger(__name__)

_LENGTH = struct.Struct("<I")
_END = _LENGTH.pack(0)

_LINGER_SECONDS = 5.0
"""How long a closed stream waits for the other end to read what was sent and to close as well."""

_WINDOW_BYTES = 64 * 2**10
"""With more than this waiting to be read, no further message is taken in: then the other end has to
wait, too. Until then a break is noticed, however little anybody reads."""

_WAITING_MESSAGE_BYTES = 64
"""Memory that each unread message takes in addition to its bytes, which may be a handful."""


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
