"""`shoal bench`: its report, and what it refuses.

`test_swarm_commands.py` runs it; the other benchmarks are in `tests/benchmarks/`.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from shoal.cli.figures.bench_report import BenchRun, Figure, measure_part, round_to_digits
from shoal.cli.main import main
from shoal.protocol.errors import UnavailableError


@pytest.mark.parametrize(
    ("value", "rounded"),
    [(0.0, 0.0), (0.0012346, 0.001235), (-12.3456, -12.35), (123456.7, 123457.0)],
)
def test_figures_are_rounded_to_digits_that_count(value: float, rounded: float) -> None:
    assert round_to_digits(value, 4) == rounded


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
    assert "! not measured: no peer could be started" in failed.to_text()


def test_run_shows_the_part_as_it_comes_and_then_how_it_ended(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = BenchRun("a machine", is_quick=False, as_json=False)
    run.measure("hop", "A hop", lambda: [Figure("ratio", 2.5, "x")])
    shown = capsys.readouterr().out

    assert run.finish() == 0
    assert shown.splitlines()[0] == "a machine"
    assert shown.splitlines()[2].startswith("A hop  (hop, ")
    assert shown.splitlines()[3].split() == ["ratio", "2.5", "x"]
    assert capsys.readouterr().out.splitlines() == ["Nothing here has a target."]


def test_quick_run_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert BenchRun("a machine", is_quick=True, as_json=False).finish() == 0
    assert "mean nothing" in capsys.readouterr().out


def test_run_as_json_prints_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> list[Figure]:
        raise UnavailableError("no peer could be started")

    run = BenchRun("a machine", is_quick=True, as_json=True)
    run.measure("hop", "A hop", lambda: [Figure("ratio", 2.5, "x")])
    run.measure("start", "Starting", fail)

    assert run.finish() == 1
    result: Any = json.loads(capsys.readouterr().out)
    assert (result["machine"], result["quick"]) == ("a machine", True)
    assert (result["num_targets"], result["num_missed"]) == (0, 0)
    assert [part["error"] for part in result["parts"]] == [None, "no peer could be started"]
    assert result["parts"][0]["figures"] == [
        {"name": "ratio", "value": 2.5, "unit": "x", "target": None, "is_met": None}
    ]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "say what the swarm serves"),
        (["--initial-peers", "/ip4/127.0.0.1/tcp/1/p2p/x"], "say what the swarm serves"),
        (["--model", "shoal-stories"], "no swarm is given"),
    ],
)
def test_swarm_elsewhere_has_to_be_named_whole(
    arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["bench", *arguments])

    assert code == 2
    assert reason in capsys.readouterr().err
