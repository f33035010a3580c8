"""The benchmarks of training run, on the smallest sizes."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import warm_python

from training_benchmarks.kills import DIFFERENT

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

pytestmark = [pytest.mark.network, pytest.mark.slow, pytest.mark.thorough]


def run_benchmark(name: str, options: str, code: int = 0) -> list[str]:
    """Return the lines of a benchmark's figures."""
    process = warm_python.run(
        [sys.executable, "-P", "-m", f"training_benchmarks.{name}", *options.split()],
        starts_peers=True,
        env={**os.environ, "PYTHONPATH": str(BENCHMARKS)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert process.returncode == code, process.stderr
    return process.stdout.splitlines()


KILLS = "--cores 0 --updates 12 --parts 4 --replicas 2 --kill-every 1"


def test_weights_of_runs_with_and_without_kills_are_those_of_one_process() -> None:
    lines = run_benchmark("kills", KILLS)

    assert lines[-1] == "+ the weights are equal"
    assert len({line.split()[-1] for line in lines if "SHA-256" in line}) == 1, lines
    assert not any(line.startswith("  kills   ") and line.endswith(" 0 ") for line in lines), lines


def test_weights_that_lack_a_part_differ_from_those_of_the_runs() -> None:
    lines = run_benchmark("kills", f"{KILLS} --without 3:1", code=DIFFERENT)

    assert lines[-1] == "- the weights differ"


@pytest.mark.parametrize(
    ("name", "options", "figure"),
    [
        ("speed", "--updates 2 --parts 2", "  predicted by shoal train-plan"),
        ("losses", "--updates 2 --parts 1 --optimizers muon", "+ muon: exact, all losses"),
        ("int8_losses", "--updates 2 --parts 1 --blocks 2 --seeds 1", "+ int8: loss above"),
    ],
    ids=["speed", "losses", "int8_losses"],
)
def test_benchmark_comes_to_its_figures(name: str, options: str, figure: str) -> None:
    assert any(line.startswith(figure) for line in run_benchmark(name, options))
