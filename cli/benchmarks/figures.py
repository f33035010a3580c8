"""Measured numbers: their targets, their statistics, and how they are shown. Nothing is measured
here, and nothing heavy imported.
"""

import math
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

_NAME_COLUMNS = 52


@dataclass(frozen=True)
class Target:
    """A bound that a figure should keep."""

    sign: str
    bound: float

    def __str__(self) -> str:
        return f"{self.sign} {self.bound:g}"

    def is_met_by(self, value: float) -> bool:
        """Return whether a value is within the bound; what is not a number never is."""
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
    """Round to so many digits that count; digits before the point stay.

    >>> round_to_digits(0.0012345, 3), round_to_digits(12345.6, 3)
    (0.00123, 12346.0)
    """
    if not value or not math.isfinite(value):
        return value
    num_decimals = num_digits - 1 - math.floor(math.log10(abs(value)))
    return round(value, max(0, num_decimals))


def compute_percentile(values: Sequence[float], percent: float) -> float:
    """Return the value that so many percent of all are not above, between two if need be.

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
