"""Ranges of consecutive blocks, and what a set of them covers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Span:
    """The half-open range `[start, stop)` of block indices, never empty.

    >>> str(Span(2, 5)), len(Span(2, 5)), 4 in Span(2, 5)
    ('2:5', 3, True)
    """

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise ValueError(f"a span needs 0 <= start < stop, got {self.start}:{self.stop}")

    def __str__(self) -> str:
        return f"{self.start}:{self.stop}"

    def __len__(self) -> int:
        return self.stop - self.start

    def __contains__(self, block: int) -> bool:
        return self.start <= block < self.stop

    def covers(self, other: Span) -> bool:
        """Return whether every block of `other` lies in this span."""
        return self.start <= other.start and other.stop <= self.stop

    def overlap(self, other: Span) -> Span | None:
        """Return the blocks that both spans hold, or None.

        >>> Span(0, 4).overlap(Span(2, 8)), Span(0, 2).overlap(Span(2, 4))
        (Span(start=2, stop=4), None)
        """
        start, stop = max(self.start, other.start), min(self.stop, other.stop)
        return Span(start, stop) if start < stop else None

    def adjoins(self, other: Span) -> bool:
        """Return whether a chain may lead from one of both spans to the other.

        >>> Span(4, 8).adjoins(Span(6, 12)), Span(4, 8).adjoins(Span(0, 4))
        (True, True)
        >>> Span(4, 8).adjoins(Span(5, 8)), Span(4, 8).adjoins(Span(9, 12))
        (False, False)
        """
        first, second = sorted((self, other))
        return first.start < second.start <= first.stop < second.stop

    @classmethod
    def parse(cls, text: str) -> Span:
        """Read `A:B`; raises ValueError with what is wrong.

        >>> Span.parse("0:4")
        Span(start=0, stop=4)
        """
        start, separator, stop = text.partition(":")
        if not separator or not start.strip().isdecimal() or not stop.strip().isdecimal():
            raise ValueError(f"a span is written A:B with whole numbers, got {text!r}")
        return cls(int(start), int(stop))


def find_gaps(num_blocks: int, spans: Iterable[Span]) -> list[Span]:
    """Return the gaps: maximal spans of `range(num_blocks)` that no given span holds.

    >>> find_gaps(8, [Span(0, 3), Span(2, 4), Span(6, 7)])
    [Span(start=4, stop=6), Span(start=7, stop=8)]
    """
    gaps: list[Span] = []
    covered_to = 0
    for span in sorted(spans):
        if covered_to >= num_blocks:
            return gaps
        if span.start > covered_to:
            gaps.append(Span(covered_to, min(span.start, num_blocks)))
        covered_to = max(covered_to, span.stop)
    if covered_to < num_blocks:
        gaps.append(Span(covered_to, num_blocks))
    return gaps
