"""What processes cost, as the operating system counts it."""

import os
from collections.abc import Iterable
from pathlib import Path


def list_with_children(pid: int) -> list[int]:
    """Return a process and those that it has started."""
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [pid, *(int(child) for task in tasks for child in task.read_text().split())]


def sum_cpu_seconds(pids: Iterable[int]) -> float:
    """Return the processor time of processes since their starts."""
    stats = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    ticks = sum(int(words[11]) + int(words[12]) for words in stats)
    return ticks / os.sysconf("SC_CLK_TCK")


def read_thread_seconds(pid: int) -> tuple[float, float]:
    """Return the processor time of a process's main thread, and of all its living threads."""
    times = {
        int(task.name): int((task / "schedstat").read_text().split()[0]) / 1e9
        for task in Path(f"/proc/{pid}/task").iterdir()
    }
    return times[pid], sum(times.values())


def read_process_bytes(pid: int) -> int:
    """Return the memory that a process holds, without files that are mapped."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    words = [line.split() for line in lines]
    return sum(1024 * int(word[1]) for word in words if word[0] in ("RssAnon:", "RssShmem:"))
