"""What a run of `shoal bench` found, as text and as JSON."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from ...protocol.errors import ShoalError
from .curve import SessionsCurve
from .figures import Figure
from .parts import TITLES

_SECONDS_DIGITS = 1


@dataclass(frozen=True)
class Findings:
    """What one part has measured; a curve only where there is something to draw."""

    figures: list[Figure]
    curve: SessionsCurve | None = None


@dataclass(frozen=True)
class PartReport:
    """The figures of one part, or why there are none."""

    name: str
    title: str
    seconds: float
    figures: tuple[Figure, ...] = ()
    curve: SessionsCurve | None = None
    error: str | None = None

    def without_targets(self) -> "PartReport":
        """Return the same figures, held against nothing."""
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


def measure_part(name: str, measure: Callable[[], Findings]) -> PartReport:
    """Measure one part; what goes wrong in it becomes its report, and spoils no other part."""
    started_at = time.monotonic()
    findings, error = Findings([]), None
    try:
        findings = measure()
    except (OSError, ShoalError) as failure:
        error = " ".join(str(failure).split())
    seconds = time.monotonic() - started_at
    return PartReport(name, TITLES[name], seconds, tuple(findings.figures), findings.curve, error)


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
    def curve(self) -> SessionsCurve | None:
        """Return what there is to draw."""
        return next((part.curve for part in self.parts if part.curve is not None), None)

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
