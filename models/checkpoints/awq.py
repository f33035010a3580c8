"""AWQ checkpoints in the order of its gemm kernel: 4 bits, outputs of one input packed together.

    qweight  int32 [I, O / 8]
    qzeros   int32 [G, O / 8]
    scales   float [G, O]

In each word, the lowest bits hold output 0, then 2, 4, 6, 1, 3, 5 and 7.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from ...kernels.linear.quantize import Int8Weight
from .packed_integers import GroupedWeight, count_words, number_groups, unpack
from .quantized_checkpoint import FLOATS, QuantizedLinears, Settings, Tensors, load_part

_BITS = 4
_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


class AwqLinears(QuantizedLinears):
    """Linears of an AWQ checkpoint."""

    def __init__(self, config: Mapping[str, object]) -> None:
        settings = Settings(config, "AWQ")
        settings.choose("bits", "w_bit", among=(_BITS,))
        settings.choose(
            "version", "format", "checkpoint_format", among=("gemm", "GEMM"), default="gemm"
        )
        settings.choose("zero_point", among=(True,), default=True)
        self._group_size = settings.read_group_size()

    def stores(self, tensors: Tensors, stem: str) -> bool:
        """Return whether this linear is stored quantized."""
        return tensors.has(f"{stem}qweight")

    def load(self, tensors: Tensors, stem: str, shape: tuple[int, int]) -> Tensor | Int8Weight:
        """Return the matrix [out, in]."""
        num_outputs, num_inputs = shape
        group_size = self._group_size or num_inputs
        num_groups, num_words = -(-num_inputs // group_size), count_words(num_outputs, _BITS)
        integers = (torch.int32,)
        values = load_part(tensors, f"{stem}qweight", (num_inputs, num_words), integers)
        zeros = load_part(tensors, f"{stem}qzeros", (num_groups, num_words), integers)
        return GroupedWeight(
            unpack(values, _BITS, dim=1, order=_ORDER)[:, :num_outputs],
            unpack(zeros, _BITS, dim=1, order=_ORDER)[:, :num_outputs],
            load_part(tensors, f"{stem}scales", (num_groups, num_outputs), FLOATS),
            number_groups(num_inputs, group_size),
        ).take_apart()
