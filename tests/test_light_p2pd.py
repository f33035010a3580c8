"""The p2pd of the tests is the one that hivemind brings, but for the length of a table."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import light_p2pd
import numpy as np
import pytest
import warm_python

pytestmark = [
    pytest.mark.network,
    pytest.mark.skipif(not light_p2pd.IS_POSSIBLE, reason="it is made on Linux on x86-64 only"),
]

TELL = "from hivemind.p2p import p2p_daemon; print(p2p_daemon.P2PD_FILENAME)"


@pytest.fixture(scope="module")
def shipped() -> Path:
    """The p2pd that hivemind brings; hivemind itself would take seconds to import."""
    spec = importlib.util.find_spec("hivemind")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0], "hivemind_cli", "p2pd")


@pytest.mark.slow
def test_warm_processes_start_the_light_one(shipped: Path) -> None:
    done = warm_python.run([sys.executable, "-P", "-c", TELL], capture_output=True)

    assert done.stdout.decode().strip() == light_p2pd.make(shipped).name != shipped.name


def test_light_one_differs_in_the_length_of_a_table(shipped: Path) -> None:
    unpacked, light = (
        np.frombuffer(program, np.uint8)
        for program in (light_p2pd.unpack(shipped), light_p2pd.make(shipped).read_bytes())
    )

    different = np.flatnonzero(unpacked != light)

    assert unpacked[different].tobytes() == (79_009).to_bytes(3, "little")
    assert light[different].tobytes() == bytes(3)


def test_other_program_is_left_alone(tmp_path: Path) -> None:
    program = tmp_path / "p2pd"
    program.write_bytes(Path(sys.executable).resolve().read_bytes())
    program.chmod(0o755)

    with pytest.raises(ValueError, match="p2pd"):
        light_p2pd.make(program)

    assert [*tmp_path.iterdir()] == [program]
