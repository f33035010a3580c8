"""The demo's verdict, and the demo itself."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
import warm_python

from shoal.cli.commands.demo import DemoResult
from shoal.cli.options.bundled_model import find_model
from shoal.cli.remote_models.text_generation import Generation
from shoal.protocol.errors import ModelError


def make_result(one: list[int], other: list[int], failovers: tuple[Any, ...] = ()) -> DemoResult:
    texts = [Generation("", ids, 1.0, 0.1, (), failovers, False) for ids in (one, other)]
    return DemoResult(texts[0], texts[1], None, 0.0)


@pytest.mark.parametrize(
    ("one", "other", "index"),
    [
        ([1, 2, 3], [1, 2, 3], None),
        ([1, 2, 3], [1, 7, 3], 1),
        ([1, 2], [1, 2, 3], 2),
        ([1, 2, 3], [1, 2], 2),
        ([], [], None),
    ],
)
def test_demo_finds_the_first_different_token(
    one: list[int], other: list[int], index: int | None
) -> None:
    assert make_result(one, other).first_difference == index


def test_demo_without_a_failover_proves_nothing() -> None:
    assert not make_result([1, 2], [1, 2]).is_proof
    assert not make_result([1, 2], [1, 3], failovers=("one",)).is_proof
    assert make_result([1, 2], [1, 2], failovers=("one",)).is_proof


@pytest.mark.network
@pytest.mark.slow
def test_demo_survives_its_kill() -> None:
    try:
        find_model()
    except ModelError:
        pytest.skip("the bundled model is not here")
    command = [sys.executable, "-P", "-m", "shoal.cli", "demo", "--json"]

    process = warm_python.run(
        [*command, "--tokens", "18"],
        capture_output=True,
        text=True,
        timeout=240,
    )

    assert process.returncode == 0, process.stderr
    assert process.stderr == ""
    result = json.loads(process.stdout)
    assert result["identical"] is True
    assert result["tokens"] == 18
    assert result["killed"]["after_tokens"] == 9
    (failover,) = result["failovers"]
    assert failover["peer_id"] == result["killed"]["peer_id"]
    assert failover["span"] == result["killed"]["span"]
    assert failover["replaced_by"][0]["peer_id"] in {hop["peer_id"] for hop in result["route"]}
