"""The streams that p2pd carries, over a socket to p2pd.

p2pd ends bytes in the same way whether the other end hung up, died or was cut off. So an empty
message, which begins no frame, says that nothing more follows; bytes that end without it are a
break.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import cast

from ...errors import RemoteProtocolError
from ...limits import MAX_PIECE_BYTES
from ..frame_stream import LENGTH, FrameStream, Framing, Mark

MAX_GREETING_BYTES = 1024
"""The most that a stranger may have us keep; the proof in a greeting takes 32."""


class MessageFraming(Framing):
    """Cuts and packs frames that travel in messages, each behind its length, 4 bytes.

    The first message is a greeting, and comes out as it is. A frame is one message, or several
    where it is large: its length, 4 bytes, then its bytes, MAX_PIECE_BYTES in each message and what
    is left in the last.
    """

    def __init__(self) -> None:
        super().__init__()
        self._is_greeted = False

    def pack(self, frame: bytes) -> Iterator[bytes]:
        """Yield the messages of a frame.

        >>> list(MessageFraming().pack(b"a token"))
        [b'\\x0b\\x00\\x00\\x00\\x07\\x00\\x00\\x00a token']
        """
        return map(pack_message, super().pack(frame))

    def pack_mark(self, mark: Mark) -> bytes:
        """Return an empty message, whatever the mark."""
        return pack_message(b"")

    def _read_header(self) -> bool:
        if len(self._rest) < LENGTH.size:
            return False
        (num_bytes,) = LENGTH.unpack_from(self._rest)
        if num_bytes == 0:  # in the middle of a frame as well: older peers close while they send
            self._end(Mark.END, "")
            return False
        if self._num_missing:
            del self._rest[: LENGTH.size]
            self._go_on(num_bytes, self._num_missing)
            return True
        if not self._is_greeted:
            del self._rest[: LENGTH.size]
            if num_bytes > MAX_GREETING_BYTES:
                self._end(None, f"a greeting of {num_bytes} bytes is too large")
            self._is_greeted = True
            return self._begin(num_bytes, num_bytes)
        if len(self._rest) < 2 * LENGTH.size:
            return False
        (num_frame_bytes,) = LENGTH.unpack_from(self._rest, LENGTH.size)
        del self._rest[: 2 * LENGTH.size]
        if num_frame_bytes > self.max_bytes:
            self._end(None, f"a frame of {num_frame_bytes} bytes is beyond the limit")
        self._go_on(num_bytes - LENGTH.size, num_frame_bytes)
        return self._begin(num_frame_bytes, self._num_ahead)

    def _go_on(self, num_bytes: int, num_missing: int) -> None:
        """Take the next piece of a frame. Raises RemoteProtocolError for one of another size.

        Small ones would let a frame take as many messages as it has bytes.
        """
        expected = min(num_missing, MAX_PIECE_BYTES)
        if num_bytes != expected:
            self._end(None, f"a piece of a frame has {num_bytes} bytes, not {expected}")
        self._num_ahead = num_bytes


def pack_message(message: bytes) -> bytes:
    """Return a message as it travels."""
    return LENGTH.pack(len(message)) + message


class Libp2pStream(FrameStream):
    """One end of a stream, over the socket through which p2pd carries it."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        label: str,
        remote_host: str | None,
    ) -> None:
        """Take a socket over from its reader, of which everything has been read."""
        super().__init__(label, MessageFraming())
        self.remote_host = remote_host
        self._writer = writer  # kept: it closes the socket when nobody has it any more
        writer.transport.set_protocol(self)
        self._transport = cast(asyncio.Transport, writer.transport)
        if reader.at_eof():  # which asyncio says once only
            writer.transport.abort()

    @classmethod
    async def accept(
        cls,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        remote_host: str | None,
    ) -> Libp2pStream:
        """Return the stream of a dialler, who says a greeting and nothing else before the answer.

        Waits for the beginning of the greeting; raises RemoteProtocolError where more comes.
        """
        data = await reader.read(MAX_GREETING_BYTES)
        if len(data) == MAX_GREETING_BYTES:
            raise RemoteProtocolError("more than a greeting came first")
        stream = cls(reader, writer, f"a dialler at {remote_host}", remote_host)
        stream.data_received(data)
        return stream

    def greet(self, greeting: bytes) -> None:
        """Say the first message; `receive` returns that of the other end."""
        self._write(pack_message(greeting))
