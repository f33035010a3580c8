"""How much memory passes may take, and how much one needs, known before it begins."""

from dataclasses import dataclass

import torch

from ....kernels.linear.quantize import WeightFormat
from ....models.specs.model_spec import ModelShape, ModelSpec, WrappedShape

PIECE_BYTES = 2**25
"""For the scores of a piece of attention, and the buffers of products."""

_TRANSPOSED_ITEM_BYTES = {WeightFormat.INT8: 1, WeightFormat.BF16: 2}
"""Bytes of each weight in the copy that gradients are multiplied with."""


MOST_TENSOR_BYTES = 2**28
"""For one pass: 2,000 tokens of a model of width 8192 in float32, there and back."""


@dataclass(frozen=True)
class PassBudget:
    """The memory for all passes of a peer.

    >>> budget = PassBudget(2**32)
    >>> [size // 2**20 for size in (budget.tensor_bytes, budget.max_tensor_bytes)]
    [1024, 256]
    >>> [size // 2**20 for size in (budget.kept_bytes, budget.max_work_bytes)]
    [512, 1280]
    """

    num_bytes: int

    @property
    def tensor_bytes(self) -> int:
        """For the tensors of all passes that come in, wait, are computed or leave as answers."""
        return self.num_bytes // 4

    @property
    def max_tensor_bytes(self) -> int:
        """For the tensors of one pass, so that nobody waits alone for all others to end."""
        return min(self.tensor_bytes // 4, MOST_TENSOR_BYTES)

    @property
    def max_gradient_bytes(self) -> int:
        """For the gradients of the adapters of one pass, which no microbatch makes smaller.

        With them one client still has no more than its share of all tensors.
        """
        return self.max_tensor_bytes

    @property
    def kept_bytes(self) -> int:
        """Memory for the inputs of blocks of answered passes, until their backward pass."""
        return self.num_bytes // 8

    @property
    def work_bytes(self) -> int:
        """For what computing takes: a pass with its adapters, and passes that interrupt it."""
        return self.num_bytes - self.tensor_bytes - self.kept_bytes

    @property
    def max_work_bytes(self) -> int:
        """For what computing one pass takes without adapters: others may interrupt it."""
        return self.work_bytes // 2


def estimate_pass_bytes(
    spec: ModelShape,
    weights: WeightFormat,
    dtype: torch.dtype,
    num_blocks: int,
    num_rows: int,
    num_tokens: int,
    *,
    tokens_at_once: int,
    is_backward: bool,
) -> int:
    """Return about the most bytes that a pass through so many blocks holds at a time.

    Rather too many than too few. Counted in numbers of `dtype` for each token: those of all tokens,
    and those of the `tokens_at_once` that are computed together.
    """
    num_all = num_rows * num_tokens
    for_all = 4 * spec.hidden_size
    fixed_bytes = PIECE_BYTES
    if isinstance(spec, ModelSpec):
        fused = spec.query_size + 2 * spec.kv_size
        for_some = 4 * _count_inner(spec) + 6 * spec.hidden_size
        for_all += 2 * fused + 2 * spec.query_size
        at_once = num_all if spec.experts is not None else tokens_at_once
        # Queries, keys and values of a row, in several forms: rotating makes more of them.
        for_row = (8 if spec.rope_parameters is not None else 3) * fused
        if is_backward:
            for_all += 4 * fused + 2 * spec.query_size
            for_some *= 2
            fixed_bytes += _count_transposed_bytes(spec, weights)
    else:
        assert isinstance(spec, WrappedShape)
        # One row at a time; backward with everything that autograd keeps of a block.
        num_kept = 4 if is_backward else 1
        for_some, at_once, for_row = 0, 0, num_kept * _count_width(spec)
        num_scores = num_tokens * num_tokens * spec.num_heads
        fixed_bytes += 4 * (num_kept + 2) * num_scores
    if is_backward:
        for_all += (num_blocks + 2) * spec.hidden_size
    numbers = num_all * for_all + min(at_once, num_all) * for_some + num_tokens * for_row
    return numbers * dtype.itemsize + fixed_bytes


def _count_inner(spec: ModelSpec) -> int:
    """Return the inner features of all MLPs that compute one token."""
    if spec.experts is None:
        return spec.intermediate_size
    return max(spec.intermediate_size, spec.experts.num_chosen * spec.experts.intermediate_size)


def _count_transposed_bytes(spec: ModelSpec, weights: WeightFormat) -> int:
    """Return what the gradients of a block's linears hold; those of experts are dropped."""
    shapes = spec.tensor_shapes(spec.num_blocks - 1)
    num_numbers = sum(shape[0] * shape[1] for shape in shapes.values() if len(shape) == 2)
    return num_numbers * _TRANSPOSED_ITEM_BYTES.get(weights, 0)


def _count_width(spec: WrappedShape) -> int:
    """Return about how many numbers the linears of a block make of one token."""
    return 2 * max(spec.block_parameters) // spec.hidden_size + 10 * spec.hidden_size
