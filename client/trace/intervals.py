"""Stretches of time that may lie over each other, and how much they cover together. Pure."""

from collections.abc import Iterable


def measure_covered(intervals: Iterable[tuple[float, float]]) -> float:
    """Return how long at least one of some intervals lasts; what two share counts once.

    >>> measure_covered([(5.0, 6.0), (0.0, 2.0), (1.0, 3.0)])
    4.0
    """
    seconds, reached_at = 0.0, float("-inf")
    for started_at, ended_at in sorted(intervals):
        seconds += max(0.0, ended_at - max(started_at, reached_at))
        reached_at = max(reached_at, ended_at)
    return seconds
