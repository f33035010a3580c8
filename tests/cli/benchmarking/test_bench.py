"""`shoal bench`: its figures, and what it refuses.

`test_swarm_commands.py` runs it; the other benchmarks are in `tests/benchmarks/`.
"""

from __future__ import annotations

import pytest

from shoal.cli.benchmarking.figure import round_to_digits
from shoal.cli.main import main


@pytest.mark.parametrize(
    ("value", "rounded"),
    [(0.0, 0.0), (0.0012346, 0.001235), (-12.3456, -12.35), (123456.7, 123457.0)],
)
def test_figures_are_rounded_to_digits_that_count(value: float, rounded: float) -> None:
    assert round_to_digits(value, 4) == rounded


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
