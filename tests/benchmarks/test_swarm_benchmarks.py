"""`make bench`: its curve, its plot, and one quick run of everything."""

from __future__ import annotations

import json
import math
import mmap
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import warm_python

from measuring.benchmark_model import open_bundled_model
from measuring.helper_process import HelperProcess
from measuring.processes import read_process_bytes
from measuring.report import TargetFigure
from shoal.protocol.errors import UnavailableError
from swarm_benchmarks.__main__ import PARTS, read_options
from swarm_benchmarks.curve import CurvePoint, SessionsCurve, draw_curve

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"

CURVE = SessionsCurve(
    (
        CurvePoint(1, 60.0, 0.016, 0.02),
        CurvePoint(8, 210.0, 0.037, 0.05),
        CurvePoint(16, 300.0, 0.054, 0.07),
    ),
    {1: 30.0, 16: 200.0},
)


def test_curve_compares_one_eight_and_sixteen_sessions() -> None:
    figures = CURVE.to_figures()
    compared = [figure for figure in figures if isinstance(figure, TargetFigure)]

    assert [round(figure.value, 2) for figure in compared] == [2.0, 1.5, 2.5]
    assert all(figure.is_met for figure in compared)
    assert len({figure.name for figure in figures}) == len(figures)


def test_curve_leaves_out_what_was_not_measured() -> None:
    names = [figure.name for figure in SessionsCurve(CURVE.points[:1], {}).to_figures()]

    assert names == ["1 session, together", "1 session, median step", "1 session, 95th percentile"]


def test_plot_of_the_same_numbers_is_the_same_file(tmp_path: Path) -> None:

    drawn = [draw_curve(CURVE, "a machine", tmp_path / name) for name in ("one", "other")]

    (svg, png), again = drawn
    assert [svg.name, png.name] == ["sessions.svg", "sessions.png"]
    assert [file.read_bytes() for file in again] == [svg.read_bytes(), png.read_bytes()]
    assert png.read_bytes().startswith(b"\x89PNG")
    assert "<svg" in svg.read_text()
    assert "<dc:date>" not in svg.read_text()


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


def test_unknown_part_is_refused_with_the_names(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["make bench", "dance"])

    with pytest.raises(SystemExit) as exit_info:
        read_options()

    error = capsys.readouterr().err.splitlines()[-1]
    assert exit_info.value.code == 2
    assert "there is no part 'dance'" in error
    assert all(name in error for name in PARTS)


def test_plot_without_its_part_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["make bench", "hop", "--plot", str(tmp_path)])

    with pytest.raises(SystemExit) as exit_info:
        read_options()

    output = capsys.readouterr()
    assert exit_info.value.code == 2
    assert output.out == ""
    assert "--plot draws the part `sessions`" in output.err.splitlines()[-1]
    assert not list(tmp_path.iterdir())


def test_parts_are_measured_in_the_order_of_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["make bench", "hop", "single"])
    assert read_options().parts == ["single", "hop"]

    monkeypatch.setattr(sys, "argv", ["make bench"])
    assert read_options().parts == list(PARTS)


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
        ["single"],
        pytest.param(
            [name for name in PARTS if name not in ("start", "accuracy")],
            marks=pytest.mark.thorough,
            id="all",
        ),
    ],
    ids="-".join,
)
def test_quick_run_measures_every_part_that_needs_peers(names: list[str]) -> None:
    command = [sys.executable, "-P", "-m", "swarm_benchmarks", *names, "--quick", "--json"]
    environment = {**os.environ, "PYTHONPATH": str(BENCHMARKS)}

    process = warm_python.run(
        command,
        starts_peers=True,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )

    assert "Traceback" not in process.stderr
    result: Any = json.loads(process.stdout)
    assert {part["name"]: part["error"] for part in result["parts"]} == dict.fromkeys(names)
    assert result["quick"] is True
    assert process.returncode == 0
    for part in result["parts"]:
        assert part["figures"]
        assert all(math.isfinite(figure["value"]) for figure in part["figures"])
        assert all(figure.get("is_met") is None for figure in part["figures"])


@pytest.mark.network
@pytest.mark.slow
def test_traffic_of_an_idle_peer_and_client_is_counted() -> None:
    options = ["--peers", "20", "--warm-up", "0", "--seconds", "4"]
    process = warm_python.run(
        [sys.executable, "-P", "-m", "swarm_benchmarks.gossip", *options],
        starts_peers=True,
        env={**os.environ, "PYTHONPATH": str(BENCHMARKS)},
        capture_output=True,
        text=True,
        timeout=300,
    )

    assert process.stderr == ""
    _, *lines = process.stdout.splitlines()
    figures = dict(re.findall(r"20 peers: (\S.*?)  +([0-9.e-]+) ", "\n".join(lines)))
    assert {"peer, sent", "client, received", "client, both"} < figures.keys()
    # A peer that has come tells twelve others of it, and is told of all that it lacks.
    assert float(figures["peer, sent"]) > 1.0
    assert float(figures["peer, received"]) > 1.0
