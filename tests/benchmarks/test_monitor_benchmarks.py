"""The benchmarks of the monitor run, with few peers."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest
import warm_python

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

pytestmark = [pytest.mark.network, pytest.mark.slow, pytest.mark.thorough]


def run_benchmark(name: str, options: str) -> str:
    """Return what a benchmark prints."""
    process = warm_python.run(
        [sys.executable, "-P", "-m", f"monitor_benchmarks.{name}", *options.split()],
        starts_peers=True,
        env={**os.environ, "PYTHONPATH": str(BENCHMARKS)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


@pytest.mark.skipif(os.getuid() != 0 or shutil.which("ip") is None, reason="needs namespaces")
def test_traffic_of_a_monitor_is_counted() -> None:
    printed = run_benchmark("traffic", "--peers 20 --nodes 3 --warm-up 10 --seconds 10")

    assert "peers on the page                                          20 " in printed
    assert "both, of what is announced" in printed


def test_load_of_a_monitor_is_counted() -> None:
    printed = run_benchmark("load", "--peers 20 --nodes 3 --warm-up 10 --seconds 5")

    assert "peers that have answered                                   20 " in printed
    assert "+ with its p2pd" in printed


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
def test_updates_of_the_page_are_traced() -> None:
    printed = run_benchmark("page", "--peers 20 --loads 1 --seconds 12")

    assert "+ page can be used" in printed
    assert "one update, longest" in printed
