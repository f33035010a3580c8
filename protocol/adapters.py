"""Adapters in pieces: how they are cut, and what puts them together again."""

from collections.abc import Iterator

from .adapter_messages import AdapterHead, AdapterPiece
from .errors import RemoteProtocolError
from .ids import UploadId

KEEP_SECONDS = 300.0
"""How long an adapter is kept that its holder neither uses nor publishes again."""

_PIECE_BYTES = 48 * 2**10
"""What a piece has, but for the last one."""


def cut_adapter(upload_id: UploadId, tensors: bytes) -> Iterator[AdapterPiece]:
    """Yield the safetensors of an adapter in pieces."""
    for offset in range(0, len(tensors), _PIECE_BYTES):
        yield AdapterPiece(upload_id, offset, tensors[offset : offset + _PIECE_BYTES])


class AdapterReader:
    """Takes the pieces that `cut_adapter` makes, in their order."""

    def __init__(self, head: AdapterHead) -> None:
        self._head = head
        self._pieces: list[bytes] = []
        self._num_taken = 0

    @property
    def is_complete(self) -> bool:
        """Whether nothing is missing any more."""
        return self._num_taken == self._head.num_bytes

    def take(self, piece: AdapterPiece) -> None:
        """Take the next piece. Raises RemoteProtocolError for any other."""
        expected = min(_PIECE_BYTES, self._head.num_bytes - self._num_taken)
        if (piece.offset, len(piece.data)) != (self._num_taken, expected):
            raise RemoteProtocolError(
                f"a piece of an adapter has {len(piece.data)} bytes at {piece.offset}; the next "
                f"one has {expected} at {self._num_taken}"
            )
        self._pieces.append(piece.data)
        self._num_taken += expected

    def join(self) -> bytes:
        """Return the safetensors; nothing is kept here."""
        joined, self._pieces = b"".join(self._pieces), []
        return joined
