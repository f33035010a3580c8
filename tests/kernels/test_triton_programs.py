"""The programs in Triton are compiled for devices that are not here: the interpreter takes more.

Ampere and Hopper: 80 and 90 are their compute capabilities.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

SHARED_BYTES = 99 * 1024
"""What a block may have on Ampere's smaller cards, and on Ada's; on others it is more."""


EVERYTHING = [pytest.param([arch], marks=pytest.mark.thorough, id=arch) for arch in ("80", "90")]
ONCE = pytest.param(["90", "once"], id="90-once")


@pytest.fixture(scope="module", params=[ONCE, *EVERYTHING])
def programs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    """What the driver says of each program. In its own process, as this one interprets."""
    cache = tmp_path_factory.mktemp("triton")
    environment = {name: os.environ[name] for name in os.environ if name != "TRITON_INTERPRET"}
    driver = Path(__file__).with_name("triton_compile_driver.py")
    process = subprocess.run(
        [sys.executable, "-P", str(driver), *request.param],
        env={**environment, "TRITON_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    return [json.loads(line) for line in process.stdout.splitlines()]


@pytest.mark.slow
def test_every_program_compiles_and_fits(programs: list[dict[str, Any]]) -> None:
    names = {program["program"] for program in programs}

    assert names == {
        "_round_row", "_multiply_row", "_multiply_rows", "_norm_row", "_gate_row",
        "_write_head",
        "_attend_part", "_join_parts", "_attend_tile",
    }  # fmt: skip
    assert [program for program in programs if program["shared_bytes"] > SHARED_BYTES] == []


@pytest.mark.slow
def test_int8_rounds_as_the_rules_say(
    programs: list[dict[str, Any]], request: pytest.FixtureRequest
) -> None:
    is_once = request.node.callspec.id == "90-once"
    exact = [program for program in programs if "NUM_DIGITS" in program["constants"]]

    assert len(exact) == (6 if is_once else 20)
    for program in exact:
        rounding = [program[key] for key in ("fused", "approximate_divisions", "flushes")]
        assert rounding == [0, 0, 0], program


@pytest.mark.slow
def test_many_rows_and_attention_use_the_matrix_units(programs: list[dict[str, Any]]) -> None:
    tiles = ("_multiply_rows", "_attend_part", "_attend_tile")

    assert all(p["on_matrix_units"] for p in programs if p["program"] in tiles)
