"""Queries, keys and values on their way into attention over pages, in Triton, for CUDA devices.

One program for each head of a token norms and turns it. Queries are returned, keys and values go to
their places in pages, as floats or as the records of `int8_kv`. Torch takes a dozen launches for
it.

Imports Triton, so nothing but `select.py` imports this file, and only for tensors on such a device.

Tensor suffixes: N tokens, X heads of queries, keys and values, H query heads, J query and key
heads, D head size, R numbers of a head that are turned; P, C, G, S, W as in `triton_attention`.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .int8_kv import LARGEST, SCALE_BYTES, TINY
from .rotary import Rotation

_FEWEST_COLUMNS = 16
_LARGEST = tl.constexpr(LARGEST)
_SCALE_BYTES = tl.constexpr(SCALE_BYTES)
_TINY = tl.constexpr(TINY)
# Adding and subtracting it leaves a whole number, rounded to even.
_ROUNDER = tl.constexpr(1.5 * 2**23)


def write_states(
    fused_NXD: Tensor,
    pages_PCGSW: Tensor,
    pages_N: Tensor,
    places_N: Tensor,
    *,
    rotation: Rotation | None,
    norm_JD: Tensor | None,
    norm_eps: float,
) -> Tensor:
    """Return the queries, normed and turned, as NHD; write keys, likewise, and values.

    Those of token `n` go to place `places_N[n]` of page `pages_N[n]`, which are trusted. The
    queries' norm is in `norm_JD` for each head, then the keys'. 16 bits are rounded to after the
    norm and after the turn.
    """
    num_tokens, num_states, head_dim = fused_NXD.shape
    num_groups, page_tokens, page_width = pages_PCGSW.shape[2:]
    num_heads = num_states - 2 * num_groups
    queries_NHD = torch.empty_like(fused_NXD[:, :num_heads], memory_format=torch.contiguous_format)
    if num_tokens == 0:
        return queries_NHD
    cos_NR, sin_NR = (None, None) if rotation is None else rotation
    is_int8 = pages_PCGSW.dtype is torch.int8
    _launch(
        _write_head, (num_tokens, num_states),
        fused_NXD.contiguous(), cos_NR, sin_NR, norm_JD, pages_N, places_N,
        pages_PCGSW, pages_PCGSW.view(torch.float32) if is_int8 else None, queries_NHD,
        norm_eps, float(head_dim), HEADS=num_heads, GROUPS=num_groups, HEAD_DIM=head_dim,
        TURNED=0 if cos_NR is None else cos_NR.shape[1],
        PAGE_TOKENS=page_tokens, PAGE_WIDTH=page_width,
        BLOCK_D=max(_FEWEST_COLUMNS, 1 << (head_dim - 1).bit_length()),
    )  # fmt: skip
    return queries_NHD


def _launch(kernel: Any, grid: tuple[int, ...], *arguments: object, **constants: object) -> None:
    kernel[grid](*arguments, **constants, num_warps=1, enable_fp_fusion=False)


# Whatever the company decides must not decide how a program is compiled.
@triton.jit(
    do_not_specialize_on_alignment=["fused_NXD", "cos_NR", "sin_NR", "pages_N", "places_N"],
)
def _write_head(
    fused_NXD, cos_NR, sin_NR, norm_JD, pages_N, places_N, pages_PCGSW, scales_PCGSW, queries_NHD,
    norm_eps, count,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, HEAD_DIM: tl.constexpr, TURNED: tl.constexpr,
    PAGE_TOKENS: tl.constexpr, PAGE_WIDTH: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Write one head of one token to where it belongs."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    dims = tl.arange(0, BLOCK_D)
    has_number = dims < HEAD_DIM
    source = fused_NXD + (token * (HEADS + 2 * GROUPS) + head) * HEAD_DIM
    states = tl.load(source + dims, has_number, other=0.0).to(tl.float32)
    if head < HEADS + GROUPS:
        # The number that each is turned with: half of what is turned away.
        is_first = dims < TURNED // 2
        others = tl.where(is_first, dims + TURNED // 2, dims - TURNED // 2)
        is_turned = dims < TURNED
        partners = tl.load(source + others, is_turned, other=0.0).to(tl.float32)
        if norm_JD is not None:
            mean_square = tl.div_rn(tl.sum(states * states, axis=0), count)
            factor = tl.div_rn(tl.full((), 1.0, tl.float32), tl.sqrt_rn(mean_square + norm_eps))
            weights = norm_JD + head * HEAD_DIM
            states *= factor * tl.load(weights + dims, has_number, other=0.0).to(tl.float32)
            partners *= factor * tl.load(weights + others, is_turned, other=0.0).to(tl.float32)
            states = _round_like(states, fused_NXD)
            partners = _round_like(partners, fused_NXD)
        if cos_NR is not None:
            cos = tl.load(cos_NR + token * TURNED + dims, is_turned, other=1.0)
            sin = tl.load(sin_NR + token * TURNED + dims, is_turned, other=0.0)
            turned = states * cos + tl.where(is_first, -partners, partners) * sin
            states = _round_like(turned, fused_NXD)
    if head < HEADS:
        query = queries_NHD + (token * HEADS + head) * HEAD_DIM
        tl.store(query + dims, states.to(queries_NHD.dtype.element_ty), has_number)
    else:
        page = tl.load(pages_N + token).to(tl.int64)
        # Keys of all groups, then values of all.
        state = (page * 2 * GROUPS + head - HEADS) * PAGE_TOKENS + tl.load(places_N + token)
        place = pages_PCGSW + state * PAGE_WIDTH
        if scales_PCGSW is None:
            tl.store(place + dims, states.to(pages_PCGSW.dtype.element_ty), has_number)
        else:
            # The scale of a record is its first number, if one writes it as floats.
            magnitudes = tl.abs(states)
            is_finite = tl.max(tl.where(magnitudes < float("inf"), 0, 1), axis=0) == 0
            largest = tl.where(is_finite, tl.max(magnitudes, axis=0), 0.0)
            is_usual = largest >= _TINY
            limit = tl.full((), _LARGEST, tl.float32)
            scale = tl.where(is_usual, tl.div_rn(largest, limit), 0.0)
            scale = tl.where(is_finite, scale, float("nan"))
            tl.store(scales_PCGSW + state * (PAGE_WIDTH // 4), scale)
            factor = tl.div_rn(limit, tl.where(is_usual, largest, 1.0))
            numbers = tl.where(is_usual, states, 0.0) * factor
            numbers = ((numbers + _ROUNDER) - _ROUNDER).to(tl.int8)
            tl.store(place + _SCALE_BYTES + dims, numbers, dims < PAGE_WIDTH - _SCALE_BYTES)


@triton.jit
def _round_like(numbers, like):
    """Return floats rounded to the type of others, as the interpreter does not round by itself."""
    if like.dtype.element_ty == tl.bfloat16:
        bits = numbers.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
        return tl.where(numbers == numbers, bits.to(tl.float32, bitcast=True), numbers)
    else:
        return numbers
