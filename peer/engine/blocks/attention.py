"""The attention of one block: over the KV caches of sessions, or among the tokens of a pass.

All tokens of a batch share the linears; attention runs step by step, or row by row of a pass.
Passes attend piece by piece, with pauses, and under autograd.

Tensor suffixes: N tokens of a batch, B rows and T tokens of one step or pass, H hidden, J query and
key heads together, G key-value heads, S tokens, D head size, X heads, O output features.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ....kernels.attention.torch_attention import attention
from ....kernels.linear.linear import Linear
from ....kernels.linear.quantize import Rows
from ....kernels.pauses import Pauses
from .attention_options import AttentionOptions, QueryKeyTransform
from .batch import BatchedStep, PassBatch, StepBatch, TokenRange, apply_linear, count_part_tokens

_LEAST_QUERIES = 32


class AttentionKernel(Protocol):
    """Attention of some of a batch's tokens, which is faster than torch's."""

    @property
    def name(self) -> str:
        """Its name, for people."""
        ...

    def __call__(self, fused_NO: Tensor, batch: StepBatch, attended_NO: Tensor) -> None:
        """Write its tokens of `attended_NO`, and their keys and values into their memory."""
        ...


AttentionKernels = tuple[AttentionKernel | None, AttentionKernel | None]
"""The kernels for generated tokens and for prompts; None where torch attends."""


class Attention:
    """Queries, keys and values of a block, attention over the cache, and the output linear."""

    def __init__(
        self,
        block: int,
        options: AttentionOptions,
        query_key_value: Linear,
        output: Linear,
        transform: QueryKeyTransform,
        kernels: AttentionKernels,
    ) -> None:
        self.options = options
        parts = (query_key_value, output, transform)
        self.num_bytes = sum(part.num_bytes for part in parts)
        self.linears = {"query_key_value": query_key_value, "output": output}
        self._block = block
        self._query_key_value = query_key_value
        self._output = output
        self._transform = transform
        self._attend_tokens, self._attend_prompts = kernels
        self.kernels = ["torch" if kernel is None else kernel.name for kernel in kernels]
        """The attention kernels for decode steps and for prompts, for people to read."""

    @property
    def is_cut_anywhere(self) -> bool:
        """Whether attention gives the same wherever a prompt is cut into parts."""
        return self._attend_prompts is not None

    @property
    def has_fixed_shapes(self) -> bool:
        """Whether the work for generated tokens is the same however long their rows are."""
        return self._attend_tokens is not None

    @property
    def first(self) -> Linear:
        """The linear for queries, keys and values."""
        return self._query_key_value

    def project(self, normed: Rows, ranges: Sequence[TokenRange]) -> Tensor:
        """Return queries, keys and values side by side."""
        return apply_linear(self._query_key_value, normed, ranges)

    def finish(
        self,
        attended_NO: Tensor,
        ranges: Sequence[TokenRange],
        hidden_NH: Tensor | None,
    ) -> Tensor:
        """Return the output, added to the hidden states if they are given."""
        return apply_linear(self._output, attended_NO, ranges, hidden_NH)

    def attend_without_cache(self, fused_NO: Tensor, batch: PassBatch) -> Tensor:
        """Attend among the tokens of a pass; autograd may differentiate it."""
        attended = [
            self._attend_row(row_TO, batch)
            for row_TO in fused_NO.view(batch.num_rows, batch.num_tokens, -1).unbind()
        ]
        return attended[0] if len(attended) == 1 else torch.cat(attended)

    def attend(self, fused_NO: Tensor, batch: StepBatch) -> Tensor:
        """Attend with all tokens, and write new keys and values into the sessions' memory.

        Generated tokens and prompts each go together, where there are kernels for them.
        """
        options, attend_tokens = self.options, self._attend_tokens
        if attend_tokens is None:
            attended = [self._attend(fused_NO, step) for step in batch.steps]
            return attended[0] if len(attended) == 1 else torch.cat(attended)
        attended_NO = fused_NO.new_empty(len(fused_NO), options.num_heads * options.head_dim)
        attend_tokens(fused_NO, batch, attended_NO)
        if self._attend_prompts is not None:
            self._attend_prompts(fused_NO, batch, attended_NO)
            return attended_NO
        for step in batch.prompts:
            attended_NO[step.start : step.stop] = self._attend(fused_NO, step)
        return attended_NO

    def _attend(self, fused_NO: Tensor, step: BatchedStep) -> Tensor:
        """Attention of one step's tokens [B*T, J*D + G*D] -> [B*T, queries]."""
        options = self.options
        num_rows, num_tokens = step.num_rows, step.num_tokens
        position = step.position
        fused_BTXD = fused_NO[step.start : step.stop].view(
            num_rows, num_tokens, -1, options.head_dim
        )
        # Queries and keys lie side by side, so one pass norms and rotates both.
        query_key_BTJD, values_BTGD = fused_BTXD.tensor_split([-options.num_kv_heads], dim=2)
        query_key_BJTD = self._transform(query_key_BTJD, step.rotations)
        queries_BHTD, keys_BGTD = query_key_BJTD.tensor_split([options.num_heads], dim=1)

        #   cache    0 .......... position ...... stop ....... capacity
        #            [ the prefix ][ this step    )[ not touched
        memory, stop = step.memory, position + num_tokens
        memory.write(self._block, position, keys_BGTD, values_BTGD.transpose(1, 2))
        attended_BTHD = fused_NO.new_empty(
            num_rows, num_tokens, options.num_heads, options.head_dim
        )
        group_size = options.num_heads // options.num_kv_heads
        for (rows, groups), keys_BGSD, values_BGSD in memory.read(self._block, stop):
            heads = slice(groups.start * group_size, groups.stop * group_size)
            attended = self._attend_heads(
                queries_BHTD[rows, heads], keys_BGSD, values_BGSD, heads, step
            )
            attended_BTHD[rows, :, heads] = attended.transpose(1, 2)
            del keys_BGSD, values_BGSD  # before the next ones are made
        return attended_BTHD.view(num_rows * num_tokens, -1)

    def _attend_heads(
        self,
        queries_BHTD: Tensor,
        keys_BGSD: Tensor,
        values_BGSD: Tensor,
        heads: slice,
        step: BatchedStep,
    ) -> Tensor:
        """Attention of some heads of a step, [B, H, T, D]."""
        options, position = self.options, step.position
        # How many queries attend together decides how torch rounds their sums. So it follows from
        # the step alone: parts of a prompt of one size however it was scheduled, and generated
        # tokens one by one, also in a replay, which then rebuilds the lost cache to the bit.
        stride = 1 if step.is_decoded else count_part_tokens(step.num_rows)
        attended = [
            attention(
                queries_BHTD[:, :, first:last],
                keys_BGSD[:, :, : position + last],
                values_BGSD[:, :, : position + last],
                position + first,
                scale=options.scale,
                sliding_window=options.sliding_window,
                softcap=options.softcap,
                alibi=None if options.alibi is None else options.alibi.select(heads),
            )
            for first in range(0, step.num_tokens, stride)
            for last in (min(first + stride, step.num_tokens),)
        ]
        return attended[0] if len(attended) == 1 else torch.cat(attended, dim=2)

    def _attend_row(self, fused_TO: Tensor, batch: PassBatch) -> Tensor:
        """Return what each token of a row takes from those before it, [T, H * D]."""
        options = self.options
        fused_1TXD = fused_TO.unflatten(-1, (-1, options.head_dim))[None]
        query_key_1TJD, values_1TGD = fused_1TXD.tensor_split([-options.num_kv_heads], dim=2)
        query_key_1JTD = self._transform(query_key_1TJD, batch.rotations)
        queries_1HTD, keys_1GTD = query_key_1JTD.tensor_split([options.num_heads], dim=1)
        values_1GTD = values_1TGD.transpose(1, 2)
        if options.alibi is not None:
            queries_1HTD, keys_1GTD, values_1GTD = options.alibi.append_to(
                queries_1HTD, keys_1GTD, values_1GTD, options.scale
            )
        keys, values = keys_1GTD.split(1, dim=1), values_1GTD.split(1, dim=1)
        group_size = options.num_heads // options.num_kv_heads
        num_heads, num_queries = _choose_piece(options, batch)
        attended = []
        for piece, piece_1HTD in enumerate(queries_1HTD.split(num_heads, dim=1)):
            group = piece * num_heads // group_size
            parts = [
                _attend_piece(part_1HTD, keys[group], values[group], start, options, batch.pauses)
                for start, part_1HTD in _cut_queries(piece_1HTD, num_queries)
            ]
            attended.append(parts[0] if len(parts) == 1 else torch.cat(parts, dim=2))
        attended_1HTD = attended[0] if len(attended) == 1 else torch.cat(attended, dim=1)
        return attended_1HTD[0, ..., : options.head_dim].transpose(0, 1).flatten(1)


def _choose_piece(options: AttentionOptions, batch: PassBatch) -> tuple[int, int]:
    """Return how many heads of a group, and queries, attend between two pauses."""
    # On the way back, which takes as long as two and a half times the way there.
    query_cost = 5 * batch.num_tokens * options.head_dim * options.dtype.itemsize
    most_queries = max(batch.pauses.max_cost // query_cost, _LEAST_QUERIES)
    group_size = options.num_heads // options.num_kv_heads
    most_heads = max(1, most_queries // batch.num_tokens)
    num_heads = max(n for n in range(1, group_size + 1) if group_size % n == 0 and n <= most_heads)
    return num_heads, min(most_queries, batch.num_tokens)


def _cut_queries(queries_1HTD: Tensor, num_queries: int) -> Iterator[tuple[int, Tensor]]:
    start = 0
    for part in queries_1HTD.split(num_queries, dim=2):
        yield start, part
        start += part.shape[2]


def _attend_piece(
    queries_1HTD: Tensor,
    keys_11SD: Tensor,
    values_11SD: Tensor,
    start: int,
    options: AttentionOptions,
    pauses: Pauses,
) -> Tensor:
    """Some queries of some heads of a group over the keys up to the last of them.

    The biases of ALiBi are in both.
    """
    stop = start + queries_1HTD.shape[2]
    compute = partial(
        attention,
        start_position=start,
        scale=options.scale,
        sliding_window=options.sliding_window,
        softcap=options.softcap,
    )
    inputs = _Pause.apply(queries_1HTD, pauses), keys_11SD[:, :, :stop], values_11SD[:, :, :stop]
    if not torch.is_grad_enabled() or _has_lean_gradient(options, start, stop):
        return compute(*inputs)
    # Otherwise autograd would keep the scores of all pieces.
    return cast(Tensor, checkpoint(compute, *inputs, use_reentrant=False, preserve_rng_state=False))


def _has_lean_gradient(options: AttentionOptions, start: int, stop: int) -> bool:
    """Whether torch's fused attention computes it, which keeps no scores for the gradient."""
    window = options.sliding_window
    return options.softcap is None and start == 0 and (window is None or window >= stop)


class _Pause(torch.autograd.Function):
    """Changes nothing; gives way now, and when a gradient comes back."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, pauses: Pauses) -> Tensor:
        ctx.pauses = pauses
        pauses.give_way()
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.pauses.give_way()
        return grads[0], None
