"""What Linux knows of processes that are not the test's own children."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from warm_python import forge


def children_of(parent: int) -> list[int]:
    """Return the living children of a process, from Linux's /proc/PID/stat.

    Without that which the tests fork others from.
    """
    children: list[int] = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent_text = file.read_text().rpartition(")")[2].split()[:2]
            pid = int(file.parent.name)
            if int(parent_text) == parent and state != "Z" and pid != forge.pid:
                children.append(pid)
    return children


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def kill_if_running(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def stop(pid: int) -> None:
    """Send SIGSTOP, and wait until all threads of the process stand still.

    The kernel ends stopped processes whose parent dies, but not those that are only about to stop.
    """
    os.kill(pid, signal.SIGSTOP)
    threads = list(Path(f"/proc/{pid}/task").glob("*/stat"))
    while any(file.read_text().rpartition(")")[2].split()[0] != "T" for file in threads):
        time.sleep(0.01)  # there is nothing to wait on: it may not be our child


def wait_until_dead(pids: Sequence[int], timeout_seconds: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_seconds
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < deadline, f"still alive: {pids}"
        time.sleep(0.05)  # there is nothing to wait on: they are not our children
