"""Processor time and memory of `shoal monitor` in a large swarm, with one page open.

The monitor is the command, as people run it: it probes every peer, and p2pd is counted with it. The
swarm is a process of its own on loopback.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from measuring.helper_process import HelperProcess
from measuring.processes import list_with_children, read_process_bytes, sum_cpu_seconds
from measuring.program import measure_one, run_program
from measuring.report import TargetFigure, at_most
from shoal.cli.benchmarking.figure import Figure
from shoal.protocol.errors import UnavailableError

_MOST_SECONDS_TO_END = 30


def measure(options: argparse.Namespace, say: Callable[[str], None]) -> list[Figure]:
    """Return what the monitor takes, of one core and of memory."""
    say("starting the swarm")
    sizes = str(options.peers), str(options.nodes)
    with HelperProcess(f"{__package__}.swarm", "127.0.0.1", *sizes) as swarm:
        addresses, _ = swarm.read()
        with _run_monitor(addresses) as (pid, page), _open_events(page) as events:
            say("settling")
            time.sleep(options.warm_up)
            pids = list_with_children(pid)
            started_at, before, num_before = time.perf_counter(), sum_cpu_seconds(pids), len(events)
            say("counting")
            time.sleep(options.seconds)
            cpu_seconds = sum_cpu_seconds(pids) - before
            fraction = cpu_seconds / (time.perf_counter() - started_at)
            own_bytes, *other_bytes = map(read_process_bytes, pids)
            num_updates = len(events) - num_before
            metrics = urllib.request.urlopen(f"{page}metrics", timeout=10).read().decode()
    online = re.search(r'shoal_model_peers{.*state="online"} (\S+)', metrics)
    both_bytes = own_bytes + sum(other_bytes)
    return [
        Figure("peers that have answered", float(online[1]) if online else 0, ""),
        Figure("updates of the page", num_updates, ""),
        TargetFigure("the monitor and its p2pd, of one core", 100 * fraction, "%", at_most(5)),
        Figure("memory of the monitor", own_bytes / 1e6, "MB"),
        TargetFigure("with its p2pd", both_bytes / 1e6, "MB", at_most(300)),
    ]


@contextmanager
def _run_monitor(addresses: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Run the command; yields its process id and the address of its page."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["--listen", "127.0.0.1:0", "--history", f"{folder}/history.sqlite"]
        words += ["--initial-peers", *addresses]
        with subprocess.Popen(
            [sys.executable, "-uPm", "shoal.cli", "monitor", *words],
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stdout is not None
            try:
                found = re.search(r"http://[\d.:]+/", process.stdout.readline())
                if found is None:
                    raise UnavailableError("the monitor ended before its page was there")
                yield process.pid, found[0]
            finally:
                process.terminate()
                try:
                    process.wait(_MOST_SECONDS_TO_END)
                except subprocess.TimeoutExpired:
                    process.kill()
                    raise UnavailableError(
                        f"the monitor did not end within {_MOST_SECONDS_TO_END} s of SIGTERM"
                    ) from None


@contextmanager
def _open_events(page: str) -> Iterator[list[int]]:
    """Hear of updates as an open page does; yields a list that grows by the bytes of each."""
    sizes = list[int]()
    stream = urllib.request.urlopen(f"{page}events", timeout=60)

    def hear() -> None:
        try:
            sizes.extend(len(line) for line in stream if line.startswith(b"data: {"))
        except (OSError, ValueError):  # it was closed
            return

    hearing = threading.Thread(target=hear, daemon=True)
    hearing.start()
    yield sizes  # the monitor ends next, and the stream with it


def main() -> int:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", type=int, default=300)
    parser.add_argument("--nodes", type=int, default=20, help="how many of them have a p2pd")
    parser.add_argument("--warm-up", type=float, default=90.0, help="seconds before counting")
    parser.add_argument("--seconds", type=float, default=120.0, help="how long to count")
    return measure_one("load", "A monitor of {peers} peers with one page open", parser, measure)


if __name__ == "__main__":
    run_program(main)
