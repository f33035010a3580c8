"""Generated tokens whose sessions keep their caches in pages, laid out for attention over these.

Tensor suffixes: N tokens, each of another row of a session or behind another one of it; M pages of
a row; G key-value heads; D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from ....kernels.attention.rotary import RotaryTable
from ..cache.kv_memory import Layout, count_pages
from ..cache.paged_memory import PagedMemory, PagedStore, write_tokens

if TYPE_CHECKING:
    from .rows import Rotation, Segment


@dataclass(frozen=True)
class PagedRows:
    """Tokens of sessions with caches of one format; its tensors are where the pages are.

    `places` says which rows of the batch they are. Token `n` is at `positions_N[n]` of its row and
    sees the first `lengths_N[n]` keys of it: 0 if it stands for nobody's token.
    """

    places: slice | torch.Tensor
    store: PagedStore
    layout: Layout
    positions_N: torch.Tensor
    tables_NM: torch.Tensor
    lengths_N: torch.Tensor
    rotations: tuple[Rotation, ...]

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


def lay_out_in_pages(segments: Sequence[Segment], rotary: Sequence[RotaryTable]) -> list[PagedRows]:
    """Lay out the segments of each format together."""
    layouts = list({id(layout): layout for layout in map(_find_layout, segments)}.values())
    return [
        _lay_out([each for each in segments if _find_layout(each) is layout], rotary, len(layouts))
        for layout in layouts
    ]


def _find_layout(segment: Segment) -> Layout:
    return segment.cache.memory.layout


def _lay_out(
    segments: Sequence[Segment], rotary: Sequence[RotaryTable], num_layouts: int
) -> PagedRows:
    memories: list[PagedMemory] = []
    for segment in segments:
        memory = segment.cache.memory
        assert isinstance(memory, PagedMemory)
        memories.append(memory)
    store, layout = memories[0].store, memories[0].layout
    positions_N = np.concatenate([_list_positions(segment) for segment in segments])
    num_pages = count_pages(int(positions_N.max()) + 1, memories[0].page_tokens)
    tables_NM = np.full((len(positions_N), num_pages), store.nobodys_page, dtype=np.int32)
    first = 0
    for segment, memory in zip(segments, memories, strict=True):
        taken_BM = memory.taken_BM[:, :num_pages]
        stop = first + segment.num_rows * segment.num_tokens
        tables_NM[first:stop, : taken_BM.shape[1]] = taken_BM.repeat(segment.num_tokens, axis=0)
        first = stop
    device = store.device
    positions_on_device_N = torch.from_numpy(positions_N).to(device)
    return PagedRows(
        _find_places(segments, num_layouts, device),
        store,
        layout,
        positions_on_device_N,
        torch.from_numpy(tables_NM).to(device),
        (positions_on_device_N + 1).to(torch.int32),
        tuple(table.select(positions_on_device_N) for table in rotary),
    )


def _list_positions(segment: Segment) -> np.ndarray:
    positions_T = np.arange(segment.position, segment.position + segment.num_tokens)
    return np.tile(positions_T, segment.num_rows)


def _find_places(
    segments: Sequence[Segment], num_layouts: int, device: torch.device
) -> slice | torch.Tensor:
    """Return which rows these are; where all have one layout, they lie side by side."""
    if num_layouts == 1:
        return slice(segments[0].start, segments[-1].stop)
    rows = [np.arange(segment.start, segment.stop) for segment in segments]
    return torch.from_numpy(np.concatenate(rows)).to(device)
