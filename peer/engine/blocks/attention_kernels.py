"""Attention that is faster than torch's: kernels in C on the CPU, one over pages on other devices.

Each kernel takes its own tokens of a batch, in a form that is laid out here, and leaves the others
alone.

Tensor suffixes: N tokens of a batch, or those that a kernel takes, O query, key and value heads
side by side, or the query heads; X heads, D head size, G key-value heads, J query and key heads,
R rows of sessions, M pages of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ....kernels.attention.native_attention import (
    PromptAttention,
    TokenAttention,
    TokenBatch,
    TokenSegment,
    TokenShape,
    can_attend,
    can_attend_prompts,
)
from ....kernels.attention.rotary import RotaryTable, Rotation
from ..cache.kv_memory import Layout, count_pages
from ..cache.lazy_memory import LazyMemory
from ..cache.paged_memory import PagedAttention, PagedMemory, PagedStore, write_tokens
from .attention_options import AttentionOptions, QueryKeyTransform
from .batch import BatchedStep, StepBatch

MAX_PAGED_HEAD_DIM = 256
"""`triton_attention.MAX_HEAD_DIM`, without importing Triton."""


@dataclass(frozen=True)
class PagedTokenBatch:
    """Generated tokens over caches of one format in pages; its tensors are where the pages are.

    `tokens` says which tokens of the batch they are. Token `n` is at `positions_N[n]` of its row
    and sees the first `lengths_N[n]` keys of it: 0 if it is padding.
    """

    tokens: slice | torch.Tensor
    store: PagedStore
    layout: Layout
    positions_N: torch.Tensor
    tables_NM: torch.Tensor
    lengths_N: torch.Tensor
    rotations: tuple[Rotation, ...]

    @property
    def seen(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What tells attention which keys each token sees."""
        return self.tables_NM, self.lengths_N

    def pages(self, block: int) -> torch.Tensor:
        """Return the memory of a block, `pages_PCGSW`."""
        return self.store.pages(block, self.layout.dtype)

    def write(self, block: int, keys_NGD: torch.Tensor, values_NGD: torch.Tensor) -> None:
        """Write the tokens' keys and values of a block."""
        pages_PCGSW = self.pages(block)
        page_tokens = pages_PCGSW.shape[3]
        columns_N1 = (self.positions_N // page_tokens)[:, None]
        pages_N = self.tables_NM.long().gather(1, columns_N1)[:, 0]
        write_tokens(
            pages_PCGSW, pages_N, self.positions_N % page_tokens,
            self.layout.pack(keys_NGD), self.layout.pack(values_NGD),
        )  # fmt: skip


@dataclass(frozen=True)
class PagedPromptBatch:
    """Prompts over caches of one format in pages; its tensors are where the pages are.

    `tokens` says which tokens of the batch they are; token `n` of them is kept at `places_N[n]` of
    page `pages_N[n]`. `seen` tells attention which keys each sees: tables of pages, the rows in
    which the tokens lie, and how many the longest row has.
    """

    tokens: slice | torch.Tensor
    store: PagedStore
    layout: Layout
    pages_N: torch.Tensor
    places_N: torch.Tensor
    seen: tuple[torch.Tensor, torch.Tensor, int]
    rotations: tuple[Rotation, ...]

    def pages(self, block: int) -> torch.Tensor:
        """Return the memory of a block, `pages_PCGSW`."""
        return self.store.pages(block, self.layout.dtype)

    def write(self, block: int, keys_NGD: torch.Tensor, values_NGD: torch.Tensor) -> None:
        """Write the tokens' keys and values of a block."""
        write_tokens(
            self.pages(block), self.pages_N, self.places_N,
            self.layout.pack(keys_NGD), self.layout.pack(values_NGD),
        )  # fmt: skip


def lay_out_decoded(batch: StepBatch) -> list[TokenBatch]:
    """Return the generated tokens as the kernel in C takes them: one form for each rope."""
    return _lay_out(batch.decoded)


def lay_out_prompts(batch: StepBatch) -> list[TokenBatch]:
    """Return the prompts as the kernel in C takes them: one form for each rope."""
    return _lay_out(batch.prompts)


def _lay_out(steps: Sequence[BatchedStep]) -> list[TokenBatch]:
    return [
        TokenBatch([_address(step, rope) for step in steps])
        for rope in range(len(steps[0].rotations))
    ]


def _address(step: BatchedStep, rope: int) -> TokenSegment:
    memory, rotation = step.memory, step.rotations[rope]
    assert isinstance(memory, LazyMemory)
    return TokenSegment(
        memory.states_LCBGSD, memory.span.start, step.start, step.position, *rotation
    )


def lay_out_in_pages(batch: StepBatch) -> list[PagedTokenBatch]:
    """Return the generated tokens over pages: one form for each layout of caches."""
    groups = _group_by_layout(batch.decoded)
    return [_lay_out_pages(steps, batch.rotary, len(groups)) for steps in groups]


def lay_out_prompts_in_pages(batch: StepBatch) -> list[PagedPromptBatch]:
    """Return the prompts over pages: one form for each layout of caches."""
    groups = _group_by_layout(batch.prompts)
    return [_lay_out_rows(steps, batch.rotary, len(groups)) for steps in groups]


def _group_by_layout(steps: Sequence[BatchedStep]) -> list[list[BatchedStep]]:
    layouts = {id(step.memory.layout): step.memory.layout for step in steps}.values()
    return [[step for step in steps if step.memory.layout is layout] for layout in layouts]


def _list_memories(steps: Sequence[BatchedStep]) -> list[PagedMemory]:
    memories: list[PagedMemory] = []
    for step in steps:
        memory = step.memory
        assert isinstance(memory, PagedMemory)
        memories.append(memory)
    return memories


def _lay_out_rows(
    steps: Sequence[BatchedStep], rotary: Sequence[RotaryTable], num_layouts: int
) -> PagedPromptBatch:
    memories = _list_memories(steps)
    store, layout, page_tokens = memories[0].store, memories[0].layout, memories[0].page_tokens
    num_rows = sum(step.num_rows for step in steps)
    num_pages = count_pages(max(step.position + step.num_tokens for step in steps), page_tokens)
    tables_RM = np.full((num_rows, num_pages), store.nobodys_page, dtype=np.int32)
    rows: list[tuple[int, int, int]] = []
    written: list[np.ndarray] = []  # position, page and place of each token
    first = 0
    for step, memory in zip(steps, memories, strict=True):
        positions_T = np.arange(step.position, step.position + step.num_tokens)
        for taken_M in memory.taken_BM[:, :num_pages]:
            tables_RM[len(rows), : len(taken_M)] = taken_M
            rows.append((first, step.num_tokens, step.position))
            pages_T = taken_M[positions_T // page_tokens]
            written.append(np.stack([positions_T, pages_T, positions_T % page_tokens]))
            first += step.num_tokens
    device = store.device
    positions_N, pages_N, places_N = torch.from_numpy(np.concatenate(written, 1)).to(device)
    seen = (
        torch.from_numpy(tables_RM).to(device),
        torch.tensor(rows, dtype=torch.int32).to(device),
        max(step.num_tokens for step in steps),
    )
    return PagedPromptBatch(
        _find_tokens(steps, num_layouts, device),
        store,
        layout,
        pages_N,
        places_N,
        seen,
        tuple(table.select(positions_N) for table in rotary),
    )


def _lay_out_pages(
    steps: Sequence[BatchedStep], rotary: Sequence[RotaryTable], num_layouts: int
) -> PagedTokenBatch:
    memories = _list_memories(steps)
    store, layout = memories[0].store, memories[0].layout
    positions_N = np.concatenate([_list_positions(step) for step in steps])
    num_pages = count_pages(int(positions_N.max()) + 1, memories[0].page_tokens)
    tables_NM = np.full((len(positions_N), num_pages), store.nobodys_page, dtype=np.int32)
    first = 0
    for step, memory in zip(steps, memories, strict=True):
        taken_BM = memory.taken_BM[:, :num_pages]
        stop = first + step.num_rows * step.num_tokens
        tables_NM[first:stop, : taken_BM.shape[1]] = taken_BM.repeat(step.num_tokens, axis=0)
        first = stop
    device = store.device
    positions_on_device_N = torch.from_numpy(positions_N).to(device)
    return PagedTokenBatch(
        _find_tokens(steps, num_layouts, device),
        store,
        layout,
        positions_on_device_N,
        torch.from_numpy(tables_NM).to(device),
        (positions_on_device_N + 1).to(torch.int32),
        tuple(table.select(positions_on_device_N) for table in rotary),
    )


def _list_positions(step: BatchedStep) -> np.ndarray:
    positions_T = np.arange(step.position, step.position + step.num_tokens)
    return np.tile(positions_T, step.num_rows)


def _find_tokens(
    steps: Sequence[BatchedStep], num_layouts: int, device: torch.device
) -> slice | torch.Tensor:
    """Return which tokens these are; if all have one layout, they lie side by side."""
    if num_layouts == 1:
        return slice(steps[0].start, steps[-1].stop)
    tokens = [np.arange(step.start, step.stop) for step in steps]
    return torch.from_numpy(np.concatenate(tokens)).to(device)


class NativeTokens:
    """Generated tokens in C."""

    def __init__(self, rope: int, attend: TokenAttention) -> None:
        self.name = attend.name
        self._rope = rope
        self._attend = attend

    def __call__(self, fused_NO: torch.Tensor, batch: StepBatch, attended_NO: torch.Tensor) -> None:
        if batch.decoded:
            self._attend(fused_NO, batch.in_form(lay_out_decoded)[self._rope], attended_NO)


class NativePrompts(NativeTokens):
    """Prompts in C."""

    def __call__(self, fused_NO: torch.Tensor, batch: StepBatch, attended_NO: torch.Tensor) -> None:
        if batch.prompts:
            self._attend(fused_NO, batch.in_form(lay_out_prompts)[self._rope], attended_NO)


class PagedTokens:
    """Tokens over caches in pages, as `lay_out` lays them out: generated ones, or prompts.

    Torch norms, rotates and writes, a kernel attends.
    """

    name = "triton"

    def __init__(
        self,
        block: int,
        options: AttentionOptions,
        transform: QueryKeyTransform,
        attend: Callable[..., torch.Tensor],
        lay_out: Callable[[StepBatch], Sequence[PagedTokenBatch | PagedPromptBatch]],
    ) -> None:
        self._block = block
        self._options = options
        self._transform = transform
        self._attend = attend
        self._lay_out = lay_out

    def __call__(self, fused_NO: torch.Tensor, batch: StepBatch, attended_NO: torch.Tensor) -> None:
        options = self._options
        for paged in batch.in_form(self._lay_out):
            # To the transform they are the tokens of one row, each at its own position.
            fused_1NXD = fused_NO[paged.tokens].unflatten(-1, (-1, options.head_dim))[None]
            query_key_1NJD, values_1NGD = fused_1NXD.tensor_split([-options.num_kv_heads], dim=2)
            query_key_NJD = self._transform(query_key_1NJD, paged.rotations)[0].transpose(0, 1)
            queries_NHD, keys_NGD = query_key_NJD.tensor_split([options.num_heads], dim=1)
            paged.write(self._block, keys_NGD, values_1NGD[0])
            attended_NHD = self._attend(
                queries_NHD, paged.pages(self._block), *paged.seen,
                scale=options.scale, sliding_window=options.sliding_window,
                softcap=options.softcap,
            )  # fmt: skip
            attended_NO[paged.tokens] = attended_NHD.flatten(1)


def choose_kernels(
    block: int,
    options: AttentionOptions,
    transform: QueryKeyTransform,
    paged_attention: PagedAttention | None,
) -> tuple[NativeTokens | PagedTokens | None, NativePrompts | PagedTokens | None]:
    """Return the kernels for a block's generated tokens and for its prompts.

    On a device with caches in pages they read these; otherwise they are those in C.
    """
    if paged_attention is not None:
        if options.alibi is not None or options.head_dim > MAX_PAGED_HEAD_DIM:
            return None, None
        parts = block, options, transform
        return (
            PagedTokens(*parts, paged_attention.tokens, lay_out_in_pages),
            PagedTokens(*parts, paged_attention.prompts, lay_out_prompts_in_pages),
        )
    shape, rope = _find_plain_shape(options), options.rope
    if shape is None or rope is None:
        return None, None
    tokens = prompts = None
    if can_attend(shape):
        tokens = NativeTokens(rope, TokenAttention(block, shape, transform.norm_JD))
    if can_attend_prompts(shape):
        prompts = NativePrompts(rope, PromptAttention(block, shape, transform.norm_JD))
    return tokens, prompts


def _find_plain_shape(options: AttentionOptions) -> TokenShape | None:
    """Return the shape for the kernels in C; None if the block does what they cannot."""
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
