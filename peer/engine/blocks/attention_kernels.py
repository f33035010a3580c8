"""Attention that is faster than torch's: kernels in C on the CPU, one over pages on other devices.

Each kernel takes its own tokens of a batch, in a form that is laid out here, and leaves the others
alone.

Tensor suffixes: N tokens of a batch, or those that a kernel takes, O query, key and value heads
side by side, or the query heads; X heads, D head size, G key-value heads, J query and key heads,
R rows of sessions, M pages of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

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
class DecodedTokens:
    """Generated tokens over caches of one format in pages, still on the CPU.

    `tokens` says which tokens of the batch they are. Token `n` is at `positions_N[n]` of its row,
    whose pages are `tables_NM[n]`, of `page_tokens` tokens each.
    """

    tokens: slice | np.ndarray
    store: PagedStore
    layout: Layout
    page_tokens: int
    positions_N: np.ndarray
    tables_NM: np.ndarray

    def pack(self, num_tokens: int, num_pages: int) -> np.ndarray:
        """Return positions, pages and places of all tokens, how many keys each sees, and tables.

        In one piece, so that it is brought to a device at once, and padded to a size. Padding sees
        no keys, and its own go into nobody's page.
        """
        num_ours, width = self.tables_NM.shape
        numbers = np.full(num_tokens * (4 + num_pages), self.store.nobodys_page, dtype=np.int32)
        positions, pages, places, lengths = numbers[: 4 * num_tokens].reshape(4, num_tokens)
        for padded, ours in (
            (positions, self.positions_N),
            (places, self.positions_N % self.page_tokens),
            (lengths, self.positions_N + 1),
        ):
            padded[:num_ours], padded[num_ours:] = ours, 0
        columns_N = self.positions_N // self.page_tokens
        pages[:num_ours] = self.tables_NM[np.arange(num_ours), columns_N]
        numbers[4 * num_tokens :].reshape(num_tokens, -1)[:num_ours, :width] = self.tables_NM
        return numbers


@dataclass(frozen=True)
class PagedTokenBatch:
    """Generated tokens over caches of one format in pages; its tensors are where the pages are.

    `tokens` says which tokens of the batch they are. `numbers` are those of `DecodedTokens.pack`.
    """

    tokens: slice | torch.Tensor
    store: PagedStore
    layout: Layout
    num_tokens: int
    numbers: torch.Tensor
    rotations: tuple[Rotation, ...] = ()

    @classmethod
    def of(cls, decoded: DecodedTokens, num_tokens: int, num_pages: int) -> PagedTokenBatch:
        """Bring tokens to where their pages are, padded to a size."""
        device, tokens = decoded.store.device, decoded.tokens
        if not isinstance(tokens, slice):
            tokens = torch.from_numpy(tokens).to(device)
        numbers = torch.from_numpy(decoded.pack(num_tokens, num_pages)).to(device)
        return cls(tokens, decoded.store, decoded.layout, num_tokens, numbers)

    def rotate(self, rotary: Sequence[RotaryTable]) -> PagedTokenBatch:
        """Return the same with the rotations of its positions."""
        rotations = tuple(table.select(self._list(0)) for table in rotary)
        return replace(self, rotations=rotations)

    @property
    def pages_N(self) -> torch.Tensor:
        """The pages that keep the tokens."""
        return self._list(1)

    @property
    def places_N(self) -> torch.Tensor:
        """Their places in these pages."""
        return self._list(2)

    @property
    def seen(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What tells attention which keys each token sees: tables, and how many of their keys."""
        return self.numbers[4 * self.num_tokens :].view(self.num_tokens, -1), self._list(3)

    def _list(self, kind: int) -> torch.Tensor:
        return self.numbers[kind * self.num_tokens : (kind + 1) * self.num_tokens]

    def pages(self, block: int) -> torch.Tensor:
        """Return the memory of a block, `pages_PCGSW`."""
        return self.store.pages(block, self.layout.dtype)


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


def list_decoded(batch: StepBatch) -> list[DecodedTokens]:
    """Return the generated tokens over pages: one form for each layout of caches."""
    groups = _group_by_layout(batch.decoded)
    return [_list_tokens(steps, len(groups)) for steps in groups]


def lay_out_in_pages(batch: StepBatch) -> list[PagedTokenBatch]:
    """Return the same where the pages are."""
    return [
        PagedTokenBatch.of(decoded, *decoded.tables_NM.shape).rotate(batch.rotary)
        for decoded in batch.in_form(list_decoded)
    ]


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
    tokens = _find_tokens(steps, num_layouts)
    return PagedPromptBatch(
        tokens if isinstance(tokens, slice) else torch.from_numpy(tokens).to(device),
        store,
        layout,
        pages_N,
        places_N,
        seen,
        tuple(table.select(positions_N) for table in rotary),
    )


def _list_tokens(steps: Sequence[BatchedStep], num_layouts: int) -> DecodedTokens:
    memories = _list_memories(steps)
    store, page_tokens = memories[0].store, memories[0].page_tokens
    last = max(step.position + step.num_tokens for step in steps)
    num_tokens = sum(step.stop - step.start for step in steps)
    positions_N = np.empty(num_tokens, dtype=np.int32)
    num_pages = count_pages(last, page_tokens)
    tables_NM = np.full((num_tokens, num_pages), store.nobodys_page, dtype=np.int32)
    first = 0
    for step, memory in zip(steps, memories, strict=True):
        taken_BM = memory.taken_BM[:, :num_pages]
        stop = first + step.stop - step.start
        positions_N[first:stop].reshape(step.num_rows, -1)[:] = np.arange(
            step.position, step.position + step.num_tokens
        )
        rows = tables_NM[first:stop].reshape(step.num_rows, step.num_tokens, num_pages)
        rows[:, :, : taken_BM.shape[1]] = taken_BM[:, None]
        first = stop
    tokens = _find_tokens(steps, num_layouts)
    return DecodedTokens(tokens, store, memories[0].layout, page_tokens, positions_N, tables_NM)


def _find_tokens(steps: Sequence[BatchedStep], num_layouts: int) -> slice | np.ndarray:
    """Return which tokens these are; if all have one layout, they lie side by side."""
    if num_layouts == 1:
        return slice(steps[0].start, steps[-1].stop)
    return np.concatenate([np.arange(step.start, step.stop) for step in steps])


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

    What norms, rotates and writes is `write`, or else torch.
    """

    name = "triton"

    def __init__(
        self,
        block: int,
        options: AttentionOptions,
        transform: QueryKeyTransform,
        attend: Callable[..., torch.Tensor],
        write: Callable[..., torch.Tensor] | None,
        lay_out: Callable[[StepBatch], Sequence[PagedTokenBatch | PagedPromptBatch]],
    ) -> None:
        self._block = block
        self._options = options
        self._transform = transform
        self._attend = attend
        self._write = write
        self._lay_out = lay_out

    def __call__(self, fused_NO: torch.Tensor, batch: StepBatch, attended_NO: torch.Tensor) -> None:
        options = self._options
        for paged in batch.in_form(self._lay_out):
            fused_NXD = fused_NO[paged.tokens].unflatten(-1, (-1, options.head_dim))
            queries_NHD = self._write_states(fused_NXD, paged)
            attended_NHD = self._attend(
                queries_NHD, paged.pages(self._block), *paged.seen,
                scale=options.scale, sliding_window=options.sliding_window,
                softcap=options.softcap,
            )  # fmt: skip
            attended_NO[paged.tokens] = attended_NHD.flatten(1)

    def _write_states(
        self, fused_NXD: torch.Tensor, paged: PagedTokenBatch | PagedPromptBatch
    ) -> torch.Tensor:
        """Return the queries as attention takes them; write keys and values."""
        options, transform = self._options, self._transform
        if self._write is not None:
            return self._write(
                fused_NXD, paged.pages(self._block), paged.pages_N, paged.places_N,
                rotation=None if options.rope is None else paged.rotations[options.rope],
                norm_JD=transform.norm_JD, norm_eps=options.norm_eps,
            )  # fmt: skip
        # To the transform they are the tokens of one row, each at its own position.
        query_key_1NJD, values_1NGD = fused_NXD[None].tensor_split([-options.num_kv_heads], dim=2)
        query_key_NJD = transform(query_key_1NJD, paged.rotations)[0].transpose(0, 1)
        queries_NHD, keys_NGD = query_key_NJD.tensor_split([options.num_heads], dim=1)
        write_tokens(
            paged.pages(self._block), paged.pages_N, paged.places_N,
            paged.layout.pack(keys_NGD), paged.layout.pack(values_1NGD[0]),
        )  # fmt: skip
        return queries_NHD


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
        attend_tokens, attend_prompts, write = paged_attention
        return (
            PagedTokens(block, options, transform, attend_tokens, write, lay_out_in_pages),
            PagedTokens(block, options, transform, attend_prompts, write, lay_out_prompts_in_pages),
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
