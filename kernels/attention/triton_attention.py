"""Attention over KV caches in pages, in Triton, for CUDA devices: of generated tokens, of prompts.

Each row has a table of pages, so that the caches of many sessions lie in one memory, in any order.
Sums are float32; they are taken in another order than on the CPU.

- A generated token is alone in its row. Its keys are cut into parts of `PART_TOKENS` at fixed
  positions, which are attended to at the same time, and joined in their order. The shapes of all
  tensors say how much is launched, never their contents: a launch can be captured in a graph and
  replayed when the lengths have grown.
- Tokens of a prompt are taken by tiles of one row and head, which go through the keys in blocks at
  fixed positions.

So a token's result has the same bits alone and in any company, and wherever a prompt is cut.

Imports Triton, so nothing but `select.py` imports this file, and only for tensors on such a device.

Tensor suffixes: N tokens, X rows of prompts, M pages of a table, P pages, C keys and values,
G key-value heads, S tokens of a page, W elements of a token in one head, H query heads, D head
size, R query heads of a key-value head, B parts, T tokens of a tile, K keys read at once.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .int8_kv import SCALE_BYTES, count_record_bytes

MAX_HEAD_DIM = 256
"""Above, a tile of keys no longer fits into what a multiprocessor has at hand."""

PART_TOKENS = 256

_HEADS_AT_ONCE = 16
"""Matrix units take no fewer rows; where a group has fewer heads, zeros fill them up."""

_FEWEST_COLUMNS = 16
_PARTS_AT_ONCE = 16

_PROMPT_TILES = {
    64: {"BLOCK_T": 64, "BLOCK_K": 64, "num_warps": 4, "num_stages": 2},
    128: {"BLOCK_T": 32, "BLOCK_K": 32, "num_warps": 4, "num_stages": 2},
    MAX_HEAD_DIM: {"BLOCK_T": 16, "BLOCK_K": 16, "num_warps": 4, "num_stages": 2},
}
"""By the width of heads; wider ones leave fewer registers to a token. The fastest of those tried on
an H100, over prompts of 512 to 8,192 tokens and short ones far into a text."""

_SCALE_BYTES = tl.constexpr(SCALE_BYTES)


def paged_attention(
    queries_NHD: Tensor,
    pages_PCGSW: Tensor,
    tables_NM: Tensor,
    lengths_N: Tensor,
    *,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Return `softmax(scale * q k) v` as NHD, in the dtype of the queries.

    Token `n` sees the first `lengths_N[n]` keys of its table, its own among them, with a window
    only the last `sliding_window`; a token that sees none, as in an idle row of a captured graph,
    gets zeros. `tables_NM` and `lengths_N` are int32 and trusted: nobody notices a page that is
    not there. Pages are floats or int8 records of `int8_kv`, the first of W.
    Raises ValueError for shapes and options that contradict each other.
    """
    is_int8 = pages_PCGSW.dtype is torch.int8
    _check(queries_NHD, pages_PCGSW, tables_NM, lengths_N, sliding_window)
    num_tokens, num_heads, head_dim = queries_NHD.shape
    if len(tables_NM) != num_tokens or lengths_N.shape != (num_tokens,):
        raise ValueError(f"{num_tokens} tokens need as many tables and lengths")
    num_groups, page_tokens = pages_PCGSW.shape[2:4]
    heads_per_group = num_heads // num_groups
    num_tiles = -(-heads_per_group // _HEADS_AT_ONCE)
    num_parts = -(-tables_NM.shape[1] * page_tokens // PART_TOKENS)
    if num_tokens == 0 or num_parts == 0:
        return torch.zeros_like(queries_NHD)
    result_NHD = queries_NHD.new_empty(queries_NHD.shape, dtype=torch.float32)
    largest_NHB = result_NHD.new_empty(num_tokens, num_heads, num_parts)
    totals_NHB = torch.empty_like(largest_NHB)
    sums_NHBD = result_NHD.new_empty(*largest_NHB.shape, head_dim)
    # No window is one that holds everything.
    window = 2**31 - 1 if sliding_window is None else sliding_window
    width = max(_FEWEST_COLUMNS, 1 << (head_dim - 1).bit_length())
    _launch(
        _attend_part, (num_tokens, num_groups * num_tiles, num_parts),
        queries_NHD.contiguous(), pages_PCGSW, pages_PCGSW.view(torch.float32) if is_int8 else None,
        tables_NM, lengths_N, largest_NHB, totals_NHB, sums_NHBD,
        tables_NM.shape[1], num_parts, window, scale, softcap,
        HEADS=heads_per_group, TILES=num_tiles, GROUPS=num_groups, HEAD_DIM=head_dim,
        PAGE_TOKENS=page_tokens, PAGE_WIDTH=pages_PCGSW.shape[4], PART_TOKENS=PART_TOKENS,
        BLOCK_R=_HEADS_AT_ONCE, BLOCK_K=_choose_keys_at_once(width), BLOCK_D=width,
    )  # fmt: skip
    _launch(
        _join_parts, (num_tokens, num_heads),
        lengths_N, largest_NHB, totals_NHB, sums_NHBD, result_NHD, num_parts, window,
        HEADS=num_heads, HEAD_DIM=head_dim, PART_TOKENS=PART_TOKENS,
        BLOCK_B=_PARTS_AT_ONCE, BLOCK_D=width,
    )  # fmt: skip
    # By torch, since Triton's interpreter cuts off where a device rounds.
    return result_NHD.to(queries_NHD.dtype)


def paged_prompt_attention(
    queries_NHD: Tensor,
    pages_PCGSW: Tensor,
    tables_XM: Tensor,
    rows_X3: Tensor,
    most_tokens: int,
    *,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Return `softmax(scale * q k) v` as NHD in float32, of tokens that lie row by row.

    A row is the index of its first token, the number of its tokens, `most_tokens` at most, and the
    position of the first: each sees the keys of its table up to its own, with a window only the
    last `sliding_window` of them. Tokens of no row get nothing. The rest is as for
    `paged_attention`.
    """
    is_int8 = pages_PCGSW.dtype is torch.int8
    _check(queries_NHD, pages_PCGSW, tables_XM, rows_X3, sliding_window)
    if rows_X3.shape != (len(tables_XM), 3):
        raise ValueError(f"{len(tables_XM)} tables need as many rows of three numbers")
    num_heads, head_dim = queries_NHD.shape[1:]
    num_groups, page_tokens = pages_PCGSW.shape[2:4]
    result_NHD = torch.empty(queries_NHD.shape, dtype=torch.float32, device=queries_NHD.device)
    if len(rows_X3) == 0 or most_tokens == 0:
        return result_NHD
    if queries_NHD.stride()[1:] != (head_dim, 1):
        queries_NHD = queries_NHD.contiguous()
    window = 2**31 - 1 if sliding_window is None else sliding_window
    width = max(_FEWEST_COLUMNS, 1 << (head_dim - 1).bit_length())
    tile = _choose_tile(width)
    _launch(
        _attend_tile, (num_heads, -(-most_tokens // tile["BLOCK_T"]), len(rows_X3)),
        queries_NHD, pages_PCGSW, pages_PCGSW.view(torch.float32) if is_int8 else None,
        tables_XM, rows_X3, result_NHD,
        queries_NHD.stride(0), tables_XM.shape[1], window, scale, softcap,
        HEADS=num_heads // num_groups, GROUPS=num_groups, HEAD_DIM=head_dim,
        PAGE_TOKENS=page_tokens, PAGE_WIDTH=pages_PCGSW.shape[4], BLOCK_D=width, **tile,
    )  # fmt: skip
    return result_NHD


def _check(
    queries_NHD: Tensor,
    pages_PCGSW: Tensor,
    tables: Tensor,
    rows: Tensor,
    sliding_window: int | None,
) -> None:
    """Addresses are all that a program gets to see."""
    _, num_heads, head_dim = queries_NHD.shape
    _, num_kinds, num_groups, _, width = pages_PCGSW.shape
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"heads have at most {MAX_HEAD_DIM} numbers, not {head_dim}")
    is_int8 = pages_PCGSW.dtype is torch.int8
    fits = width >= head_dim
    if is_int8:  # their scales are read as floats
        fits = width >= count_record_bytes(head_dim) and width % 4 == 0
    if not fits or num_kinds != 2 or num_heads % num_groups:
        raise ValueError(
            f"queries {tuple(queries_NHD.shape)} do not fit pages {tuple(pages_PCGSW.shape)}"
        )
    if not tables.dtype is rows.dtype is torch.int32:
        raise ValueError("tables, lengths and rows are int32")
    if not all(tensor.is_contiguous() for tensor in (pages_PCGSW, tables, rows)):
        raise ValueError("pages, tables, lengths and rows must be contiguous")
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"a sliding window holds at least one position, got {sliding_window}")


def _choose_keys_at_once(width: int) -> int:
    # So many that the tiles of wide heads stay in registers.
    return 32 if width <= 128 else 16


def _choose_tile(width: int) -> dict[str, int]:
    """Return how tiles of prompts are computed: the same for all lengths, for the same bits."""
    return next(tile for widest, tile in _PROMPT_TILES.items() if width <= widest)


def _launch(kernel: Any, grid: tuple[int, ...], *arguments: object, **constants: object) -> None:
    kernel[grid](*arguments, **constants)


# What the company decides must not decide how a program is compiled: other code may sum in another
# order. Triton compiles anew for numbers that are 1 or divisible by 16, and for aligned addresses.
@triton.jit(
    do_not_specialize=["table_width", "num_parts", "window"],
    do_not_specialize_on_alignment=["queries_NHD", "tables_NM", "lengths_N"],
)
def _attend_part(
    queries_NHD, pages_PCGSW, scales_PCGSW, tables_NM, lengths_N,
    largest_NHB, totals_NHB, sums_NHBD,
    table_width, num_parts, window, scale, softcap,
    HEADS: tl.constexpr, TILES: tl.constexpr, GROUPS: tl.constexpr, HEAD_DIM: tl.constexpr,
    PAGE_TOKENS: tl.constexpr, PAGE_WIDTH: tl.constexpr, PART_TOKENS: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Attend with some heads of one group of one token over one part of its keys.

    Leaves each head's largest score, and the sums of weights relative to it, and of values.
    """
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) // TILES
    part = tl.program_id(2)
    length = tl.load(lengths_N + token)
    first = tl.maximum(length - window, 0)
    start = tl.maximum(part * PART_TOKENS, first // BLOCK_K * BLOCK_K)
    stop = tl.minimum((part + 1) * PART_TOKENS, length)
    if start >= stop:
        return

    heads = tl.program_id(1) % TILES * BLOCK_R + tl.arange(0, BLOCK_R)
    dims = tl.arange(0, BLOCK_D)
    has_number = (heads < HEADS)[:, None] & (dims < HEAD_DIM)[None, :]
    # A row of all tokens' heads; those of a group lie side by side.
    rows = (token * GROUPS + group) * HEADS + heads
    places_RD = rows[:, None] * HEAD_DIM + dims[None, :]
    queries_RD = tl.load(queries_NHD + places_RD, has_number, other=0.0).to(tl.float32)

    largest_R = tl.full((BLOCK_R,), float("-inf"), tl.float32)
    total_R = tl.zeros((BLOCK_R,), tl.float32)
    sums_RD = tl.zeros((BLOCK_R, BLOCK_D), tl.float32)
    for block in range(start, stop, BLOCK_K):
        positions = block + tl.arange(0, BLOCK_K)
        is_visible = (positions >= first) & (positions < length)
        table_M = tables_NM + token * table_width
        keys_K = _find_keys(table_M, positions, is_visible, group, GROUPS, PAGE_TOKENS)
        keys_KD = _read_states(
            pages_PCGSW, scales_PCGSW, keys_K, is_visible, dims, HEAD_DIM, PAGE_WIDTH
        )
        scores_RK = _score(queries_RD, keys_KD, scale, softcap)
        scores_RK = tl.where(is_visible[None, :], scores_RK, float("-inf"))
        new_largest_R = tl.maximum(largest_R, tl.max(scores_RK, axis=1))
        weights_RK = tl.exp(scores_RK - new_largest_R[:, None])
        shrink_R = tl.exp(largest_R - new_largest_R)
        values_KD = _read_states(
            pages_PCGSW, scales_PCGSW, keys_K + GROUPS * PAGE_TOKENS, is_visible, dims,
            HEAD_DIM, PAGE_WIDTH,
        )  # fmt: skip
        total_R = total_R * shrink_R + tl.sum(weights_RK, axis=1)
        sums_RD = sums_RD * shrink_R[:, None]
        sums_RD += tl.dot(weights_RK, values_KD, input_precision="tf32x3")
        largest_R = new_largest_R

    tl.store(largest_NHB + rows * num_parts + part, largest_R, heads < HEADS)
    tl.store(totals_NHB + rows * num_parts + part, total_R, heads < HEADS)
    places_RD = (rows * num_parts + part)[:, None] * HEAD_DIM + dims[None, :]
    tl.store(sums_NHBD + places_RD, sums_RD, has_number)


@triton.jit
def _find_keys(
    table_M, positions, is_visible, group, GROUPS: tl.constexpr, PAGE_TOKENS: tl.constexpr
):
    """Return which states the keys at some positions of a row are; values are a group further."""
    page_K = tl.load(table_M + positions // PAGE_TOKENS, is_visible, other=0).to(tl.int64)
    return (page_K * 2 * GROUPS + group) * PAGE_TOKENS + positions % PAGE_TOKENS


@triton.jit
def _read_states(
    pages_PCGSW,
    scales_PCGSW,
    states_K,
    is_visible,
    dims,
    HEAD_DIM: tl.constexpr,
    PAGE_WIDTH: tl.constexpr,
):
    """Return keys or values as floats, zeros for those that are not visible."""
    has_number = is_visible[:, None] & (dims < HEAD_DIM)[None, :]
    places_KD = states_K[:, None] * PAGE_WIDTH + dims[None, :]
    if scales_PCGSW is None:
        return tl.load(pages_PCGSW + places_KD, has_number, other=0.0).to(tl.float32)
    else:
        # The scale of a record is its first number, if one reads it as floats.
        scales_K = tl.load(scales_PCGSW + states_K * (PAGE_WIDTH // 4), is_visible, other=0.0)
        numbers_KD = tl.load(pages_PCGSW + places_KD + _SCALE_BYTES, has_number, other=0)
        return numbers_KD.to(tl.float32) * scales_K[:, None]


@triton.jit
def _score(queries_RD, keys_KD, scale, softcap):
    """Return the scaled products of queries and keys, bent where there is a cap."""
    # Matrix units take 11 bits of a number; three products have nearly all that float32 has.
    scores_RK = tl.dot(queries_RD, tl.trans(keys_KD), input_precision="tf32x3") * scale
    if softcap is None:
        return scores_RK
    else:
        # The hyperbolic tangent of the magnitude, so that no power is too large.
        power_RK = tl.exp(-2 * tl.abs(scores_RK / softcap))
        bent_RK = (1 - power_RK) / (1 + power_RK) * softcap
        return tl.where(scores_RK < 0, -bent_RK, bent_RK)


@triton.jit(do_not_specialize=["num_parts", "window"], do_not_specialize_on_alignment=["lengths_N"])
def _join_parts(
    lengths_N,
    largest_NHB,
    totals_NHB,
    sums_NHBD,
    result_NHD,
    num_parts,
    window,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PART_TOKENS: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Join what the parts came to in one head of one token; parts without keys left nothing."""
    token = tl.program_id(0).to(tl.int64)
    row = token * HEADS + tl.program_id(1)
    length = tl.load(lengths_N + token)
    dims = tl.arange(0, BLOCK_D)
    place = result_NHD + row * HEAD_DIM + dims
    if length == 0:
        tl.store(place, tl.zeros((BLOCK_D,), tl.float32), dims < HEAD_DIM)
        return
    first_part = tl.maximum(length - window, 0) // PART_TOKENS
    stop_part = tl.cdiv(length, PART_TOKENS)
    largest = tl.full((), float("-inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    sums_D = tl.zeros((BLOCK_D,), tl.float32)
    for start in range(first_part, stop_part, BLOCK_B):
        parts = start + tl.arange(0, BLOCK_B)
        is_there = parts < stop_part
        places = row * num_parts + parts
        largest_B = tl.load(largest_NHB + places, is_there, other=float("-inf"))
        new_largest = tl.maximum(largest, tl.max(largest_B, axis=0))
        weights_B = tl.exp(largest_B - new_largest)
        shrink = tl.exp(largest - new_largest)
        totals_B = tl.load(totals_NHB + places, is_there, other=0.0)
        sums_BD = tl.load(
            sums_NHBD + places[:, None] * HEAD_DIM + dims[None, :],
            is_there[:, None] & (dims < HEAD_DIM)[None, :],
            other=0.0,
        )
        total = total * shrink + tl.sum(totals_B * weights_B, axis=0)
        sums_D = sums_D * shrink + tl.sum(sums_BD * weights_B[:, None], axis=0)
        largest = new_largest
    tl.store(place, sums_D / total, dims < HEAD_DIM)


@triton.jit(
    do_not_specialize=["token_stride", "table_width", "window"],
    do_not_specialize_on_alignment=["queries_NHD", "tables_XM", "rows_X3"],
)
def _attend_tile(
    queries_NHD, pages_PCGSW, scales_PCGSW, tables_XM, rows_X3, result_NHD,
    token_stride, table_width, window, scale, softcap,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_TOKENS: tl.constexpr,
    PAGE_WIDTH: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Attend with one head of some tokens of a row over all keys that one of them sees."""
    head = tl.program_id(0)
    row = tl.program_id(2)
    first_token = tl.load(rows_X3 + row * 3).to(tl.int64)
    num_tokens = tl.load(rows_X3 + row * 3 + 1)
    position = tl.load(rows_X3 + row * 3 + 2)
    # The last tiles first: they take the longest.
    first = (tl.num_programs(1) - 1 - tl.program_id(1)) * BLOCK_T
    if first >= num_tokens:
        return

    tokens = first + tl.arange(0, BLOCK_T)
    positions = position + tokens
    dims = tl.arange(0, BLOCK_D)
    has_number = (tokens < num_tokens)[:, None] & (dims < HEAD_DIM)[None, :]
    places_TD = (first_token + tokens)[:, None] * token_stride + head * HEAD_DIM + dims[None, :]
    queries_TD = tl.load(queries_NHD + places_TD, has_number, other=0.0).to(tl.float32)
    first_key = tl.maximum(position + first + 1 - window, 0)
    stop = position + tl.minimum(first + BLOCK_T, num_tokens)
    table_M = tables_XM + row.to(tl.int64) * table_width

    largest_T = tl.full((BLOCK_T,), float("-inf"), tl.float32)
    total_T = tl.zeros((BLOCK_T,), tl.float32)
    sums_TD = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    for block in range(first_key // BLOCK_K * BLOCK_K, stop, BLOCK_K):
        places = block + tl.arange(0, BLOCK_K)
        is_read = (places >= first_key) & (places < stop)
        keys_K = _find_keys(table_M, places, is_read, head // HEADS, GROUPS, PAGE_TOKENS)
        keys_KD = _read_states(
            pages_PCGSW, scales_PCGSW, keys_K, is_read, dims, HEAD_DIM, PAGE_WIDTH
        )
        distances_TK = positions[:, None] - places[None, :]
        is_seen = (distances_TK >= 0) & (distances_TK < window)
        scores_TK = _score(queries_TD, keys_KD, scale, softcap)
        scores_TK = tl.where(is_seen, scores_TK, float("-inf"))
        new_largest_T = tl.maximum(largest_T, tl.max(scores_TK, axis=1))
        # A token may see no key of the first blocks: these leave it as it was.
        base_T = tl.where(new_largest_T == float("-inf"), 0.0, new_largest_T)
        weights_TK = tl.exp(scores_TK - base_T[:, None])
        shrink_T = tl.exp(largest_T - base_T)
        values_K = keys_K + GROUPS * PAGE_TOKENS
        values_KD = _read_states(
            pages_PCGSW, scales_PCGSW, values_K, is_read, dims, HEAD_DIM, PAGE_WIDTH
        )
        total_T = total_T * shrink_T + tl.sum(weights_TK, axis=1)
        added_TD = tl.dot(weights_TK, values_KD, input_precision="tf32x3")
        sums_TD = sums_TD * shrink_T[:, None] + added_TD
        largest_T = new_largest_T

    # Behind the last token, too, somebody divides.
    total_T = tl.where(tokens < num_tokens, total_T, 1.0)
    rows_T = (first_token + tokens) * (GROUPS * HEADS) + head
    places_TD = rows_T[:, None] * HEAD_DIM + dims[None, :]
    tl.store(result_NHD + places_TD, sums_TD / total_T[:, None], has_number)
