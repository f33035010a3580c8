"""What checkpoints with 4 and 8 bit weights share: packed words, and groups with scale and zero.

Tensor suffixes: I inputs, O outputs, G groups of inputs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels.linear.quantize import INT8_MAX, Int8Weight

_WORD_BITS = 32
_INPUTS_AT_ONCE = 1024
"""Bounds what is in memory beside a weight while it becomes float."""


def unpack(words: Tensor, bits: int, dim: int, order: Sequence[int] | None = None) -> Tensor:
    """Return the small unsigned integers that lie in 32-bit words along a dimension, as uint8.

    The first is in the lowest bits; with `order`, the one in the lowest bits is number `order[0]`
    of its word, and so on.

    >>> unpack(torch.tensor([0x04030201, 5]), bits=8, dim=0).tolist()
    [1, 2, 3, 4, 5, 0, 0, 0]
    """
    places = range(_WORD_BITS // bits)
    mask = (1 << bits) - 1
    parts = [(words >> (bits * place)).bitwise_and_(mask).to(torch.uint8) for place in places]
    if order is not None:
        parts = [parts[order.index(number)] for number in places]
    return torch.stack(parts, dim=dim + 1).flatten(dim, dim + 1)


def count_words(num_integers: int, bits: int) -> int:
    """Return how many 32-bit words hold so many integers.

    >>> count_words(9, bits=4)
    2
    """
    return -(-num_integers * bits // _WORD_BITS)


@dataclass(frozen=True)
class GroupedWeight:
    """A weight whose inputs are divided into groups: `(value - zero) * scale`.

    Each group has a zero and a scale for each output. Values and zeros are integers of at most
    8 bits, and `group_of_I` says which group an input belongs to.
    """

    values_IO: Tensor
    zeros_GO: Tensor
    scales_GO: Tensor
    group_of_I: Tensor

    def take_apart(self) -> Tensor | Int8Weight:
        """Return the matrix [out, in]: in int8 if that is the same to the bit, else in float32."""
        if len(self.scales_GO) == 1 and bool((self.scales_GO > 0).all()):
            values_IO = self.values_IO.to(torch.int16) - self.zeros_GO.to(torch.int16)
            if int(values_IO.amin()) >= -INT8_MAX - 1 and int(values_IO.amax()) <= INT8_MAX:
                values_OI = values_IO.t().to(torch.int8, memory_format=torch.contiguous_format)
                return Int8Weight(values_OI, self.scales_GO[0].to(torch.float32, copy=True))
        return self._dequantize()

    def _dequantize(self) -> Tensor:
        weight_IO = self.values_IO.to(torch.float32)
        zeros_GO, scales_GO = self.zeros_GO.float(), self.scales_GO.float()
        parts = zip(
            weight_IO.split(_INPUTS_AT_ONCE), self.group_of_I.split(_INPUTS_AT_ONCE), strict=True
        )
        for part_IO, group_of_I in parts:
            part_IO.sub_(zeros_GO[group_of_I]).mul_(scales_GO[group_of_I])
        return weight_IO.t()


def number_groups(num_inputs: int, group_size: int) -> Tensor:
    """Return the group of each input where groups follow each other.

    >>> number_groups(5, group_size=2).tolist()
    [0, 0, 1, 1, 2]
    """
    return torch.arange(num_inputs) // group_size
