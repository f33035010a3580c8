"""The model of a peer: opened and checked before anything of it is loaded."""

from __future__ import annotations

from dataclasses import dataclass

from ...kernels.linear.quantize import WeightFormat
from ...models.checkpoints.checkpoint import Checkpoint
from ...models.spec_reader import read_spec
from ...models.specs.model_spec import ModelShape
from ...protocol.ids import ModelId, make_model_id
from ...protocol.spans import Span
from ..engine.cache.kv_pool import check_kv_budget
from ..engine.devices.cuda_device import choose_device
from ..engine.devices.device import Numerics
from ..engine.loading.loader import check_span, check_weights
from ..placement.supply import Room
from ..runtime.config import PeerConfig, choose_adapter_bytes, choose_pass_bytes
from .capacity import BlockSizes, find_room, read_free_bytes


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

    @classmethod
    def open(cls, config: PeerConfig) -> HostedModel:
        """Read what the model is. Raises UsageError for what the peer cannot serve of it."""
        checkpoint = Checkpoint.open(config.model)
        spec = read_spec(checkpoint.config)
        span = config.span or Span(0, min(config.num_blocks or 1, spec.num_blocks))
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
        return cls(config, checkpoint, model_id, spec, numerics, sizes, pass_bytes, adapter_bytes)

    def read_free_bytes(self) -> int:
        """Return the memory that is left where the blocks are computed."""
        return _read_free_bytes(self.numerics)

    def find_room(self) -> Room:
        """Return the room for blocks: as many as were asked for, or as memory holds."""
        if self.config.num_blocks is not None:
            return Room(self.config.num_blocks)
        other_bytes = self.config.kv_budget_bytes + self.pass_bytes + self.adapter_bytes
        return find_room(self.sizes, other_bytes, self.read_free_bytes())


def _read_free_bytes(numerics: Numerics) -> int:
    device_bytes = numerics.device.read_free_bytes()
    return read_free_bytes() if device_bytes is None else device_bytes
