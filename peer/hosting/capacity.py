"""How many blocks of a model fit into the memory that this machine has left.

Blocks take memory while they are served, and time for each token. Not all are alike: some of a
model with experts have none, for example.
"""

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...kernels.linear.quantize import WeightFormat
from ...models.specs.model_spec import ModelShape, ModelSpec, WrappedShape
from ..engine.loading.block_tensors import WEIGHT_BYTES, count_block_bytes
from ..placement.supply import Room

RESERVE_BYTES = 2**30
"""Memory that is left to everything else on the machine, and to torch itself."""

_CGROUP = Path("/sys/fs/cgroup")
"""The file with a container's memory limit under control groups version 2."""

_TABLES_AT_ONCE = 4
"""Beside the tables of a block that is loaded: a second one to compare with, and those by way of
which transformers computes a mask."""


@dataclass(frozen=True)
class BlockSizes:
    """One number for each block of a model."""

    num_bytes: tuple[int, ...]
    """Memory of its weights, and of tables beside them."""
    loading_bytes: int
    """Additional bytes that are needed while any one of them is loaded."""
    work: tuple[float, ...]
    """The weights that a token meets there, as a part of the mean of all blocks. Reading those is
    what one token costs. All peers find the same numbers, however they keep their weights."""

    @classmethod
    def of_model(cls, spec: ModelShape, weights: WeightFormat) -> "BlockSizes":
        """Return the sizes by what config.json says, which the loader holds the weights against."""
        indexes = range(spec.num_blocks)
        if isinstance(spec, ModelSpec):
            return cls(
                tuple(count_block_bytes(spec, index, weights) for index in indexes),
                max(count_block_bytes(spec, index, WeightFormat.FP32) for index in indexes),
                _divide_by_mean([_count_active_weights(spec, index) for index in indexes]),
            )
        assert isinstance(spec, WrappedShape)
        weight_bytes = [int(WEIGHT_BYTES[weights] * count) for count in spec.block_parameters]
        both = list(zip(weight_bytes, spec.block_table_bytes, strict=True))
        return cls(
            tuple(sum(parts) for parts in both),
            max(weight + _TABLES_AT_ONCE * table for weight, table in both),
            # Which weights a token meets is known to transformers alone.
            _divide_by_mean(spec.block_parameters),
        )


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


def _count_active_weights(spec: ModelSpec, index: int) -> int:
    """Return how many weights of a block one token is multiplied with."""
    num_chosen = spec.experts.num_chosen if spec.experts is not None else 1
    return sum(
        shape[0] * shape[1] * (num_chosen if "expert" in name else 1)
        for name, shape in spec.tensor_shapes(index).items()
        if len(shape) == 2
    )


def _divide_by_mean(amounts: list[int] | tuple[int, ...]) -> tuple[float, ...]:
    return tuple(float(part) for part in np.array(amounts) / np.mean(amounts))


def _read_available_bytes() -> int:
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    # No Linux: half of what there is.
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
