"""`shoal bench`: its arithmetic, its report, and what it refuses.

`test_swarm_commands.py` runs it; the other benchmarks are in `tests/benchmarks/`.
"""

from __future__ import annotations

import json
import math
import random
from typing import Any

import pytest
import torch

from shoal.cli.figures.bench_report import (
    BenchReport,
    BenchRun,
    Figure,
    PartReport,
    at_least,
    at_most,
    compute_median,
    compute_percentile,
    measure_part,
    round_to_digits,
)
from shoal.cli.main import main
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
    assert compute_median(values) == compute_percentile(values, 50)


@pytest.mark.parametrize(
    ("value", "rounded"),
    [(0.0, 0.0), (0.0012346, 0.001235), (-12.3456, -12.35), (123456.7, 123457.0)],
)
def test_figures_are_rounded_to_digits_that_count(value: float, rounded: float) -> None:
    assert round_to_digits(value, 4) == rounded


def test_target_is_met_at_its_bound_and_never_by_what_is_no_number() -> None:
    assert Figure("ratio", 2.0, "x", at_least(2)).is_met is True
    assert Figure("ratio", 1.99, "x", at_least(2)).is_met is False
    assert Figure("ratio", 3.0, "x", at_most(3)).is_met is True
    assert Figure("ratio", 3.01, "x", at_most(3)).is_met is False
    assert Figure("ratio", math.nan, "x", at_least(2)).is_met is False
    assert Figure("ratio", math.nan, "x", at_most(2)).is_met is False
    assert Figure("ratio", 1.0, "x").is_met is None


def test_lines_of_a_table_stand_below_each_other() -> None:
    figures = [
        Figure("steps through the swarm", 67.853, "steps/s"),
        Figure("ratio", 2.2712, "x", at_least(2)),
        Figure("memory", 0.5, "MiB", at_most(0.25)),
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


def make_report(is_quick: bool = False) -> BenchReport:
    parts = (
        PartReport("hop", "A hop", 1.26, (Figure("step", 830.0, "µs"),)),
        PartReport("flood", "A flood", 2.0, (Figure("ratio", 2.5, "x", at_most(2)),)),
        PartReport("start", "Starting", 3.0, error="no peer could be started"),
    )
    return BenchReport("a machine", is_quick, parts)


def test_report_counts_targets_and_names_those_missed() -> None:
    report = make_report()

    assert report.to_verdict().splitlines() == [
        "0 of 1 targets are met.",
        "Missed in flood: ratio 2.5, target <= 2",
    ]
    assert "! not measured: no peer could be started" in report.parts[2].to_text()
    assert report.has_errors


def test_part_that_fails_is_reported_and_no_other() -> None:
    def fail() -> list[Figure]:
        raise UnavailableError("no peer\ncould be started")

    figure = Figure("step", 1.0, "ms")

    failed = measure_part("hop", "A hop", fail)
    measured = measure_part("sessions", "Many sessions", lambda: [figure])

    assert failed.error == "no peer could be started"
    assert failed.figures == ()
    assert measured.error is None
    assert measured.figures == (figure,)
    assert BenchReport("a machine", False, (failed, measured)).has_errors
    assert not BenchReport("a machine", False, (measured,)).has_errors


def test_run_shows_parts_as_they_come_and_then_its_verdict(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = BenchRun("a machine", is_quick=False, as_json=False)
    run.measure("hop", "A hop", lambda: [Figure("ratio", 2.5, "x", at_most(2))])
    shown = capsys.readouterr().out

    assert run.finish() == 0
    assert shown.splitlines()[0] == "a machine"
    assert shown.splitlines()[2].startswith("A hop  (hop, ")
    assert capsys.readouterr().out.splitlines() == [
        "0 of 1 targets are met.",
        "Missed in hop: ratio 2.5, target <= 2",
    ]


def test_run_as_json_prints_one_object_and_a_quick_one_has_no_targets(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = BenchRun("a machine", is_quick=True, as_json=True)
    run.measure("hop", "A hop", lambda: [Figure("ratio", 2.5, "x", at_most(2))])

    assert run.finish() == 0
    result: Any = json.loads(capsys.readouterr().out)
    assert (result["quick"], result["num_targets"]) == (True, 0)


def test_report_as_json_has_everything() -> None:
    result: Any = json.loads(json.dumps(make_report().to_json()))

    assert result["machine"] == "a machine"
    assert (result["num_targets"], result["num_missed"]) == (1, 1)
    assert [part["error"] for part in result["parts"]] == [None, None, "no peer could be started"]
    assert result["parts"][1]["figures"] == [
        {"name": "ratio", "value": 2.5, "unit": "x", "target": "<= 2", "is_met": False}
    ]


def test_figures_without_targets_are_held_against_nothing() -> None:
    part = make_report().parts[1].without_targets()

    assert part.figures == (Figure("ratio", 2.5, "x"),)
    assert "mean nothing" in make_report(is_quick=True).to_verdict()


@pytest.mark.parametrize("parts", ["single", "sessions hop"])
def test_part_of_make_bench_is_refused_with_the_command_for_it(
    parts: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["bench", *parts.split(), "--json"])

    output = capsys.readouterr()
    assert code == 1
    assert list(json.loads(output.out)) == ["error", "kind"]
    assert output.err.count("\n") == 1
    assert f'`make bench PARTS="{parts}"` in a checkout' in output.err


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "say what the swarm serves"),
        (["hop", "--model", "shoal-stories"], "run `make bench"),
        (["--initial-peers", "/ip4/127.0.0.1/tcp/1/p2p/x"], "say what the swarm serves"),
        (["--model", "shoal-stories"], "no swarm is given"),
    ],
)
def test_swarm_elsewhere_has_to_be_named_whole(
    arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["bench", *arguments])

    assert code == 1
    assert reason in capsys.readouterr().err
