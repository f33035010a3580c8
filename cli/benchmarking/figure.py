"""Measured numbers and the machine that they were measured on. Imports nothing heavy."""

import math
import os
import platform
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

_NAME_COLUMNS = 52


@dataclass(frozen=True)
class Figure:
    """One measured number."""

    name: str
    value: float
    unit: str

    def to_json(self) -> dict[str, object]:
        """Return the figure as plain JSON types."""
        return {"name": self.name, "value": round_to_digits(self.value, 4), "unit": self.unit}

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
