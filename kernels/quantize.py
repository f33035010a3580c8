"""Weights as small integers: one scale per output channel, symmetric, nothing learned."""

from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor


class WeightFormat(StrEnum):
    """How the weights of a linear layer are held in memory."""

    INT8 = "int8"
    BF16 = "bf16"
    FP32 = "fp32"


INT8_MAX = 127
"""Largest magnitude of a quantized value; -128 stays unused so that the range is symmetric."""


@dataclass(frozen=True)
class Int8Weight:
    """A quantized weight matrix: row `o` stands for `values_OI[o] * scales_O[o]`.

    `values_OI` is contiguous int8 `[out, in]`, `scales_O` float32 `[out]`, all scales above zero.
    """

    values_OI: Tensor
    scales_O: Tensor


def quantize_int8(weight_OI: Tensor) -> Int8Weight:
    """Return the weight with each row rounded to 255 steps of `absmax / 127`.

    Every element is off by at most half its row's scale. A row of zeros stays zero. Raises
    ValueError for a weight that is not a matrix or holds NaN or infinity.

    >>> quantized = quantize_int8(torch.tensor([[1.0, -2.0], [0.0, 0.0]]))
    >>> quantized.values_OI.tolist()
    [[64, -127], [0, 0]]
    """
    if weight_OI.dim() != 2 or weight_OI.numel() == 0:
        raise ValueError(f"a weight is a matrix [out, in], got shape {tuple(weight_OI.shape)}")
    weight_OI = weight_OI.detach()
    # Two passes without a copy; torch's one-pass forms along a dimension are far slower.
    absmax_O = torch.maximum(weight_OI.amax(dim=1), -weight_OI.amin(dim=1)).to(torch.float32)
    if not bool(absmax_O.isfinite().all()):
        raise ValueError("the weight holds NaN or infinity and cannot be quantized")
    # The floor keeps the division finite for rows of zeros or of subnormal numbers.
    scales_O = (absmax_O / INT8_MAX).clamp_min_(torch.finfo(torch.float32).tiny)
    # In place on the one float32 copy: loading a block peaks at that copy plus the result.
    scaled_OI = weight_OI.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    scaled_OI.div_(scales_O[:, None]).round_().clamp_(-INT8_MAX, INT8_MAX)
    return Int8Weight(scaled_OI.to(torch.int8), scales_O)


def dequantize_int8(weight: Int8Weight) -> Tensor:
    """Return the float32 matrix `[out, in]` that the quantized weight stands for."""
    return weight.values_OI.to(torch.float32) * weight.scales_O[:, None]
