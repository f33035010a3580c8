"""How fast a line is, as far as answers tell: what it takes to carry a prompt."""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

_UNKNOWN_BYTES_PER_SECOND = 256 * 2**10
"""A line of two megabits per second, until a large step was answered."""

_LEAST_BYTES_PER_SECOND = 16 * 2**10
_LARGE_BYTES = 64 * 2**10
"""Answers to smaller steps tell of round trips and computing only."""


class Line:
    """The line of a client, shared by all of its steps, or one that two peers have between them.

    The transport buffers what is sent, so that only an answer says when a step had arrived: an
    answer to so many bytes in so many seconds means that the line is at least so fast.
    """

    def __init__(self) -> None:
        self._shown_bytes_per_second: deque[float] = deque(maxlen=16)
        self._guessed_bytes_per_second: float = _UNKNOWN_BYTES_PER_SECOND
        self._num_bytes = 0

    @contextmanager
    def carry(self, num_bytes: int) -> Iterator[float]:
        """Count bytes as under way; gives the seconds until they and all others have arrived."""
        self._num_bytes += num_bytes
        try:
            yield self.expect_seconds(self._num_bytes)
        finally:
            self._num_bytes -= num_bytes

    @property
    def num_bytes(self) -> int:
        """How many bytes are under way."""
        return self._num_bytes

    def expect_seconds(self, num_bytes: int) -> float:
        """Return how long so many bytes take at most, as far as the line has shown."""
        known = self._shown_bytes_per_second
        return num_bytes / max(known, default=self._guessed_bytes_per_second)

    def note_answer(self, num_bytes: int, seconds: float) -> None:
        """Note that so many bytes, there and back, were carried in at most so many seconds."""
        if num_bytes >= _LARGE_BYTES and seconds > 0:
            self._shown_bytes_per_second.append(num_bytes / seconds)

    def note_silence(self, num_bytes: int) -> None:
        """Note that no answer came: as long as nothing else is known, the line may be slow."""
        if num_bytes >= _LARGE_BYTES:
            self.doubt()

    def doubt(self) -> None:
        """Take the line for slower than before, as long as nothing else is known."""
        halved = self._guessed_bytes_per_second / 2
        self._guessed_bytes_per_second = max(halved, _LEAST_BYTES_PER_SECOND)
