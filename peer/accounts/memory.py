"""How many blocks of a model fit into the memory that this machine has left."""

import contextlib
import os
from pathlib import Path

from ..placement.room import Room
from .block_sizes import BlockSizes

RESERVE_BYTES = 2**30
"""What is left to everything else on the machine, and to torch itself."""

_CGROUP = Path("/sys/fs/cgroup")
"""Where a container finds its limit; with control groups of version 2."""


def find_room(sizes: BlockSizes, other_bytes: int, free_bytes: int) -> Room:
    """Return what is left to blocks beside sessions and passes, while one more is being loaded."""
    left_bytes = free_bytes - other_bytes - RESERVE_BYTES - sizes.loading_bytes
    return Room(max(0, left_bytes), sizes.num_bytes)


def read_free_bytes() -> int:
    """Return the memory that this process may still take, as far as the system says."""
    free_bytes = _read_available_bytes()
    with contextlib.suppress(OSError, ValueError):  # no container, or one without a limit
        limit_bytes = int((_CGROUP / "memory.max").read_text())
        used_bytes = int((_CGROUP / "memory.current").read_text())
        fields = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
        # Pages of files that were read, such as a checkpoint, are given up for whoever needs them.
        used_bytes -= int(fields.get("inactive_file", 0)) + int(fields.get("active_file", 0))
        free_bytes = min(free_bytes, max(0, limit_bytes - max(0, used_bytes)))
    return free_bytes


def _read_available_bytes() -> int:
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    # No Linux: half of what there is.
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
