"""Frames on a connection that carries nothing else: pure, bytes in and frames out.

A frame is its length, 4 bytes, little-endian, and its bytes. Lengths that no frame has are marks:
nothing more comes, in good order, or because the listener has no room.
"""

import struct
from collections.abc import Iterator
from enum import IntEnum

from ...errors import RemoteProtocolError
from ...limits import MAX_FRAME_BYTES, MAX_PIECE_BYTES

_LENGTH = struct.Struct("<I")


MAX_FRAMES_AT_ONCE = 1024
"""Cut in one go, also where they are dropped: tens of thousands of tiny ones may arrive together,
and would hold up everybody else."""


class Mark(IntEnum):
    """What stands in place of a length."""

    END = 0xFFFFFFFF
    TOO_MANY_STREAMS = 0xFFFFFFFE
    MEMBERS_ONLY = 0xFFFFFFFD


def pack_frame(frame: bytes) -> Iterator[bytes]:
    """Yield a frame as it travels, in pieces: encrypting a large one at once would take long.

    >>> list(pack_frame(b"a token"))
    [b'\\x07\\x00\\x00\\x00a token']
    """
    yield _LENGTH.pack(len(frame)) + frame[:MAX_PIECE_BYTES]
    for start in range(MAX_PIECE_BYTES, len(frame), MAX_PIECE_BYTES):
        yield frame[start : start + MAX_PIECE_BYTES]


def pack_mark(mark: Mark) -> bytes:
    """Return a mark as it travels."""
    return _LENGTH.pack(mark)


class FrameCutter:
    """Cuts what arrives into frames.

    A frame larger than MAX_PIECE_BYTES is held: `held_bytes` says how large it is, and nothing is
    cut before `admit` says what becomes of it.
    """

    def __init__(self) -> None:
        self.mark: Mark | None = None
        """What the other end said last; behind it nothing counts."""
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
        self._is_over = False

    def admit(self, keeps: bool) -> None:
        """Let the frame that is held come, to be kept or dropped."""
        self.held_bytes = 0
        self._keeps = keeps

    def drop_all(self) -> None:
        """Drop all frames from now on, also the one that is coming."""
        self._drops_all = True
        self._parts.clear()
        self.admit(keeps=False)

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
            if not self._num_missing and not self._begin():
                return
            part = bytes(self._rest[: self._num_missing])
            del self._rest[: self._num_missing]
            self._num_missing -= len(part)
            if self._keeps:
                self._parts.append(part)
            if self._num_missing:
                return
            self.num_ended += 1
            if self._keeps:
                frame = part if len(self._parts) == 1 else b"".join(self._parts)
                self._parts.clear()
                yield frame

    def _begin(self) -> bool:
        """Read the next length, if it is there; return whether a frame comes now."""
        if len(self._rest) < _LENGTH.size:
            return False
        (num_bytes,) = _LENGTH.unpack_from(self._rest)
        del self._rest[: _LENGTH.size]
        if num_bytes > self.max_bytes:
            self._is_over = True
            self._rest.clear()
            self.mark = next((mark for mark in Mark if mark == num_bytes), None)
            if self.mark is None:
                raise RemoteProtocolError(f"a frame of {num_bytes} bytes is beyond the limit")
            return False
        self._num_missing = num_bytes
        self._keeps = not self._drops_all
        if num_bytes > MAX_PIECE_BYTES and self._keeps:
            self.held_bytes = num_bytes
        return not self.held_bytes
