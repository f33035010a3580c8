"""Which blocks a peer keeps away from because it could not load them."""

from collections import Counter
from collections.abc import Iterable

_FIRST_SECONDS = 600.0
"""How long it does so after the first time: as long as a peer stays anywhere."""

_MOST_SECONDS = 24 * 3600.0


class Setbacks:
    """Blocks that could not be loaded. Each is avoided for a while, twice as long every time."""

    def __init__(self) -> None:
        self._num_failures: Counter[int] = Counter()
        self._avoided_until: dict[int, float] = {}

    def note(self, blocks: Iterable[int], now: float) -> None:
        """Note that these blocks, or one of them, could not be loaded."""
        for block in blocks:
            seconds = min(_FIRST_SECONDS * 2 ** self._num_failures[block], _MOST_SECONDS)
            self._num_failures[block] += 1
            self._avoided_until[block] = now + seconds

    def list_avoided(self, now: float) -> frozenset[int]:
        """Return the blocks that are to be left alone now."""
        return frozenset(block for block, until in self._avoided_until.items() if now < until)
