"""Draws the losses of a run over its updates, and writes them as a table."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

STYLE: dict[Any, Any] = {
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
"""Shared by all plots, those of benchmarks included."""

_NUM_SMOOTHED = 25
"""The smoothed curve has at least this many points that share no updates."""


def save_losses(
    losses: Sequence[float | None], eval_losses: Mapping[int, float], path: Path
) -> None:
    """Write a row for each update; row 0 is the evaluation before the first update."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["update", "loss", "evaluation_loss"])
        for number, loss in enumerate([None, *losses]):
            writer.writerow([number, loss, eval_losses.get(number)])


def draw_losses(
    losses: Sequence[float | None],
    eval_losses: Mapping[int, float],
    title: str,
    path: Path,
    entropy: float | None = None,
    eval_label: str = "evaluation",
) -> None:
    """Write the plot as PNG, or SVG; the entropy of the text is the limit of its losses."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(cast("Any", STYLE)):  # matplotlib types the names one by one
        figure = Figure(figsize=(6.4, 3.6), layout="constrained")
        axes = figure.subplots()
        numbers = [number for number, loss in enumerate(losses, 1) if loss is not None]
        known = [loss for loss in losses if loss is not None]
        window = max(1, len(known) // _NUM_SMOOTHED)
        if window > 1:
            axes.plot(numbers, known, color="0.82", linewidth=0.8)
        axes.plot(numbers, smooth(known, window), color="0.35", label="training")
        if eval_losses:
            axes.plot(
                list(eval_losses), list(eval_losses.values()), color="0.05", marker="o",
                linestyle="--", linewidth=1.0, markersize=4.0, label=eval_label,
            )  # fmt: skip
        if entropy is not None:
            label = f"entropy of the corpus, {entropy:.3f}"
            axes.axhline(entropy, color="0.05", linestyle=":", linewidth=1.2, label=label)
            axes.set_ylim(bottom=0)
        if eval_losses or entropy is not None:
            axes.legend(frameon=False, loc="upper right")
        axes.set_title(title, loc="left")
        axes.set_xlabel("update")
        axes.set_ylabel("loss, nats per token")
        axes.set_xlim(left=0)
        # Without the version of the program the same numbers give the same file.
        stamp = "Date" if path.suffix == ".svg" else "Software"
        figure.savefig(path, dpi=160, metadata={stamp: None})


def smooth(values: Sequence[float], window: int) -> list[float]:
    """Return for each value the mean of it and those before it, `window` at most.

    >>> smooth([4.0, 2.0, 0.0], 2)
    [4.0, 3.0, 1.0]
    """
    return [
        sum(values[max(0, stop - window) : stop]) / min(window, stop)
        for stop in range(1, len(values) + 1)
    ]
