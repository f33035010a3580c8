"""Measured numbers, and the report of a run that measured them.

For `shoal bench` and for the benchmarks of developers. Imports nothing heavy.
"""

import json
import math
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from ...protocol.errors import ShoalError
from ..terminal.terminal import Progress, Terminal

_NAME_COLUMNS = 52
_SECONDS_DIGITS = 1


@dataclass(frozen=True)
class Figure:
    """One measured number."""

    name: str
    value: float
    unit: str

    def to_json(self) -> dict[str, object]:
        """Return the figure as plain JSON types; figures of `make bench` may have targets."""
        value = round_to_digits(self.value, 4)
        return {
            "name": self.name, "value": value, "unit": self.unit, "target": None, "is_met": None
        }  # fmt: skip

    def to_line(self) -> str:
        """Return the figure as a line of a table.

        >>> Figure("ratio", 2.5, "x").to_line().split()
        ['ratio', '2.5', 'x']
        """
        value = f"{round_to_digits(self.value, 4):g}"
        return f"  {self.name:<{_NAME_COLUMNS}}{value:>9} {self.unit}"


def round_to_digits(value: float, num_digits: int) -> float:
    """Round to a number of significant digits; digits before the point stay.

    >>> round_to_digits(0.0012345, 3), round_to_digits(12345.6, 3)
    (0.00123, 12346.0)
    """
    if not value or not math.isfinite(value):
        return value
    num_decimals = num_digits - 1 - math.floor(math.log10(abs(value)))
    return round(value, max(0, num_decimals))


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


class BenchRun:
    """Measures parts one after the other, and shows each as soon as it is measured.

    With `as_json` it prints nothing but one JSON object at the end.
    """

    def __init__(self, machine: str, is_quick: bool, as_json: bool) -> None:
        self._machine = machine
        self.is_quick = is_quick
        self._as_json = as_json
        self.parts: list[PartReport] = []
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
        self.parts.append(part)
        self._show(part.to_text())

    def finish(self) -> int:
        """Print the end of the report; return 1 when a part could not be measured, else 0."""
        print(json.dumps(self.to_json()) if self._as_json else self.to_verdict(), flush=True)
        return 1 if any(part.error is not None for part in self.parts) else 0

    def to_json(self) -> dict[str, object]:
        """Return everything as plain JSON types."""
        return {
            "machine": self._machine,
            "quick": self.is_quick,
            "parts": [part.to_json() for part in self.parts],
            "num_targets": 0,
            "num_missed": 0,
        }

    def to_verdict(self) -> str:
        """Return what is to be said of all figures together."""
        if self.is_quick:
            return "A quick run: these numbers mean nothing, and have no targets."
        return "Nothing here has a target."

    def _show(self, text: str) -> None:
        if not self._as_json:
            Terminal(sys.stdout).print(text)
