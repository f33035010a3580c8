"""Frames in pieces, for libraries that hold half a message where nobody can count it.

A frame is sent as one message, or as several where it is large. The first begins with the length
of the frame, 4 bytes, little-endian; then its bytes follow, MAX_PIECE_BYTES in each message and
what is left in the last. Another frame begins with another message.
"""

import struct
from collections.abc import Iterator

from ..errors import RemoteProtocolError
from ..limits import MAX_FRAME_BYTES, MAX_PIECE_BYTES

_LENGTH = struct.Struct("<I")

MAX_MESSAGE_BYTES = _LENGTH.size + MAX_PIECE_BYTES
"""The largest message: the first one of a large frame."""


def cut_frame(frame: bytes) -> Iterator[bytes]:
    """Yield the messages that carry a frame.

    >>> list(cut_frame(b"a token"))
    [b'\\x07\\x00\\x00\\x00a token']
    """
    yield _LENGTH.pack(len(frame)) + frame[:MAX_PIECE_BYTES]
    for start in range(MAX_PIECE_BYTES, len(frame), MAX_PIECE_BYTES):
        yield frame[start : start + MAX_PIECE_BYTES]


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
