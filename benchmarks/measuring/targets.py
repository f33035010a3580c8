"""Figures with targets, and the report that holds them against each other."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shoal.cli.figures.bench_report import BenchRun, Figure, PartReport


@dataclass(frozen=True)
class Target:
    """A bound that a figure should keep."""

    sign: str
    bound: float

    def __str__(self) -> str:
        return f"{self.sign} {self.bound:g}"

    def is_met_by(self, value: float) -> bool:
        """Return whether a value is within the bound; NaN never is."""
        return value >= self.bound if self.sign == ">=" else value <= self.bound


def at_least(bound: float) -> Target:
    """Return the target of a figure that should be large.

    >>> str(at_least(2)), at_least(2).is_met_by(1.9), at_least(2).is_met_by(2)
    ('>= 2', False, True)
    """
    return Target(">=", bound)


def at_most(bound: float) -> Target:
    """Return the target of a figure that should be small."""
    return Target("<=", bound)


@dataclass(frozen=True)
class TargetFigure(Figure):
    """One measured number that should keep a bound."""

    target: Target

    @property
    def is_met(self) -> bool:
        """Return whether the target is met."""
        return self.target.is_met_by(self.value)

    def to_json(self) -> dict[str, object]:
        """Return the figure as plain JSON types."""
        return {**super().to_json(), "target": str(self.target), "is_met": self.is_met}

    def to_line(self) -> str:
        """Return the figure as a line of a table; + and - say whether its target is met.

        >>> TargetFigure("ratio", 2.5, "x", at_least(2)).to_line().split()
        ['+', 'ratio', '2.5', 'x', '(target', '>=', '2)']
        """
        mark = "+" if self.is_met else "-"
        return f"{mark}{super().to_line()[1:]}  (target {self.target})"


def compute_percentile(values: Sequence[float], percent: float) -> float:
    """Return a percentile, interpolated between two values if need be.

    >>> compute_percentile([4.0, 1.0, 2.0, 3.0, 5.0], 50), compute_percentile([1.0, 2.0], 75)
    (3.0, 1.75)
    """
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


class TargetRun(BenchRun):
    """A run that says at its end which targets were missed; a quick run has none."""

    def measure(self, name: str, title: str, measure: Callable[[], Sequence[Figure]]) -> None:
        """Measure one part."""

        def measure_without_targets() -> list[Figure]:
            return [Figure(figure.name, figure.value, figure.unit) for figure in measure()]

        super().measure(name, title, measure_without_targets if self.is_quick else measure)

    def to_json(self) -> dict[str, object]:
        """Return everything as plain JSON types."""
        num_targets, num_missed = len(self._list_targets()), len(self._list_missed())
        return {**super().to_json(), "num_targets": num_targets, "num_missed": num_missed}

    def to_verdict(self) -> str:
        """Return which targets were missed, one line each behind the first."""
        num_targets, missed = len(self._list_targets()), self._list_missed()
        if not num_targets:
            return super().to_verdict()
        lines = [f"{num_targets - len(missed)} of {num_targets} targets are met."]
        for part, figure in missed:
            value = figure.to_json()["value"]
            lines.append(f"Missed in {part.name}: {figure.name} {value}, target {figure.target}")
        return "\n".join(lines)

    def _list_targets(self) -> list[tuple[PartReport, TargetFigure]]:
        return [
            (part, figure)
            for part in self.parts
            for figure in part.figures
            if isinstance(figure, TargetFigure)
        ]

    def _list_missed(self) -> list[tuple[PartReport, TargetFigure]]:
        return [(part, figure) for part, figure in self._list_targets() if not figure.is_met]
