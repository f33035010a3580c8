"""Where keys and values of sessions lie: the seam between the account of bytes and the memory.

`kv_cache` and `kv_pool` count tokens, pages and bytes, whatever the memory. On the CPU it is
`lazy_memory`, on other devices `paged_memory`.

Tensor suffixes: B rows of a session, G key-value heads, T tokens of a step, S tokens, W elements
that a layout has for a token in one head.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence

import torch

from ....protocol.spans import Span
from ....protocol.tensors import KVFormat
from .kv_layouts import Layout

PAGE_TOKENS = 64
"""Memory is handed out for so many tokens at a time."""

Piece = tuple[slice, slice]
"""A part of a prefix; of what, only the memory knows that cut it."""


class SessionMemory(ABC):
    """What one session keeps in the blocks of its span, which are counted from 0 here.

    Tokens that were reserved may be written and read. What a token holds that was never written is
    anything, and so is what it held before it was given back.
    """

    def __init__(self, layout: Layout, num_rows: int, capacity: int) -> None:
        self.layout = layout
        self.num_rows = num_rows
        self.capacity = capacity
        """The most tokens that each row may ever have."""

    @abstractmethod
    def reserve(self, num_tokens: int) -> None:
        """Have memory for so many tokens of each row; CacheFullError if there is none."""

    @abstractmethod
    def release_above(self, num_tokens: int) -> None:
        """Give back what is reserved for the tokens of each row from this one on."""

    @abstractmethod
    def release(self) -> None:
        """Give everything back, for good."""

    @abstractmethod
    def write(
        self, block: int, position: int, keys_BGTW: torch.Tensor, values_BGTW: torch.Tensor
    ) -> None:
        """Write keys and values of a block, as its layout packed them, from `position` on."""

    @abstractmethod
    def read(self, block: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of a block, [B, G, S, W], where S is `stop` or more."""

    @abstractmethod
    def move_rows(self, rows: Sequence[int], sources: Sequence[int], start: int, stop: int) -> None:
        """Have each of the `rows` be what its source was, from token `start` to `stop`.

        Below `start` they are the same already, and above `stop` it does not matter.
        """

    @abstractmethod
    def cut_prefix(self, num_tokens: int, piece_bytes: int) -> Iterator[Piece]:
        """Yield what the first tokens are copied in: pieces of so many bytes, or the least."""

    @abstractmethod
    def copy_piece(self, parent: "SessionMemory", piece: Piece) -> None:
        """Copy a piece from the memory of a session with the same rows, blocks and layout."""

    @abstractmethod
    def check_integrity(self, num_tokens: int) -> None:
        """Raise LocalProtocolError unless this is what is reserved (a bug of ours)."""


class KVStore(ABC):
    """The memory of all sessions of one engine. `layouts` say what a token of theirs takes."""

    def __init__(self, num_blocks: int, dtype: torch.dtype, layouts: Mapping[KVFormat, Layout]):
        self.num_blocks = num_blocks
        self.dtype = dtype
        self.layouts = layouts

    @abstractmethod
    def open(self, span: Span, num_rows: int, num_pages: int, kv_format: KVFormat) -> SessionMemory:
        """Return memory for rows of `num_pages` pages at most; nothing is reserved yet."""

    @abstractmethod
    def check_integrity(self) -> None:
        """Raise LocalProtocolError if sessions share what is nobody else's (a bug of ours)."""


def count_pages(num_tokens: int, page_tokens: int = PAGE_TOKENS) -> int:
    """Return how many pages hold so many tokens."""
    return -(-num_tokens // page_tokens)
