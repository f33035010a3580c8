"""What the blocks of a model take: memory while they are served, and time for each token.

Not all blocks are alike. Some of a model with experts have none, for example.
"""

from dataclasses import dataclass

import numpy as np

from ...kernels.linear.quantize import WeightFormat
from ...models.specs.model_spec import ModelShape, ModelSpec, WrappedShape
from ..engine.loading.block_tensors import WEIGHT_BYTES, count_block_bytes

_TABLES_AT_ONCE = 4
"""Beside the tables of a block that is loaded: a second one to compare with, and those by way of
which transformers computes a mask."""


@dataclass(frozen=True)
class BlockSizes:
    """One number for each block of a model."""

    num_bytes: tuple[int, ...]
    """Memory of its weights, and of tables beside them."""
    loading_bytes: int
    """What is needed besides while any one of them is loaded."""
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
