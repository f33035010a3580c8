"""What attends faster than torch: kernels in C on the CPU, one over pages on other devices.

Each takes the rows of a batch that are its own, and leaves the others alone.

Tensor suffixes: N rows of all segments, or those that a kernel takes, O query, key and value heads
side by side, or the query heads that are attended with; X heads, D head size, G key-value heads,
J query and key heads.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

from ....kernels.attention.native_attention import (
    PromptAttention,
    TokenAttention,
    TokenShape,
    can_attend,
    can_attend_prompts,
)
from .attention_options import AttentionOptions, QueryKeyTurn
from .rows import Segments

PagedAttention = Callable[..., torch.Tensor]
"""Called like `kernels.triton_attention.paged_attention`."""


MAX_PAGED_HEAD_DIM = 256
"""`triton_attention.MAX_HEAD_DIM`, without importing Triton."""


class AttentionKernel(Protocol):
    """Attention of some of a batch's rows."""

    @property
    def name(self) -> str:
        """What computes it, for people."""
        ...

    def __call__(
        self, fused_NO: torch.Tensor, segments: Segments, attended_NO: torch.Tensor
    ) -> None:
        """Write its rows of `attended_NO`, and their keys and values into the caches."""
        ...


class AttentionKernels(NamedTuple):
    """What attends for generated tokens, and what for prompts; None where torch does."""

    tokens: AttentionKernel | None
    prompts: AttentionKernel | None


class NativeTokens:
    """Generated tokens in C."""

    def __init__(self, rope: int, attend: TokenAttention) -> None:
        self.name = attend.name
        self._rope = rope
        self._attend = attend

    def __call__(
        self, fused_NO: torch.Tensor, segments: Segments, attended_NO: torch.Tensor
    ) -> None:
        if segments.decoded:
            self._attend(fused_NO, segments.token_batches[self._rope], attended_NO)


class NativePrompts(NativeTokens):
    """Prompts in C."""

    def __call__(
        self, fused_NO: torch.Tensor, segments: Segments, attended_NO: torch.Tensor
    ) -> None:
        if segments.prompts:
            self._attend(fused_NO, segments.prompt_batches[self._rope], attended_NO)


class PagedTokens:
    """Generated tokens over caches in pages: torch norms, rotates and writes, a program attends."""

    name = "triton"

    def __init__(
        self, block: int, options: AttentionOptions, turn: QueryKeyTurn, attend: PagedAttention
    ) -> None:
        self._block = block
        self._options = options
        self._turn = turn
        self._attend = attend

    def __call__(
        self, fused_NO: torch.Tensor, segments: Segments, attended_NO: torch.Tensor
    ) -> None:
        options = self._options
        for rows in segments.paged_rows:
            # The turn takes them for the tokens of one row, each at its own position.
            fused_1NXD = fused_NO[rows.places].unflatten(-1, (-1, options.head_dim))[None]
            query_key_1NJD, values_1NGD = fused_1NXD.tensor_split([-options.num_kv_heads], dim=2)
            query_key_NJD = self._turn(query_key_1NJD, rows.rotations)[0].transpose(0, 1)
            queries_NHD, keys_NGD = query_key_NJD.tensor_split([options.num_heads], dim=1)
            rows.write(self._block, keys_NGD, values_1NGD[0])
            attended_NHD = self._attend(
                queries_NHD, rows.pages(self._block), rows.tables_NM, rows.lengths_N,
                scale=options.scale, sliding_window=options.sliding_window,
                softcap=options.softcap,
            )  # fmt: skip
            attended_NO[rows.places] = attended_NHD.flatten(1)


def choose_native(block: int, options: AttentionOptions, turn: QueryKeyTurn) -> AttentionKernels:
    """Return what there is in C for a block."""
    shape, rope = _find_plain_shape(options), options.rope
    if shape is None or rope is None:
        return AttentionKernels(None, None)
    tokens = prompts = None
    if can_attend(shape):
        tokens = NativeTokens(rope, TokenAttention(block, shape, turn.norm_JD))
    if can_attend_prompts(shape):
        prompts = NativePrompts(rope, PromptAttention(block, shape, turn.norm_JD))
    return AttentionKernels(tokens, prompts)


def choose_paged(
    block: int, options: AttentionOptions, turn: QueryKeyTurn, attend: PagedAttention
) -> AttentionKernels:
    """Return what there is for a block whose caches lie in pages."""
    if options.alibi is not None or options.head_dim > MAX_PAGED_HEAD_DIM:
        return AttentionKernels(None, None)
    return AttentionKernels(PagedTokens(block, options, turn, attend), None)


def _find_plain_shape(options: AttentionOptions) -> TokenShape | None:
    """Return what the kernels in C have to know, None where a block does what they cannot."""
    is_plain = (
        options.dtype is torch.float32
        and options.rope is not None
        and options.scale == options.head_dim**-0.5
        and options.softcap is None
        and options.alibi is None
    )
    shape = TokenShape(
        options.num_heads,
        options.num_kv_heads,
        options.head_dim,
        options.sliding_window,
        options.norm_eps,
    )
    return shape if is_plain else None
