"""GPTQ checkpoints: 4 or 8 bits, groups of inputs in any order.

    qweight  int32 [I / per word, O]   inputs of one output lie together, the first lowest
    qzeros   int32 [G, O / per word]   outputs of one group lie together, the first lowest
    scales   float [G, O]
    g_idx    int32 [I]                 the group of each input; without it they follow each other

In the first version of the format, every word of `qzeros` was stored less one for each number in
it. The subtraction may have borrowed from one number for another, so the addition must carry.
"""

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor

from ...kernels.linear.quantize import Int8Weight
from .checkpoint import CheckpointError
from .packed_integers import GroupedWeight, count_words, number_groups, unpack
from .quantized_checkpoint import (
    FLOATS,
    QuantizedLinears,
    Settings,
    Tensors,
    as_mapping,
    load_groups,
    load_part,
)

_ONES = {4: 0x11111111, 8: 0x01010101}
"""A one for each number in a word."""


class GptqLinears(QuantizedLinears):
    """Linears of a GPTQ checkpoint."""

    def __init__(self, config: Mapping[str, object]) -> None:
        settings = Settings(config, "GPTQ")
        self._bits = cast(int, settings.choose("bits", among=(4, 8)))
        self._group_size = settings.read_group_size()
        known = ("gptq", "gptq_v2")
        version = settings.choose("checkpoint_format", "format", among=known, default="gptq")
        self._is_first_version = version == "gptq"
        settings.choose("pack_dtype", among=("int32",), default="int32")
        exceptions = as_mapping(settings.get("dynamic", default={}), "dynamic")
        # Names with "-:" are of linears that were left alone; those are stored as usual.
        if not all(name.startswith("-:") for name in exceptions):
            raise CheckpointError(
                "config.json: GPTQ with other settings for some linears (dynamic) is not "
                "supported; use another checkpoint of this model"
            )

    def stores(self, tensors: Tensors, stem: str) -> bool:
        """Return whether this linear is stored quantized."""
        return tensors.has(f"{stem}qweight")

    def load(self, tensors: Tensors, stem: str, shape: tuple[int, int]) -> Tensor | Int8Weight:
        """Return the matrix [out, in]."""
        num_outputs, num_inputs = shape
        group_size = self._group_size or num_inputs
        num_groups = -(-num_inputs // group_size)
        words = (count_words(num_inputs, self._bits), num_outputs)
        values = load_part(tensors, f"{stem}qweight", words, (torch.int32,))
        words = (num_groups, count_words(num_outputs, self._bits))
        zeros = load_part(tensors, f"{stem}qzeros", words, (torch.int32,))
        if self._is_first_version:
            zeros = zeros + _ONES[self._bits]
        if tensors.has(f"{stem}g_idx"):
            group_of_I = load_groups(tensors, f"{stem}g_idx", num_inputs, num_groups)
        else:
            group_of_I = number_groups(num_inputs, group_size)
        return GroupedWeight(
            unpack(values, self._bits, dim=0)[:num_inputs],
            unpack(zeros, self._bits, dim=1)[:, :num_outputs],
            load_part(tensors, f"{stem}scales", (num_groups, num_outputs), FLOATS),
            group_of_I,
        ).take_apart()
