"""The replicas of each block over time, as the page's charts draw them from the history."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from .history import DepthChange
from .state import MIN_REPLICAS

DURATION_BINS = (
    ("to 1 min", 60.0),
    ("to 10 min", 600.0),
    ("to 1 h", 3600.0),
    ("to 6 h", 6 * 3600.0),
    ("longer", float("inf")),
)
"""Bins of how long blocks were under-replicated, and their longest seconds."""


_MAX_TIMES = 240
"""Of a chart: it is a thousand pixels wide."""


class DepthArea(NamedTuple):
    """Neighbouring blocks that had equally many replicas for a time."""

    start: int
    stop: int
    since: float
    until: float
    depth: int


def list_areas(changes: Sequence[DepthChange], now: float, max_areas: int) -> list[DepthArea]:
    """Return what is drawn of the changes: areas of blocks and times, the oldest first.

    Where there would be too many, times are joined and the least depth of each block is drawn.

    >>> changes = [DepthChange(0.0, bytes([1, 1, 2])), DepthChange(5.0, bytes([2, 1, 2]))]
    >>> [tuple(area) for area in list_areas(changes, 9.0, 10)]
    [(0, 2, 0.0, 5.0, 1), (2, 3, 0.0, 9.0, 2), (0, 1, 5.0, 9.0, 2), (1, 2, 5.0, 9.0, 1)]
    """
    num_times = min(len(changes), _MAX_TIMES)
    if len(changes) > num_times:
        changes = _coarsen(changes, now, num_times)
    areas = _join(changes, now)
    while len(areas) > max_areas and num_times > 1:
        num_times = max(1, num_times // 2)
        areas = _join(_coarsen(changes, now, num_times), now)
    return areas


def _join(changes: Sequence[DepthChange], now: float) -> list[DepthArea]:
    done = list[DepthArea]()
    going_on = dict[tuple[int, int, int], float]()
    for change in changes:
        runs = _list_runs(change.depths)
        ended = [key for key in going_on if key not in runs]
        done += (DepthArea(*key[:2], going_on.pop(key), change.at, key[2]) for key in ended)
        for key in runs:
            going_on.setdefault(key, change.at)
    done += (DepthArea(*key[:2], since, now, key[2]) for key, since in going_on.items())
    return sorted(
        (one for one in done if one.until > one.since), key=lambda one: (one.since, one.start)
    )


def _list_runs(depths: bytes) -> list[tuple[int, int, int]]:
    runs, start = list[tuple[int, int, int]](), 0
    for depth, group in groupby(depths):
        stop = start + len(list(group))
        runs.append((start, stop, depth))
        start = stop
    return runs


def _coarsen(changes: Sequence[DepthChange], now: float, num_times: int) -> list[DepthChange]:
    """Return about so many changes: each block's least depth in each part of the time."""
    first = changes[0].at
    step = (now - first) / num_times
    coarse, index, held = list[DepthChange](), 0, b""
    for number in range(num_times):
        begin, end = first + number * step, first + (number + 1) * step
        seen = [held] if held else []
        while index < len(changes) and changes[index].at < end:
            held = changes[index].depths
            seen.append(held)
            index += 1
        known = [depths for depths in seen if depths]
        length = max(map(len, known), default=0)
        least = bytes(min(one[b] for one in known if b < len(one)) for b in range(length))
        coarse.append(DepthChange(begin, least))
    return coarse


def count_under_replicated(changes: Sequence[DepthChange], now: float) -> list[tuple[str, int]]:
    """Return how many times blocks had fewer than two replicas, by how long that lasted.

    Each block counts for itself; a time that goes on counts as long as it has lasted.

    >>> changes = [DepthChange(0.0, bytes([1, 2])), DepthChange(30.0, bytes([2, 2]))]
    >>> count_under_replicated(changes, 99.0)[:2]
    [('to 1 min', 1), ('to 10 min', 0)]
    """
    since_of = dict[int, float]()
    lasted = list[float]()
    for change in changes:
        lacking = {block for block, depth in enumerate(change.depths) if depth < MIN_REPLICAS}
        lasted += (change.at - since_of.pop(block) for block in set(since_of) - lacking)
        for block in lacking:
            since_of.setdefault(block, change.at)
    lasted += (now - since for since in since_of.values())
    bins = Counter(next(name for name, most in DURATION_BINS if one <= most) for one in lasted)
    return [(name, bins[name]) for name, _ in DURATION_BINS]
