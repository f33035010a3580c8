"""Draws what churn did to a swarm, the same bytes for the same numbers."""

from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from measuring.plotting import save_figure
from shoal.cli.finetuning.loss_plot import STYLE
from simulation.recorder import Sample
from simulation.scenarios import WARM_UP_SECONDS, ChurnOutcome, Recovery

TARGET_RATIO = 0.85
_BIN_MINUTES = 20.0
_DARK: dict[str, Any] = {"color": "0.1"}
_LIGHT: dict[str, Any] = {"color": "0.6", "linestyle": "--"}


def draw_outcome(
    churn: ChurnOutcome, recoveries: list[Recovery], period_seconds: float, folder: Path
) -> list[Path]:
    """Write the plot as SVG and PNG into a folder; return the files."""
    setting = churn.setting
    with rc_context(STYLE):
        figure = Figure(figsize=(7.2, 5.4), layout="constrained")
        (coverage, speed), (moves, recovery) = figure.subplots(2, 2)
        _draw_coverage(coverage, churn.samples)
        _draw_speed(speed, churn.samples)
        draw_moves(moves, churn)
        _draw_recovery(recovery, recoveries, period_seconds)
        for axes in (coverage, speed, moves):
            axes.set_xlabel("minutes")
            shade_churn(axes, churn)
        note = (
            f"{setting.num_peers} peers, {100 * setting.per_hour:.0f} % replaced an hour where "
            f"grey, seed {setting.seed}"
        )
        return save_figure(figure, note, folder, "simulation")


def shade_churn(axes: Any, churn: ChurnOutcome) -> Any:
    """Mark when peers come and go, behind all that is drawn; return the mark."""
    begin, end = WARM_UP_SECONDS / 60, churn.setting.end_seconds / 60
    return axes.axvspan(begin, end, color="0.95", linewidth=0, zorder=0)


def _minutes(samples: list[Sample]) -> list[float]:
    return [sample.seconds / 60 for sample in samples]


def _draw_coverage(axes: Any, samples: list[Sample]) -> None:
    axes.plot(_minutes(samples), [sample.min_replicas for sample in samples], **_DARK)
    axes.axhline(2, **_LIGHT)
    axes.set_title("Coverage", loc="left")
    axes.set_ylabel("hosts of the block with the fewest")
    axes.set_ylim(bottom=0)


def _draw_speed(axes: Any, samples: list[Sample]) -> None:
    axes.plot(_minutes(samples), [100 * sample.ratio for sample in samples], **_DARK)
    axes.axhline(100 * TARGET_RATIO, **_LIGHT)
    axes.set_title("Throughput of the weakest block", loc="left")
    axes.set_ylabel("% of the optimum")
    axes.set_ylim(0, 100)


def draw_moves(axes: Any, churn: ChurnOutcome) -> None:
    """Draw as bars how often peers move."""
    times = [move.seconds / 60 for move in churn.moves]
    end = churn.samples[-1].seconds / 60
    edges = [_BIN_MINUTES * index for index in range(int(end // _BIN_MINUTES) + 2)]
    weight = 60 / _BIN_MINUTES / churn.setting.num_peers
    axes.hist(times, bins=edges, weights=[weight] * len(times), color="0.3")
    axes.axhline(1.0, **_LIGHT)
    axes.set_title("Moves", loc="left")
    axes.set_ylabel("per peer and hour")
    axes.set_ylim(0, 1.1)


def _draw_recovery(axes: Any, recoveries: list[Recovery], period_seconds: float) -> None:
    periods = sorted(
        (recovery.total_seconds - recovery.load_seconds) / period_seconds for recovery in recoveries
    )
    parts = [100 * (index + 1) / len(periods) for index in range(len(periods))]
    axes.step([0.0, *periods], [0.0, *parts], where="post", **_DARK)
    axes.axvline(2.0, **_LIGHT)
    axes.set_title("A span loses its only host", loc="left")
    axes.set_xlabel("periods until served again, less loading")
    axes.set_ylabel("% of the deaths")
    axes.set_xlim(0, 2.2)
    axes.set_ylim(0, 100)
