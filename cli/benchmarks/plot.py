"""Draws speed and latency over the number of sessions, the same bytes for the same numbers."""

import importlib
from pathlib import Path
from typing import Any

from .curve import SessionsCurve

_NAME = "sessions"
STYLE = {
    "font.size": 9.0,
    "axes.titlesize": 10.0,
    "figure.constrained_layout.wspace": 0.04,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "0.88",
    "lines.linewidth": 1.6,
    "lines.markersize": 5.0,
    "svg.hashsalt": "shoal",
}
# Told apart without colour: by shade, line and marker.
_DARK: dict[str, Any] = {"color": "0.1", "marker": "o"}
_LIGHT: dict[str, Any] = {"color": "0.5", "marker": "s", "linestyle": "--"}
_REFERENCE: dict[str, Any] = {
    "color": "0.1", "marker": "D", "markerfacecolor": "white", "linestyle": "none"
}  # fmt: skip


def draw_curve(curve: SessionsCurve, machine: str, folder: Path) -> list[Path]:
    """Write the plot as SVG and PNG into a folder; return the files."""
    matplotlib: Any = importlib.import_module("matplotlib")
    figures: Any = importlib.import_module("matplotlib.figure")
    with matplotlib.rc_context(STYLE):
        figure = figures.Figure(figsize=(7.2, 3.4), layout="constrained")
        speed, latency = figure.subplots(1, 2)
        _draw_speed(speed, curve)
        _draw_latency(latency, curve)
        for axes in (speed, latency):
            _set_sessions_axis(axes, [point.num_sessions for point in curve.points])
        figure.supxlabel(machine, fontsize=7, color="0.4")
        return save_figure(figure, folder, _NAME)


def save_figure(figure: Any, folder: Path, name: str) -> list[Path]:
    """Write a figure as SVG and PNG into a folder; return the files."""
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"{name}.svg", folder / f"{name}.png"]
    # No date and no version of the program: the same numbers are the same file.
    figure.savefig(files[0], metadata={"Date": None, "Creator": None})
    figure.savefig(files[1], dpi=160, metadata={"Software": None})
    return files


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
