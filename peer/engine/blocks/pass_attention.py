"""Attention among the tokens of a pass: without a cache, piece by piece, and under autograd.

Tensor suffixes: N rows times tokens, B rows and T tokens of a row, O queries, keys and values side
by side, J query and key heads together, H query heads, G key-value heads, D head size.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ....kernels.attention.torch_attention import attention
from ....kernels.pauses import Pauses
from .attention_options import AttentionOptions, QueryKeyTurn
from .pass_rows import PassRows

_LEAST_QUERIES = 32


def attend_within_rows(
    fused_NO: Tensor, options: AttentionOptions, turn: QueryKeyTurn, rows: PassRows
) -> Tensor:
    """Return what each token takes from those before it in its row, [N, H * D]."""
    attended = [
        _attend_row(row_TO, options, turn, rows)
        for row_TO in fused_NO.view(rows.num_rows, rows.num_tokens, -1).unbind()
    ]
    return attended[0] if len(attended) == 1 else torch.cat(attended)


def _attend_row(
    fused_TO: Tensor, options: AttentionOptions, turn: QueryKeyTurn, rows: PassRows
) -> Tensor:
    fused_1TXD = fused_TO.unflatten(-1, (-1, options.head_dim))[None]
    query_key_1TJD, values_1TGD = fused_1TXD.tensor_split([-options.num_kv_heads], dim=2)
    query_key_1JTD = turn(query_key_1TJD, rows.rotations)
    queries_1HTD, keys_1GTD = query_key_1JTD.tensor_split([options.num_heads], dim=1)
    keys = keys_1GTD.split(1, dim=1)
    values = values_1TGD.transpose(1, 2).split(1, dim=1)
    group_size = options.num_heads // options.num_kv_heads
    num_heads, num_queries = _choose_piece(options, rows)
    attended = []
    for piece, piece_1HTD in enumerate(queries_1HTD.split(num_heads, dim=1)):
        first_head = piece * num_heads
        group = first_head // group_size
        heads = slice(first_head, first_head + num_heads)
        parts = [
            _attend_piece(part_1HTD, keys[group], values[group], start, heads, options, rows.pauses)
            for start, part_1HTD in _cut_queries(piece_1HTD, num_queries)
        ]
        attended.append(parts[0] if len(parts) == 1 else torch.cat(parts, dim=2))
    attended_1HTD = attended[0] if len(attended) == 1 else torch.cat(attended, dim=1)
    return attended_1HTD[0].transpose(0, 1).flatten(1)


def _choose_piece(options: AttentionOptions, rows: PassRows) -> tuple[int, int]:
    """Return how many heads of a group, and queries, attend between two pauses."""
    # On the way back, which takes as long as two and a half times the way there.
    query_cost = 5 * rows.num_tokens * options.head_dim * options.dtype.itemsize
    most_queries = max(rows.pauses.max_cost // query_cost, _LEAST_QUERIES)
    group_size = options.num_heads // options.num_kv_heads
    most_heads = max(1, most_queries // rows.num_tokens)
    num_heads = max(n for n in range(1, group_size + 1) if group_size % n == 0 and n <= most_heads)
    return num_heads, min(most_queries, rows.num_tokens)


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
    heads: slice,
    options: AttentionOptions,
    pauses: Pauses,
) -> Tensor:
    """Some queries of some heads of a group over the keys up to the last of them."""
    stop = start + queries_1HTD.shape[2]
    compute = partial(
        attention,
        start_position=start,
        scale=options.scale,
        sliding_window=options.sliding_window,
        softcap=options.softcap,
        alibi=None if options.alibi is None else options.alibi.select(heads),
    )
    inputs = _Pause.apply(queries_1HTD, pauses), keys_11SD[:, :, :stop], values_11SD[:, :, :stop]
    if not torch.is_grad_enabled() or _has_lean_gradient(options, start, stop):
        return compute(*inputs)
    # Otherwise autograd would keep the scores of all pieces.
    return cast(Tensor, checkpoint(compute, *inputs, use_reentrant=False, preserve_rng_state=False))


def _has_lean_gradient(options: AttentionOptions, start: int, stop: int) -> bool:
    """Whether torch's fused attention computes it, which keeps no scores for the gradient."""
    window = options.sliding_window
    is_plain = options.softcap is None and options.alibi is None
    return is_plain and start == 0 and (window is None or window >= stop)


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
