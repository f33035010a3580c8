"""Figures of benchmarks that have targets, and the report of those missed."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import pytest
import torch

from measuring.report import BenchRun, TargetFigure, at_least, at_most, compute_percentile
from shoal.cli.benchmarking.figure import Figure
from shoal.protocol.errors import UnavailableError

SEED = 5


@pytest.mark.parametrize("num_values", [1, 2, 19, 100])
def test_percentiles_are_those_of_torch(num_values: int) -> None:
    rng = random.Random(SEED)
    values = [rng.expovariate(1.0) for _ in range(num_values)]
    tensor = torch.tensor(values, dtype=torch.float64)

    for percent in (0, 5, 50, 95, 100):
        expected = tensor.quantile(percent / 100).item()
        assert compute_percentile(values, percent) == pytest.approx(expected)


def test_target_is_met_at_its_bound_and_never_by_what_is_no_number() -> None:
    assert TargetFigure("ratio", 2.0, "x", at_least(2)).is_met is True
    assert TargetFigure("ratio", 1.99, "x", at_least(2)).is_met is False
    assert TargetFigure("ratio", 3.0, "x", at_most(3)).is_met is True
    assert TargetFigure("ratio", 3.01, "x", at_most(3)).is_met is False
    assert TargetFigure("ratio", math.nan, "x", at_least(2)).is_met is False
    assert TargetFigure("ratio", math.nan, "x", at_most(2)).is_met is False


def test_lines_of_a_table_stand_below_each_other() -> None:
    figures = [
        Figure("steps through the swarm", 67.853, "steps/s"),
        TargetFigure("ratio", 2.2712, "x", at_least(2)),
        TargetFigure("memory", 0.5, "MiB", at_most(0.25)),
    ]

    lines = [figure.to_line() for figure in figures]

    assert [line[0] for line in lines] == [" ", "+", "-"]
    ends = [line.index(f" {figure.unit}") for line, figure in zip(lines, figures, strict=True)]
    assert len(set(ends)) == 1
    assert [line[:end].split()[-1] for line, end in zip(lines, ends, strict=True)] == [
        "67.85",
        "2.271",
        "0.5",
    ]
    assert lines[1].endswith("(target >= 2)")


def test_part_that_fails_is_reported_and_no_other(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> list[Figure]:
        raise UnavailableError("no peer\ncould be started")

    run = BenchRun("a machine", is_quick=False, as_json=False)
    run.measure("start", "Starting", fail)
    run.measure("hop", "A hop", lambda: [Figure("ratio", 2.5, "x")])
    shown = capsys.readouterr().out.splitlines()

    assert run.finish() == 1
    assert shown[0] == "a machine"
    assert shown[2].startswith("Starting  (start, ")
    assert shown[3] == "! not measured: no peer could be started"
    assert shown[6].split() == ["ratio", "2.5", "x"]
    assert capsys.readouterr().out.splitlines() == ["Nothing here has a target."]


def run_parts(is_quick: bool, as_json: bool) -> None:
    run = BenchRun("a machine", is_quick, as_json)
    run.measure("hop", "A hop", lambda: [Figure("step", 830.0, "µs")])
    run.measure(
        "flood",
        "A flood",
        lambda: [
            TargetFigure("ratio", 2.5, "x", at_most(2)),
            TargetFigure("speed", 3.0, "x", at_least(2)),
        ],
    )
    assert run.finish() == 0


def test_run_counts_targets_and_names_those_missed(capsys: pytest.CaptureFixture[str]) -> None:
    run_parts(is_quick=False, as_json=False)
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "1 of 2 targets are met.",
        "Missed in flood: ratio 2.5, target <= 2",
    ]

    run_parts(is_quick=False, as_json=True)
    result: Any = json.loads(capsys.readouterr().out)
    assert (result["num_targets"], result["num_missed"]) == (2, 1)
    assert result["parts"][1]["figures"][0] == {
        "name": "ratio", "value": 2.5, "unit": "x", "target": "<= 2", "is_met": False
    }  # fmt: skip


def test_quick_run_has_no_targets(capsys: pytest.CaptureFixture[str]) -> None:
    run_parts(is_quick=True, as_json=False)
    assert "mean nothing" in capsys.readouterr().out.splitlines()[-1]

    run_parts(is_quick=True, as_json=True)
    result: Any = json.loads(capsys.readouterr().out)
    assert (result["quick"], result["num_targets"]) == (True, 0)
    assert result["parts"][1]["figures"][0] == {"name": "ratio", "value": 2.5, "unit": "x"}
