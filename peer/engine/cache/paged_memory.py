"""KV memory of a device: one tensor for each block, in pages that sessions take and give back.

A page is what 64 records of an int8 cache take, in all heads, keys and values of one block. Floats
lie in the same pages, fewer tokens in each, as many elements apart as a record has bytes: so a page
serves sessions of either format, whoever had it before.

Tensor suffixes: L blocks, C keys and values, P pages, M pages of a row, N tokens, X bytes of all
pages, G, B, T, S and W as in `kv_memory`.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from ....kernels.attention.int8_kv import count_record_bytes
from ....protocol.errors import CacheFullError, LocalProtocolError
from ....protocol.spans import Span
from ....protocol.tensors import KVFormat
from .kv_memory import (
    PAGE_TOKENS,
    FloatLayout,
    Int8Layout,
    KVStore,
    Layout,
    PrefixPiece,
    SessionMemory,
    count_pages,
)

_RETRY_AFTER_SECONDS = 2.0


class PagedAttention(NamedTuple):
    """Attention over these pages, called like that in `kernels.attention.triton_attention`.

    `write` norms, turns and writes what goes into it, like that in `triton_states`; without it
    torch does.
    """

    tokens: Callable[..., torch.Tensor]
    prompts: Callable[..., torch.Tensor]
    write: Callable[..., torch.Tensor] | None = None


def make_paged_layouts(
    num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> dict[KVFormat, Layout]:
    """Return how sessions of each format use the same pages.

    Rows of 16-bit numbers begin at multiples of 16 bytes: so much is read at once, and Triton 3.6
    reads so much wherever they begin.
    """
    width = -(-count_record_bytes(head_dim) // 8) * 8
    return {
        KVFormat.FLOAT: FloatLayout(num_kv_heads, head_dim, dtype, width),
        KVFormat.INT8: Int8Layout(num_kv_heads, head_dim, dtype, width),
    }


class PagedStore(KVStore):
    """Pages for a budget, allocated at once; `span` are the blocks that they are for.

    A session's rows have the same pages in all blocks that it uses. Sessions of other blocks may
    have them, too. One page more than the budget pays for is nobody's: what is written for rows
    that are not there goes into it.
    """

    def __init__(
        self,
        budget_bytes: int,
        span: Span,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        layouts = make_paged_layouts(num_kv_heads, head_dim, dtype)
        super().__init__(len(span), dtype, layouts)
        width = layouts[KVFormat.INT8].width
        self.page_bytes = 2 * num_kv_heads * PAGE_TOKENS * width
        self.num_pages = max(0, budget_bytes) // (len(span) * self.page_bytes)
        self.most_bytes = self.num_pages * len(span) * self.page_bytes
        self.nobodys_page = self.num_pages
        self.device = device
        self._span = span
        num_bytes = (self.num_pages + 1) * self.page_bytes
        blocks_LX = [
            torch.empty(num_bytes, dtype=torch.int8, device=device) for _ in range(len(span))
        ]
        self._pages = {
            layout.dtype: [
                block_X.view(layout.dtype).view(
                    -1, 2, num_kv_heads, PAGE_TOKENS // layout.dtype.itemsize, width
                )
                for block_X in blocks_LX
            ]
            for layout in layouts.values()
        }
        self._is_used_LP = np.zeros((len(span), self.num_pages), dtype=bool)
        self._memories: set[PagedMemory] = set()

    def open(
        self, span: Span, num_rows: int, max_tokens: int, num_pages: int, kv_format: KVFormat
    ) -> SessionMemory:
        layout, capacity = self.layouts[kv_format], num_pages * PAGE_TOKENS
        memory = PagedMemory(self, layout, span, num_rows, max_tokens, capacity)
        self._memories.add(memory)
        return memory

    def pages(self, block: int, dtype: torch.dtype) -> torch.Tensor:
        """Return `pages_PCGSW` of a hosted block, as sessions see them that keep this dtype."""
        return self._pages[dtype][block - self._span.start]

    def take(self, span: Span, num_pages: int) -> np.ndarray:
        """Return pages that are nobody's in these blocks; CacheFullError if there are too few.

        The lowest: then sessions of different blocks take the same ones, and leave more to those
        that use all blocks.
        """
        (free,) = np.nonzero(~self._is_used_LP[self._find(span)].any(axis=0))
        if len(free) < num_pages:
            raise CacheFullError(
                f"the KV cache has {len(free)} pages free that lie side by side in the blocks of "
                f"the session, {num_pages} more are needed",
                _RETRY_AFTER_SECONDS,
            )
        taken = free[:num_pages]
        self._is_used_LP[self._find(span), taken] = True
        return taken

    def give_back(self, span: Span, pages: np.ndarray) -> None:
        """Take pages back."""
        self._is_used_LP[self._find(span), pages] = False

    def forget(self, memory: "PagedMemory") -> None:
        """Drop the memory of a session that was closed."""
        self._memories.discard(memory)

    def check_integrity(self) -> None:
        """Raise LocalProtocolError unless every used page is in one table of each block."""
        num_users_LP = np.zeros_like(self._is_used_LP, dtype=np.int64)
        for memory in self._memories:
            num_users_P = np.bincount(memory.taken_BM.ravel(), minlength=self.num_pages)
            num_users_LP[self._find(memory.span)] += num_users_P
        if not np.array_equal(num_users_LP, self._is_used_LP):
            raise LocalProtocolError("pages of the KV cache are shared, lost or taken twice")

    def _find(self, span: Span) -> slice:
        return slice(span.start - self._span.start, span.stop - self._span.start)


class PagedMemory(SessionMemory):
    """The pages of one session, the same ones in every block of its span."""

    def __init__(
        self,
        store: PagedStore,
        layout: Layout,
        span: Span,
        num_rows: int,
        max_tokens: int,
        capacity: int,
    ) -> None:
        super().__init__(layout, span, num_rows, max_tokens, capacity)
        self.store = store
        self._pages = [store.pages(block, layout.dtype) for block in range(span.start, span.stop)]
        self.page_tokens = PAGE_TOKENS // layout.dtype.itemsize
        """Tokens of a row in each page."""
        self.taken_BM = np.empty((num_rows, 0), dtype=np.int32)
        """The pages of each row, in the order of its tokens."""
        self._tables_BM: torch.Tensor | None = None

    def reserve(self, num_tokens: int) -> None:
        num_rows, num_taken = self.taken_BM.shape
        num_missing = count_pages(num_tokens, self.page_tokens) - num_taken
        if num_missing > 0:
            pages = self.store.take(self.span, num_rows * num_missing)
            new_BM = pages.reshape(num_rows, num_missing).astype(np.int32)
            self._set_taken(np.concatenate([self.taken_BM, new_BM], axis=1))

    def release_above(self, num_tokens: int) -> None:
        num_kept = count_pages(num_tokens, self.page_tokens)
        self.store.give_back(self.span, self.taken_BM[:, num_kept:].ravel())
        self._set_taken(self.taken_BM[:, :num_kept])

    def release(self) -> None:
        self.release_above(0)
        self.store.forget(self)

    def write_packed(
        self, block: int, position: int, keys_BGTW: torch.Tensor, values_BGTW: torch.Tensor
    ) -> None:
        tables_BM = self._tables()
        stop = position + keys_BGTW.shape[2]
        positions_T = torch.arange(position, stop, device=tables_BM.device)
        pages_BT = tables_BM[:, positions_T // self.page_tokens]
        write_tokens(
            self._pages[block - self.span.start], pages_BT, positions_T % self.page_tokens,
            keys_BGTW.transpose(1, 2), values_BGTW.transpose(1, 2),
        )  # fmt: skip

    def read_packed(self, block: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Gather them: a copy, in one piece for each head."""
        pages_PCGSW = self._pages[block - self.span.start]
        num_pages, _, num_groups, page_tokens, width = pages_PCGSW.shape
        states_HX = pages_PCGSW.view(num_pages * 2 * num_groups, page_tokens * width)
        tables_BM = self._tables()[:, : count_pages(stop, page_tokens)]
        groups_G1 = torch.arange(num_groups, device=tables_BM.device)[:, None]
        keys_BGM = tables_BM[:, None, :] * (2 * num_groups) + groups_G1
        keys_BGSW, values_BGSW = (
            states_HX[heads_BGM].view(self.num_rows, num_groups, -1, width)
            for heads_BGM in (keys_BGM, keys_BGM + num_groups)
        )
        return keys_BGSW, values_BGSW

    def move_rows(self, rows: Sequence[int], sources: Sequence[int], start: int, stop: int) -> None:
        # Whole pages: what they have below `start` is the same, and nobody reads above `stop`.
        columns = slice(start // self.page_tokens, count_pages(stop, self.page_tokens))
        tables_BM = self._tables()[:, columns]
        pages_BM, sources_BM = tables_BM[list(rows)], tables_BM[list(sources)]
        for pages_PCGSW in self._pages:
            pages_PCGSW[pages_BM] = pages_PCGSW[sources_BM]

    def cut_prefix(self, num_tokens: int, piece_bytes: int) -> Iterator[PrefixPiece]:
        """Yield the block and the places in all rows' tables of each piece."""
        num_pages = count_pages(num_tokens, self.page_tokens)
        pages_at_once = max(1, piece_bytes // (self.num_rows * self.store.page_bytes))
        for block in range(len(self._pages)):
            for first in range(0, num_pages, pages_at_once):
                stop = min(first + pages_at_once, num_pages)
                yield slice(block, block + 1), slice(first, stop)

    def copy_piece(self, parent: SessionMemory, piece: PrefixPiece) -> None:
        assert isinstance(parent, PagedMemory)
        blocks, places = piece
        ours_BM, theirs_BM = self._tables()[:, places], parent._tables()[:, places]
        for pages_PCGSW in self._pages[blocks]:
            pages_PCGSW[ours_BM] = pages_PCGSW[theirs_BM]

    def check_integrity(self, num_tokens: int) -> None:
        if self.taken_BM.shape[1] != count_pages(num_tokens, self.page_tokens):
            raise LocalProtocolError(
                f"{num_tokens} tokens have {self.taken_BM.shape[1]} pages of {self.page_tokens}"
            )

    def _set_taken(self, taken_BM: np.ndarray) -> None:
        self.taken_BM = taken_BM
        self._tables_BM = None

    def _tables(self) -> torch.Tensor:
        """Return the pages of each row where the pages are."""
        if self._tables_BM is None:
            tables_BM = torch.from_numpy(self.taken_BM.astype(np.int64))
            self._tables_BM = tables_BM.to(self._pages[0].device)
        return self._tables_BM


def write_tokens(
    pages_PCGSW: torch.Tensor,
    pages_N: torch.Tensor,
    places_N: torch.Tensor,
    keys_NGW: torch.Tensor,
    values_NGW: torch.Tensor,
) -> None:
    """Write tokens of a block to their places in their pages. N may stand for several dimensions.

    W may be smaller than that of the pages: the rest of each place is left alone.
    """
    width = keys_NGW.shape[-1]
    for kind, states_NGW in enumerate((keys_NGW, values_NGW)):
        pages_PCGSW[:, kind][pages_N, :, places_N, :width] = states_NGW
