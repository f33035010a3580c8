"""Adapters in pieces: how they are cut, and what puts them together again."""

from collections.abc import Iterator

from ..errors import RemoteProtocolError
from ..ids import UploadId
from .adapters import AdapterHead, AdapterPiece

KEEP_SECONDS = 300.0
"""How long an adapter is kept that its holder neither uses nor publishes again."""

STALL_SECONDS = 60.0
"""How long an adapter on its way may stand still."""

SLOWEST_BYTES_PER_SECOND = 16 * 2**10
"""How slow a line may be for as long as it takes. Who fills a peer's memory slowly harms it no more
than who does so at once: one client has its share of that, and keeps it by a word now and then."""

PIECE_BYTES = 48 * 2**10
"""What a piece has, but for the last one."""


def cut_adapter(upload_id: UploadId, tensors: bytes) -> Iterator[AdapterPiece]:
    """Yield the safetensors of an adapter in pieces."""
    for offset in range(0, len(tensors), PIECE_BYTES):
        yield AdapterPiece(upload_id, offset, tensors[offset : offset + PIECE_BYTES])


def allow_upload_seconds(num_bytes: int) -> float:
    """Return how long so many bytes may be on their way, if they never stand still for too long."""
    return STALL_SECONDS + num_bytes / SLOWEST_BYTES_PER_SECOND


class UploadPace:
    """Until when more of an adapter has to come.

    Every piece gives as much time as it may take on the slowest line, and never more than
    `STALL_SECONDS` are left.
    """

    def __init__(self, now: float) -> None:
        self._deadline = now + STALL_SECONDS

    @property
    def deadline(self) -> float:
        """When it has stood still for too long, or been too slow."""
        return self._deadline

    def note_piece(self, num_bytes: int, now: float) -> None:
        """Note that so many bytes have come."""
        earned = self._deadline + num_bytes / SLOWEST_BYTES_PER_SECOND
        self._deadline = min(earned, now + STALL_SECONDS)


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
        expected = min(PIECE_BYTES, self._head.num_bytes - self._num_taken)
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
