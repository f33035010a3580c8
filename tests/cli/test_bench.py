"""`shoal bench`: its arithmetic, its report, its plot, and one quick run of everything."""

from __future__ import annotations

import json
import math
import mmap
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.cli.benchmarks.benchmark_model import open_bundled_model
from shoal.cli.benchmarks.curve import CurvePoint, SessionsCurve
from shoal.cli.benchmarks.figures import (
    Figure,
    at_least,
    at_most,
    compute_median,
    compute_percentile,
    round_to_digits,
)
from shoal.cli.benchmarks.helper_process import HelperProcess
from shoal.cli.benchmarks.memory import read_process_bytes
from shoal.cli.benchmarks.parts import PARTS
from shoal.cli.benchmarks.plot import draw_curve
from shoal.cli.benchmarks.report import BenchReport, Findings, PartReport, measure_part
from shoal.cli.main import main
from shoal.protocol.errors import UnavailableError

SEED = 5

CURVE = SessionsCurve(
    (
        CurvePoint(1, 60.0, 0.016, 0.02),
        CurvePoint(8, 210.0, 0.037, 0.05),
        CurvePoint(16, 300.0, 0.054, 0.07),
    ),
    {1: 30.0, 16: 200.0},
)


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


def test_curve_point_sums_up_its_steps() -> None:
    point = CurvePoint.of(2, [0.1, 0.2, 0.3, 0.4, 0.5], 1.0)

    assert point.steps_per_second == 5.0
    assert point.median_seconds == 0.3
    assert point.p95_seconds == pytest.approx(0.48)


def test_curve_compares_one_eight_and_sixteen_sessions() -> None:
    figures = CURVE.to_figures()
    compared = {figure.name: figure for figure in figures if figure.target is not None}

    assert [round(figure.value, 2) for figure in compared.values()] == [2.0, 1.5, 2.5]
    assert all(figure.is_met for figure in compared.values())
    assert len({figure.name for figure in figures}) == len(figures)


def test_curve_leaves_out_what_was_not_measured() -> None:
    names = [figure.name for figure in SessionsCurve(CURVE.points[:1], {}).to_figures()]

    assert names == ["1 session, together", "1 session, median step", "1 session, 95th percentile"]


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
    def fail() -> Findings:
        raise UnavailableError("no peer\ncould be started")

    failed = measure_part("hop", fail)
    measured = measure_part("sessions", lambda: Findings(CURVE.to_figures(), CURVE))

    assert failed.error == "no peer could be started"
    assert failed.figures == ()
    assert measured.error is None
    report = BenchReport("a machine", False, (failed, measured))
    assert report.has_errors
    assert report.curve is CURVE


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


def test_plot_of_the_same_numbers_is_the_same_file(tmp_path: Path) -> None:

    drawn = [draw_curve(CURVE, "a machine", tmp_path / name) for name in ("one", "other")]

    (svg, png), again = drawn
    assert [svg.name, png.name] == ["sessions.svg", "sessions.png"]
    assert [file.read_bytes() for file in again] == [svg.read_bytes(), png.read_bytes()]
    assert png.read_bytes().startswith(b"\x89PNG")
    assert "<svg" in svg.read_text()
    assert "<dc:date>" not in svg.read_text()


def test_plot_of_other_numbers_is_another_file(tmp_path: Path) -> None:
    slower = SessionsCurve((CurvePoint(1, 20.0, 0.05, 0.06), *CURVE.points[1:]), {})

    files = [draw_curve(curve, "", tmp_path / str(len(curve.reference_tokens_per_second)))
             for curve in (CURVE, slower)]  # fmt: skip

    assert files[0][0].read_bytes() != files[1][0].read_bytes()


def test_hidden_states_are_never_the_same() -> None:
    # Peers may share what two prompts have in common, and that is not what is measured.
    model = open_bundled_model()

    first, second = model.make_hidden(3), model.make_hidden(3)

    assert first.shape == (1, 3, model.hidden_size)
    assert not torch.equal(first, second)
    assert model.halves == [(0, 4), (4, 8)]


def test_memory_that_a_process_touches_is_counted() -> None:
    size = 2**26
    # Of its own: what malloc gives out may have been touched before.
    with mmap.mmap(-1, size) as held:
        before = read_process_bytes(os.getpid())
        for offset in range(0, size // 2, mmap.PAGESIZE):
            held[offset] = 1
        grown = read_process_bytes(os.getpid()) - before

    assert 0.9 * size / 2 < grown < 1.5 * size / 2


def test_unknown_part_is_refused_with_the_names(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["bench", "dance"])

    error = capsys.readouterr().err
    assert exit_info.value.code == 2
    assert error.count("\n") == 1
    assert "there is no part 'dance'" in error
    assert all(name in error for name in PARTS)


def test_plot_without_its_part_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["bench", "hop", "--plot", str(tmp_path)])

    output = capsys.readouterr()
    assert code == 1
    assert output.out == ""
    assert output.err.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["hop", "--model", "shoal-stories"], "parts and --plot are for swarms that bench starts"),
        (["--initial-peers", "/ip4/127.0.0.1/tcp/1/p2p/x"], "say what the swarm serves"),
        (["--model", "shoal-stories"], "say which swarm"),
    ],
)
def test_swarm_elsewhere_has_to_be_named_whole(
    arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["bench", *arguments])

    assert code == 1
    assert reason in capsys.readouterr().err


@pytest.mark.network
@pytest.mark.slow
def test_helper_process_that_ends_too_soon_is_unavailable() -> None:
    with (
        HelperProcess("no_such_helper") as helper,
        pytest.raises(UnavailableError, match="no_such"),
    ):
        helper.read()


# The other two parts, imports and accuracy, take longer than all of these.
@pytest.mark.network
@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    [
        ["single", "hop"],
        pytest.param(
            [name for name in PARTS if name not in ("start", "accuracy")],
            marks=pytest.mark.thorough,
            id="all",
        ),
    ],
    ids="-".join,
)
def test_quick_run_measures_every_part_that_needs_peers(names: list[str]) -> None:
    command = [sys.executable, "-P", "-m", "shoal.cli", "bench", *names, "--quick", "--json"]

    process = subprocess.run(command, capture_output=True, text=True, timeout=300)

    assert "Traceback" not in process.stderr
    result: Any = json.loads(process.stdout)
    assert {part["name"]: part["error"] for part in result["parts"]} == dict.fromkeys(names)
    assert result["quick"] is True
    assert process.returncode == 0
    for part in result["parts"]:
        assert part["figures"]
        assert all(math.isfinite(figure["value"]) for figure in part["figures"])
        assert all(figure["is_met"] is None for figure in part["figures"])
