"""The report of a run of benchmarks: its parts, their figures, and the targets of figures."""

import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shoal.cli.benchmarking.figure import Figure
from shoal.cli.terminal.terminal import Progress, Terminal
from shoal.protocol.errors import ShoalError

_SECONDS_DIGITS = 1


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


@dataclass(frozen=True)
class PartReport:
    """The figures of one part, or why there are none."""

    name: str
    title: str
    seconds: float
    figures: tuple[Figure, ...] = ()
    error: str | None = None

    def to_json(self) -> dict[str, object]:
        """Return the part as plain JSON types."""
        return {
            "name": self.name,
            "title": self.title,
            "seconds": round(self.seconds, _SECONDS_DIGITS),
            "figures": [figure.to_json() for figure in self.figures],
            "error": self.error,
        }

    def to_text(self) -> str:
        """Return a table with its title above."""
        lines = [f"{self.title}  ({self.name}, {self.seconds:.{_SECONDS_DIGITS}f} s)"]
        lines += [figure.to_line() for figure in self.figures]
        if self.error is not None:
            lines.append(f"! not measured: {self.error}")
        return "\n".join(lines) + "\n"


class BenchRun:
    """Measures parts one after the other, shows each as soon as it is measured, and says at its end
    which targets were missed; a quick run has none.

    With `as_json` it prints nothing but one JSON object at the end.
    """

    def __init__(self, machine: str, is_quick: bool, as_json: bool) -> None:
        self._machine = machine
        self._is_quick = is_quick
        self._as_json = as_json
        self._parts: list[PartReport] = []
        self._status = ""
        self._show(f"{machine}\n")

    def say(self, status: str) -> None:
        """Name the current measurement in the progress line."""
        self._status = status

    def measure(self, name: str, title: str, measure: Callable[[], Sequence[Figure]]) -> None:
        """Measure one part; an error becomes its report, and leaves the other parts alone."""
        self._status = "loading"
        started_at = time.monotonic()
        figures, error = list[Figure](), None
        with Progress(Terminal(sys.stderr), lambda: f"{name}: {self._status}"):
            try:
                figures += measure()
            except (OSError, ShoalError) as failure:
                error = " ".join(str(failure).split())
        if self._is_quick:
            figures = [Figure(figure.name, figure.value, figure.unit) for figure in figures]
        seconds = time.monotonic() - started_at
        self._parts.append(PartReport(name, title, seconds, tuple(figures), error))
        self._show(self._parts[-1].to_text())

    def finish(self) -> int:
        """Print the end of the report; return 1 when a part could not be measured, else 0."""
        print(json.dumps(self._to_json()) if self._as_json else self._to_verdict(), flush=True)
        return 1 if any(part.error is not None for part in self._parts) else 0

    def _to_json(self) -> dict[str, object]:
        return {
            "machine": self._machine,
            "quick": self._is_quick,
            "parts": [part.to_json() for part in self._parts],
            "num_targets": len(self._list_targets()),
            "num_missed": len(self._list_missed()),
        }

    def _to_verdict(self) -> str:
        """Return which targets were missed, one line each behind the first."""
        if self._is_quick:
            return "A quick run: these numbers mean nothing, and have no targets."
        num_targets, missed = len(self._list_targets()), self._list_missed()
        if not num_targets:
            return "Nothing here has a target."
        lines = [f"{num_targets - len(missed)} of {num_targets} targets are met."]
        for part, figure in missed:
            value = figure.to_json()["value"]
            lines.append(f"Missed in {part.name}: {figure.name} {value}, target {figure.target}")
        return "\n".join(lines)

    def _list_targets(self) -> list[tuple[PartReport, TargetFigure]]:
        return [
            (part, figure)
            for part in self._parts
            for figure in part.figures
            if isinstance(figure, TargetFigure)
        ]

    def _list_missed(self) -> list[tuple[PartReport, TargetFigure]]:
        return [(part, figure) for part, figure in self._list_targets() if not figure.is_met]

    def _show(self, text: str) -> None:
        if not self._as_json:
            Terminal(sys.stdout).print(text)
