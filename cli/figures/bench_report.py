"""Measured numbers with their targets, and the report of a run that measured them.

For `shoal bench` and for the benchmarks of developers. Imports nothing heavy.
"""

import json
import math
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

from ...protocol.errors import ShoalError
from ..terminal.terminal import Progress, Terminal

_NAME_COLUMNS = 52
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
class Figure:
    """One measured number."""

    name: str
    value: float
    unit: str
    target: Target | None = None

    @property
    def is_met(self) -> bool | None:
        """Return whether the target is met, None where there is none."""
        return None if self.target is None else self.target.is_met_by(self.value)

    def to_json(self) -> dict[str, object]:
        """Return the figure as plain JSON types."""
        return {
            "name": self.name,
            "value": round_to_digits(self.value, 4),
            "unit": self.unit,
            "target": None if self.target is None else str(self.target),
            "is_met": self.is_met,
        }

    def to_line(self) -> str:
        """Return the figure as a line of a table; + and - say whether its target is met.

        >>> Figure("ratio", 2.5, "x", at_least(2)).to_line().split()
        ['+', 'ratio', '2.5', 'x', '(target', '>=', '2)']
        """
        mark = {None: " ", True: "+", False: "-"}[self.is_met]
        target = "" if self.target is None else f"  (target {self.target})"
        value = f"{round_to_digits(self.value, 4):g}"
        return f"{mark} {self.name:<{_NAME_COLUMNS}}{value:>9} {self.unit}{target}"


def round_to_digits(value: float, num_digits: int) -> float:
    """Round to a number of significant digits; digits before the point stay.

    >>> round_to_digits(0.0012345, 3), round_to_digits(12345.6, 3)
    (0.00123, 12346.0)
    """
    if not value or not math.isfinite(value):
        return value
    num_decimals = num_digits - 1 - math.floor(math.log10(abs(value)))
    return round(value, max(0, num_decimals))


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


def compute_median(values: Sequence[float]) -> float:
    """Return the value in the middle."""
    return compute_percentile(values, 50)


def describe_machine() -> str:
    """Return processor, cores, Python and torch in one line."""
    processor = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            processor = line.partition(":")[2].strip()
            break
    return (
        f"{processor}, {os.cpu_count()} cores, Python {platform.python_version()}, "
        f"torch {version('torch')}"
    )


@dataclass(frozen=True)
class PartReport:
    """The figures of one part, or why there are none."""

    name: str
    title: str
    seconds: float
    figures: tuple[Figure, ...] = ()
    error: str | None = None

    def without_targets(self) -> "PartReport":
        """Return the same figures without targets."""
        return replace(self, figures=tuple(replace(figure, target=None) for figure in self.figures))

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


def measure_part(name: str, title: str, measure: Callable[[], Sequence[Figure]]) -> PartReport:
    """Measure one part; an error becomes its report, and leaves the other parts alone."""
    started_at = time.monotonic()
    figures, error = (), None
    try:
        figures = tuple(measure())
    except (OSError, ShoalError) as failure:
        error = " ".join(str(failure).split())
    return PartReport(name, title, time.monotonic() - started_at, figures, error)


@dataclass(frozen=True)
class BenchReport:
    """All parts of one run."""

    machine: str
    is_quick: bool
    parts: tuple[PartReport, ...]

    @property
    def num_targets(self) -> int:
        """How many figures have a target."""
        return sum(figure.is_met is not None for part in self.parts for figure in part.figures)

    @property
    def missed(self) -> list[tuple[PartReport, Figure]]:
        """The figures that miss their targets."""
        return [
            (part, figure)
            for part in self.parts
            for figure in part.figures
            if figure.is_met is False
        ]

    @property
    def has_errors(self) -> bool:
        """Return whether a part could not be measured."""
        return any(part.error is not None for part in self.parts)

    def to_json(self) -> dict[str, object]:
        """Return everything as plain JSON types."""
        return {
            "machine": self.machine,
            "quick": self.is_quick,
            "parts": [part.to_json() for part in self.parts],
            "num_targets": self.num_targets,
            "num_missed": len(self.missed),
        }

    def to_verdict(self) -> str:
        """Return which targets were missed, one line each behind the first."""
        if self.is_quick:
            return "A quick run: these numbers mean nothing, and have no targets."
        if not self.num_targets:
            return "Nothing here has a target."
        lines = [f"{self.num_targets - len(self.missed)} of {self.num_targets} targets are met."]
        for part, figure in self.missed:
            value = figure.to_json()["value"]
            lines.append(f"Missed in {part.name}: {figure.name} {value}, target {figure.target}")
        return "\n".join(lines)


class BenchRun:
    """Measures parts one after the other, and shows each as soon as it is measured.

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
        """Measure one part."""
        self._status = "loading"
        with Progress(Terminal(sys.stderr), lambda: f"{name}: {self._status}"):
            part = measure_part(name, title, measure)
        if self._is_quick:
            part = part.without_targets()
        self._parts.append(part)
        self._show(part.to_text())

    def finish(self) -> int:
        """Print the verdict; return 1 when a part could not be measured, else 0."""
        report = BenchReport(self._machine, self._is_quick, tuple(self._parts))
        if self._as_json:
            print(json.dumps(report.to_json()), flush=True)
        else:
            print(report.to_verdict(), flush=True)
        return 1 if report.has_errors else 0

    def _show(self, text: str) -> None:
        if not self._as_json:
            Terminal(sys.stdout).print(text)
