"""Speed and latency over the number of sessions: figures and plot of the part `sessions`."""

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib import figure as drawings
from matplotlib import rc_context

from measuring.plotting import save_figure
from measuring.report import Target, TargetFigure, at_least, at_most, compute_percentile
from shoal.cli.benchmarking.figure import Figure
from shoal.cli.finetuning.loss_plot import STYLE

# Told apart without colour: by shade, line and marker.
_DARK: dict[str, Any] = {"color": "0.1", "marker": "o"}
_LIGHT: dict[str, Any] = {"color": "0.5", "marker": "s", "linestyle": "--"}
_REFERENCE: dict[str, Any] = {
    "color": "0.1", "marker": "D", "markerfacecolor": "white", "linestyle": "none"
}  # fmt: skip


@dataclass(frozen=True)
class CurvePoint:
    """So many sessions at once, each stepping as fast as it is answered."""

    num_sessions: int
    steps_per_second: float
    median_seconds: float
    p95_seconds: float

    @classmethod
    def of(cls, num_sessions: int, step_seconds: list[float], seconds: float) -> "CurvePoint":
        """Sum up the seconds of every step, and those that all of them took together."""
        return cls(
            num_sessions,
            len(step_seconds) / seconds,
            statistics.median(step_seconds),
            compute_percentile(step_seconds, 95),
        )


@dataclass(frozen=True)
class SessionsCurve:
    """The points in order of sessions, and plain transformers by the rows of its batch."""

    points: tuple[CurvePoint, ...]
    reference_tokens_per_second: dict[int, float]

    def to_figures(self) -> list[Figure]:
        """Return the table, and the figures that have targets behind their points."""
        figures = [
            Figure(f"plain transformers, batch of {num_rows}", speed, "tok/s")
            for num_rows, speed in self.reference_tokens_per_second.items()
        ]
        for point in self.points:
            name = f"{point.num_sessions} session{'s' if point.num_sessions > 1 else ''}"
            figures += [
                Figure(f"{name}, together", point.steps_per_second, "steps/s"),
                Figure(f"{name}, median step", 1000 * point.median_seconds, "ms"),
                Figure(f"{name}, 95th percentile", 1000 * point.p95_seconds, "ms"),
            ]
        return [*figures, *self._compare(1, at_least(2)), *self._compare(16, at_least(1)),
                *self._compare_percentiles(8)]  # fmt: skip

    def find(self, num_sessions: int) -> CurvePoint | None:
        """Return the point of so many sessions."""
        return next((point for point in self.points if point.num_sessions == num_sessions), None)

    def _compare(self, num_rows: int, target: Target) -> list[Figure]:
        point, reference = self.find(num_rows), self.reference_tokens_per_second.get(num_rows)
        if point is None or reference is None:
            return []
        name = f"sessions: {num_rows}, ratio to a batch of {num_rows}"
        return [TargetFigure(name, point.steps_per_second / reference, "x", target)]

    def _compare_percentiles(self, num_sessions: int) -> list[Figure]:
        alone, together = self.find(1), self.find(num_sessions)
        if alone is None or together is None:
            return []
        name = f"sessions: {num_sessions}, 95th percentile to that of one"
        return [TargetFigure(name, together.p95_seconds / alone.p95_seconds, "x", at_most(3))]


def draw_curve(curve: SessionsCurve, machine: str, folder: Path) -> list[Path]:
    """Write the plot as SVG and PNG into a folder; return the files."""
    with rc_context(STYLE):
        figure = drawings.Figure(figsize=(7.2, 3.4), layout="constrained")
        speed, latency = figure.subplots(1, 2)
        _draw_speed(speed, curve)
        _draw_latency(latency, curve)
        for axes in (speed, latency):
            _set_sessions_axis(axes, [point.num_sessions for point in curve.points])
        return save_figure(figure, machine, folder, "sessions")


def _draw_speed(axes: Any, curve: SessionsCurve) -> None:
    counts = [point.num_sessions for point in curve.points]
    speeds = [point.steps_per_second for point in curve.points]
    axes.plot(counts, speeds, label="shoal, 2 peers, int8", **_DARK)
    reference = curve.reference_tokens_per_second
    axes.plot(
        list(reference), list(reference.values()), label="transformers, one batch",
        **_REFERENCE,
    )  # fmt: skip
    axes.set_title("All sessions together", loc="left")
    axes.set_ylabel("tokens per second")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, loc="upper left")


def _draw_latency(axes: Any, curve: SessionsCurve) -> None:
    counts = [point.num_sessions for point in curve.points]
    p95 = [1000 * point.p95_seconds for point in curve.points]
    median = [1000 * point.median_seconds for point in curve.points]
    axes.plot(counts, p95, label="95th percentile", **_LIGHT)
    axes.plot(counts, median, label="median", **_DARK)
    axes.set_title("One step of one session", loc="left")
    axes.set_ylabel("latency, ms")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, loc="upper left")


def _set_sessions_axis(axes: Any, counts: list[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.minorticks_off()
    axes.set_xlabel("sessions at once")
