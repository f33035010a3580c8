"""Weights in four bits: blocks of 64 of them share a scale (Dettmers and others, 2023,
arXiv:2305.14314). By bitsandbytes, whose products are made for CUDA devices.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

BLOCK_SIZE = 64
"""Weights that share a scale."""

BYTES_PER_WEIGHT = 0.5 + 4 / BLOCK_SIZE


class Nf4Weight:
    """A matrix [out, in] in four bits, on the device of the weight that it is made of.

    Raises ValueError without bitsandbytes, and for a weight that holds NaN or infinity.
    """

    def __init__(self, weight_OI: Tensor) -> None:
        if not has_bitsandbytes():
            raise ValueError("nf4 weights need bitsandbytes: pip install 'shoal[cuda]'")
        if not bool(weight_OI.isfinite().all()):
            raise ValueError("the weight holds NaN or infinity and cannot be quantized")
        # It takes half a second to import, and has no types.
        self._library: Any = import_module("bitsandbytes")
        self._packed_X, self._state = self._library.functional.quantize_4bit(
            weight_OI.to(torch.float32).contiguous(), blocksize=BLOCK_SIZE, quant_type="nf4"
        )

    @property
    def num_bytes(self) -> int:
        """Memory held."""
        return int(self._packed_X.nbytes + self._state.absmax.nbytes)

    def multiply(self, rows_NI: Tensor, bias_O: Tensor | None) -> Tensor:
        """Return `rows @ weight.T + bias` in the dtype of the rows, from the four bits."""
        product: Tensor = self._library.matmul_4bit(
            rows_NI.contiguous(), self._packed_X, self._state, bias=bias_O
        )
        return product

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Return the weight that this stands for, [out, in]."""
        weight_OI: Tensor = self._library.functional.dequantize_4bit(self._packed_X, self._state)
        return weight_OI.to(dtype)


def has_bitsandbytes() -> bool:
    """Return whether there can be weights in nf4."""
    return find_spec("bitsandbytes") is not None
