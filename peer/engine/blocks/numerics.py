"""In what the blocks of a span are computed."""

from dataclasses import dataclass

import torch

from ....kernels.linear.quantize import WeightFormat
from .device import CPU, Device

COMPUTE_DTYPES = {
    WeightFormat.FP32: torch.float32,
    WeightFormat.BF16: torch.bfloat16,
    WeightFormat.NF4: torch.bfloat16,
    # Precision is spent on the weights, where it buys speed. Exact activations let a replay
    # after a failure reproduce the same tokens.
    WeightFormat.INT8: torch.float32,
}
"""The dtype of activations and KV cache."""


@dataclass(frozen=True)
class Numerics:
    """How weights are held, and where they are multiplied with activations of which dtype."""

    weights: WeightFormat
    device: Device = CPU

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of activations."""
        return COMPUTE_DTYPES[self.weights]
