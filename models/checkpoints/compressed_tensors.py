"""Checkpoints of compressed-tensors (llm-compressor) with integer weights.

    int-quantized, naive-quantized
        weight             int8 [O, I]
    pack-quantized
        weight_packed      int32 [O, I / per word]   stored plus half the range, the first lowest
        weight_shape       int [2]
    both
        weight_scale       float [O, G], or [1] for the whole weight
        weight_zero_point  int8 like the scales; in pack-quantized int32 [O / per word, G]
        weight_g_idx       int32 [I]                 the group of each input, if they are mixed

What it says about rounding activations is left to the int8 kernels, which round each row anyway.
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

_PACKED = "pack-quantized"
_PLAIN = ("int-quantized", "naive-quantized")
_STRATEGIES = ("tensor", "channel", "group")


class CompressedLinears(QuantizedLinears):
    """Linears of a compressed-tensors checkpoint."""

    def __init__(self, config: Mapping[str, object]) -> None:
        settings = Settings(config, "compressed-tensors")
        layout = settings.choose("format", among=(*_PLAIN, _PACKED))
        sparsity = settings.read_object("sparsity_config")
        sparsity.choose("format", among=("dense",), default="dense")
        if settings.get("transform_config"):
            raise CheckpointError(
                "config.json: compressed-tensors with a transform_config is not supported; use "
                "another checkpoint of this model"
            )
        weights = _find_weights(settings)
        weights.choose("type", among=("int",), default="int")
        self._is_packed = layout == _PACKED
        self._bits = cast(
            int, weights.choose("num_bits", among=(4, 8) if self._is_packed else (8,))
        )
        self._strategy = weights.choose("strategy", among=_STRATEGIES)
        self._is_symmetric = weights.choose("symmetric", among=(True, False), default=True)
        self._group_size = weights.read_group_size()
        if self._strategy == "group" and self._group_size is None:
            raise CheckpointError("config.json: compressed-tensors with groups has no group_size")

    def stores(self, tensors: Tensors, stem: str) -> bool:
        """Return whether this linear is stored quantized."""
        return tensors.has(f"{stem}weight_packed" if self._is_packed else f"{stem}weight_scale")

    def load(self, tensors: Tensors, stem: str, shape: tuple[int, int]) -> Tensor | Int8Weight:
        """Return the matrix [out, in]."""
        num_outputs, num_inputs = shape
        group_size = num_inputs
        if self._strategy == "group" and self._group_size is not None:
            group_size = self._group_size
        num_groups = -(-num_inputs // group_size)
        # One scale for the whole weight counts as the same scale for each output.
        stored = (1,) if self._strategy == "tensor" else (num_outputs, num_groups)
        scales = load_part(tensors, f"{stem}weight_scale", stored, FLOATS)
        values_OI, zeros = self._load_integers(tensors, stem, shape, stored)
        if tensors.has(f"{stem}weight_g_idx"):
            group_of_I = load_groups(tensors, f"{stem}weight_g_idx", num_inputs, num_groups)
        else:
            group_of_I = number_groups(num_inputs, group_size)
        return GroupedWeight(
            values_OI.t(),
            zeros.expand(num_outputs, num_groups).t(),
            scales.expand(num_outputs, num_groups).t(),
            group_of_I,
        ).take_apart()

    def _load_integers(
        self, tensors: Tensors, stem: str, shape: tuple[int, int], scales: tuple[int, ...]
    ) -> tuple[Tensor, Tensor]:
        """Return values [O, I] and zeros in the shape of the scales."""
        bits, zero_name = self._bits, f"{stem}weight_zero_point"
        if not self._is_packed:
            zeros = torch.zeros(scales, dtype=torch.int8)
            if not self._is_symmetric:
                zeros = load_part(tensors, zero_name, scales, (torch.int8,))
            return load_part(tensors, f"{stem}weight", shape, (torch.int8,)), zeros

        stored = load_part(tensors, f"{stem}weight_shape", (2,), (torch.int32, torch.int64))
        if tuple(stored.tolist()) != shape:
            raise CheckpointError(
                f"tensor {stem}weight_packed stands for shape {tuple(stored.tolist())}, "
                f"config.json makes it {shape}"
            )
        words = (shape[0], count_words(shape[1], bits))
        packed = load_part(tensors, f"{stem}weight_packed", words, (torch.int32,))
        values = unpack(packed, bits, dim=1)[:, : shape[1]]
        if self._is_symmetric:
            return values, torch.full(scales, 1 << (bits - 1), dtype=torch.uint8)
        if self._strategy == "tensor":
            raise CheckpointError(
                f"tensor {zero_name}: one packed zero for a whole weight is not supported"
            )
        words = (count_words(shape[0], bits), scales[1])
        packed = load_part(tensors, zero_name, words, (torch.int32,))
        return values, unpack(packed, bits, dim=0)[: shape[0]]


def _find_weights(settings: Settings) -> Settings:
    """Return the settings of the quantized weights, which must be the same for all linears."""
    groups = as_mapping(settings.get("config_groups", default={}), "config_groups")
    found = [as_mapping(group, "config_groups").get("weights") for group in groups.values()]
    if not found or any(weights != found[0] for weights in found):
        raise CheckpointError(
            f"config.json: compressed-tensors with {len(found)} different config_groups is not "
            "supported; use a checkpoint with one"
        )
    return Settings(as_mapping(found[0], "weights"), "compressed-tensors")
