"""How long something may take before it is late: deadlines that follow from what was measured."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from statistics import median

_NUM_KEPT = 32
_NUM_SPREADS = 10
_UNKNOWN_FLOORS = 10
"""The deadline, in floors, of what was never measured."""
_MOST_DOUBLINGS = 6


def choose_deadline(taken_seconds: Collection[float], floor_seconds: float) -> float:
    """Return after how many seconds something is late, by how long it took before.

    That is a floor, the median, and ten times the median absolute deviation from it, which a few
    stragglers do not change.

    >>> choose_deadline([2.0, 2.5, 3.0, 60.0], floor_seconds=10.0)
    17.75
    >>> choose_deadline([], floor_seconds=10.0)
    100.0
    """
    if not taken_seconds:
        return _UNKNOWN_FLOORS * floor_seconds
    middle = median(taken_seconds)
    spread = median(abs(seconds - middle) for seconds in taken_seconds)
    return floor_seconds + middle + _NUM_SPREADS * spread


class UsualTimes:
    """How long things of one kind took lately. Each that was late doubles the deadline of the next.

    So a network or machine that has become slow is given enough time in the end.
    """

    def __init__(self, floor_seconds: float) -> None:
        self._floor_seconds = floor_seconds
        self._taken_seconds: deque[float] = deque(maxlen=_NUM_KEPT)
        self._num_late = 0

    @property
    def usual_seconds(self) -> float:
        """The median; 0 where nothing has come to its end yet."""
        return median(self._taken_seconds) if self._taken_seconds else 0.0

    @property
    def deadline_seconds(self) -> float:
        """After how many seconds the next one is late."""
        usual = choose_deadline(self._taken_seconds, self._floor_seconds)
        return usual * 2 ** min(self._num_late, _MOST_DOUBLINGS)

    def note(self, seconds: float) -> None:
        """Note one that came to its end."""
        self._taken_seconds.append(seconds)
        self._num_late = 0

    def note_late(self) -> None:
        """Note one that was given up at its deadline."""
        self._num_late += 1
