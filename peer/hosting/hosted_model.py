"""The model of a peer, checked before anything of it is loaded, and how many of its blocks fit.

Blocks take memory while they are served, and time for each token. Not all are alike: some of a
model with experts have none, for example.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import numpy as np

from ...kernels.linear.quantize import WeightFormat
from ...models.checkpoints.checkpoint import Checkpoint
from ...models.spec_reader import read_spec
from ...models.specs.model_spec import ModelShape, ModelSpec, WrappedShape
from ...protocol.errors import UsageError
from ...protocol.ids import ModelId, make_model_id
from ...protocol.spans import Span
from ..engine.cache.kv_cache import check_kv_budget
from ..engine.devices.cuda_device import choose_device
from ..engine.devices.device import Numerics
from ..engine.loading.block_tensors import WEIGHT_BYTES, count_block_bytes
from ..engine.loading.loader import check_span, check_weights
from ..placement.supply import BlockRoom
from ..process.config import (
    ANNOUNCEMENT_BYTES,
    PeerConfig,
    choose_adapter_bytes,
    choose_pass_bytes,
)
from ..streams.stream_host import MAX_PENDING_BYTES, Limits

RESERVE_BYTES = 2**30
"""Memory that is left to everything else on the machine, and to torch itself."""

CGROUPS = Path("/sys/fs/cgroup")
"""Where control groups are mounted: memory limits of containers and services."""

OWN_CGROUPS = Path("/proc/self/cgroup")
"""The groups of this process: a line `number:controllers:path` for each hierarchy."""

_NO_LIMIT_BYTES = 2**62
"""Version 1 of control groups writes a number as large as it can where there is no limit. Each pass
asks for the memory that is free, and three files tell nothing then."""

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
    def of_model(cls, spec: ModelShape, weights: WeightFormat) -> BlockSizes:
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


@dataclass(frozen=True)
class HostedModel:
    """The model of a peer, checked against what the peer was told; nothing of it is loaded."""

    config: PeerConfig
    checkpoint: Checkpoint
    model_id: ModelId
    spec: ModelShape
    numerics: Numerics
    sizes: BlockSizes
    pass_bytes: int
    """Memory for passes."""
    adapter_bytes: int
    """Memory for adapters."""
    has_new_limits: bool = False
    """Whether limits were changed since the start of the peer."""

    @classmethod
    def open(cls, config: PeerConfig) -> HostedModel:
        """Read what the model is. Raises UsageError for what the peer cannot serve of it."""
        checkpoint = Checkpoint.open(config.model)
        spec = read_spec(checkpoint.config)
        if config.num_blocks is not None and config.num_blocks > spec.num_blocks:
            raise UsageError(
                f"--num-blocks {config.num_blocks} is more than the model has: {spec.num_blocks}"
            )
        span = config.span or Span(0, config.num_blocks or 1)
        numerics = Numerics(WeightFormat(config.weights), choose_device(config.device))
        check_span(spec, span)
        check_weights(spec, numerics)
        layouts = numerics.device.make_layouts(spec.num_kv_heads, spec.head_dim, numerics.dtype)
        check_kv_budget(config.kv_budget_bytes, span, layouts)
        model_id = make_model_id(checkpoint.config, checkpoint.revision)
        sizes = BlockSizes.of_model(spec, numerics.weights)
        free_bytes = _read_free_bytes(numerics)
        pass_bytes, adapter_bytes = config.pass_bytes, config.adapter_bytes
        if pass_bytes is None:
            pass_bytes = choose_pass_bytes(free_bytes)
        if adapter_bytes is None:
            adapter_bytes = choose_adapter_bytes(free_bytes)
        model = cls(config, checkpoint, model_id, spec, numerics, sizes, pass_bytes, adapter_bytes)
        model.check_fits(free_bytes)
        return model

    @property
    def message_bytes(self) -> int:
        """The memory of messages in transit, whatever is served."""
        return MAX_PENDING_BYTES

    @property
    def announcement_bytes(self) -> int:
        """The memory of what others announce, however many they are."""
        return ANNOUNCEMENT_BYTES

    @property
    def weight_bytes(self) -> int | None:
        """The memory of the weights to serve; None where the swarm decides how many."""
        sizes, span = self.sizes.num_bytes, self.config.span
        if span is not None:
            return sum(sizes[span.start : span.stop])
        return None if self.config.num_blocks is None else self.config.num_blocks * max(sizes)

    @property
    def limits(self) -> Limits:
        """How much the peer gives at present."""
        config = self.config
        return Limits(
            config.max_sessions, config.kv_budget_bytes, self.pass_bytes, self.adapter_bytes
        )

    def limit(self, limits: Limits, span: Span) -> HostedModel:
        """Return the model with other limits, under which `span` can be served.

        Raises UsageError for limits that no peer could be started with. Memory of a device is
        allocated while blocks are loaded.
        """
        device, spec = self.numerics.device, self.spec
        if device.read_free_bytes() is not None and limits.kv_bytes > self.limits.kv_bytes:
            raise UsageError(
                f"KV memory of {device.torch_device} can grow only at the start of the peer "
                "(--kv-memory)"
            )
        layouts = device.make_layouts(spec.num_kv_heads, spec.head_dim, self.numerics.dtype)
        check_kv_budget(limits.kv_bytes, span, layouts)
        config = replace(
            self.config,
            max_sessions=limits.max_sessions,
            kv_budget_bytes=limits.kv_bytes,
            pass_bytes=limits.pass_bytes,
            adapter_bytes=limits.adapter_bytes,
        )
        return replace(
            self,
            config=config,
            pass_bytes=limits.pass_bytes,
            adapter_bytes=limits.adapter_bytes,
            has_new_limits=True,
        )

    def check_fits(self, free_bytes: int) -> None:
        """Raise UsageError where more may be used than is free: the system would end the peer."""
        weight_bytes = (self.weight_bytes or min(self.sizes.num_bytes)) + self.sizes.loading_bytes
        parts = {"weights": weight_bytes, **self._list_other_uses()}
        if sum(parts.values()) > free_bytes:
            shares = ", ".join(f"{size / 2**20:,.0f} for {use}" for use, size in parts.items())
            raise UsageError(
                f"the peer may need {sum(parts.values()) / 2**20:,.0f} MiB of memory and "
                f"{free_bytes / 2**20:,.0f} are free: {shares}; lower one that has an option, or "
                "serve fewer blocks (--num-blocks)"
            )

    def _list_other_uses(self) -> dict[str, int]:
        """Return what else than weights takes memory where the blocks are computed, in bytes."""
        uses = {
            "KV caches (--kv-memory)": self.config.kv_budget_bytes,
            "training (--training-memory)": self.pass_bytes,
            "adapters (--adapter-memory)": self.adapter_bytes,
        }
        if self.numerics.device.read_free_bytes() is None:  # else they are not on the device
            if self.config.run_bytes:
                uses["a stage of the run (--train)"] = self.config.run_bytes
            uses["messages in transit (always)"] = self.message_bytes
            uses["announcements of others (always)"] = self.announcement_bytes
        return uses

    def read_free_bytes(self) -> int:
        """Return the memory that is left where the blocks are computed."""
        return _read_free_bytes(self.numerics)

    def find_room(self) -> BlockRoom:
        """Return the room for blocks: as many as were asked for, or as memory holds."""
        if self.config.num_blocks is not None:
            return BlockRoom(self.config.num_blocks)
        return find_room(self.sizes, sum(self._list_other_uses().values()), self.read_free_bytes())


def find_room(sizes: BlockSizes, other_bytes: int, free_bytes: int) -> BlockRoom:
    """Return what is left to blocks beside sessions and passes, while one more is being loaded."""
    left_bytes = free_bytes - other_bytes - RESERVE_BYTES - sizes.loading_bytes
    return BlockRoom(max(0, left_bytes), sizes.num_bytes)


def read_free_bytes() -> int:
    """Return the memory that this process may still take, as far as the system says."""
    return min([_read_available_bytes(), *_list_bytes_in_cgroups()])


def _list_bytes_in_cgroups() -> Iterator[int]:
    """Yield what each limit above this process leaves: of its control group and of those around it.

    Files are those of version 2, or of version 1 where that has the memory. Beyond `memory.high`
    (MemoryHigh of systemd) nobody is ended, but slowed down until nothing works.
    """
    lines: list[str] = []
    with contextlib.suppress(OSError):
        lines = OWN_CGROUPS.read_text().splitlines()
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            root, prefix = CGROUPS, ""
            limits, used = ("memory.max", "memory.high"), "memory.current"
        elif "memory" in controllers.split(","):
            root, prefix = CGROUPS / "memory", "total_"
            limits, used = ("memory.limit_in_bytes",), "memory.usage_in_bytes"
        else:
            continue
        # A container may see its own group as the root, whatever its path is outside.
        own = root / path.lstrip("/")
        groups = (own, *own.parents[: len(own.parents) - len(root.parents)])
        for group, limit in product(groups, limits):
            with contextlib.suppress(OSError, ValueError):  # no such group, or one without a limit
                limit_bytes = int((group / limit).read_text())
                if limit_bytes >= _NO_LIMIT_BYTES:
                    continue
                used_bytes = int((group / used).read_text())
                used_bytes -= _count_file_bytes(group / "memory.stat", prefix)
                yield max(0, limit_bytes - max(0, used_bytes))


def _count_file_bytes(statistics: Path, prefix: str) -> int:
    """Return the pages of files that were read: they are given up for whoever needs them."""
    fields = dict(line.split() for line in statistics.read_text().splitlines())
    return sum(int(fields.get(f"{prefix}{kind}_file", 0)) for kind in ("inactive", "active"))


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


def _read_free_bytes(numerics: Numerics) -> int:
    device_bytes = numerics.device.read_free_bytes()
    return read_free_bytes() if device_bytes is None else device_bytes
