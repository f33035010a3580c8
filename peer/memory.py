"""How many blocks of a model fit into the memory that this machine has left."""

import contextlib
import os
from pathlib import Path

from ..kernels.quantize import WeightFormat
from .engine.loader import count_block_bytes
from .engine.spec import ModelShape, ModelSpec

_RESERVE_BYTES = 2**30
"""What is left to everything else on the machine, and to torch itself."""

_CGROUP = Path("/sys/fs/cgroup")
"""Where a container finds its limit; with control groups of version 2."""


def count_fitting_blocks(
    spec: ModelShape, weights: WeightFormat, kv_budget_bytes: int, free_bytes: int
) -> int:
    """Return how many blocks fit beside the KV cache, while one more is being loaded in float32.

    All of them for models of which only transformers knows how large their blocks are.
    """
    if not isinstance(spec, ModelSpec):
        return spec.num_blocks
    indexes = range(spec.num_blocks)
    block_bytes = max(count_block_bytes(spec, index, weights) for index in indexes)
    loading_bytes = max(count_block_bytes(spec, index, WeightFormat.FP32) for index in indexes)
    left_bytes = free_bytes - kv_budget_bytes - _RESERVE_BYTES - loading_bytes
    return max(0, min(spec.num_blocks, left_bytes // block_bytes))


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
