"""Processes that compute side by side end with the one that started them."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

PARENT = """
import os, time
from functools import partial
from measuring.side_by_side import compute_side_by_side

jobs = {"begin": partial(os.write, 1, b"begun\\n"), "last": partial(time.sleep, 300)}
list(compute_side_by_side(jobs, 1))
"""


@pytest.mark.network
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_processes_of_a_pool_end_when_their_parent_is_killed(number: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-P", "-c", PARENT],
        env={**os.environ, "PYTHONPATH": str(BENCHMARKS)},
        stdout=subprocess.PIPE,
        process_group=0,
    ) as parent:
        try:
            assert parent.stdout is not None
            assert parent.stdout.readline() == b"begun\n"

            parent.send_signal(number)

            parent.communicate(timeout=30)  # the pipe ends when nobody holds it any more
        finally:
            with suppress(ProcessLookupError):
                os.killpg(parent.pid, signal.SIGKILL)
