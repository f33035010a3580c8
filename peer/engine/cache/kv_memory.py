"""The interface of KV memory: where and in which format keys and values of sessions lie.

`kv_cache` counts tokens, pages and bytes, whatever the memory is. On the CPU it is
`lazy_memory`, on other devices `paged_memory`.

Tensor suffixes: B rows of a session, G key-value heads, T tokens of a step, S tokens, D head size,
W elements that a layout has for a token in one head.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from ....kernels.attention.int8_kv import count_record_bytes, dequantize_kv, quantize_kv
from ....protocol.spans import Span
from ....protocol.tensors import KVFormat

PAGE_TOKENS = 64
"""Memory is handed out for so many tokens at a time."""

UNPACKED_BYTES = 2**23
"""Integers are unpacked to so many bytes of floats at a time, or to one head of one row if that
takes more. No budget counts these floats: one session's, in one block, gone before the next."""


class Heads(NamedTuple):
    """Some of a session's key-value heads, in some of its rows."""

    rows: slice
    heads: slice


class FloatLayout:
    """Floats in the dtype of the activations; a `width` above the head size leaves gaps."""

    def __init__(
        self, num_kv_heads: int, head_dim: int, dtype: torch.dtype, width: int | None = None
    ) -> None:
        self.dtype = dtype
        self.width = width or head_dim
        self._num_heads = num_kv_heads
        self._head_dim = head_dim
        self.token_bytes = 2 * num_kv_heads * self.width * dtype.itemsize
        """Bytes of keys and values of one token of one row in one block."""

    def pack(self, states_D: torch.Tensor) -> torch.Tensor:
        """Return what is kept of keys or values, [..., W or fewer]."""
        return states_D

    def unpack(self, packed_BGSW: torch.Tensor) -> torch.Tensor:
        """Return what attention reads, [B, G, S, D]."""
        states_BGSD = packed_BGSW[..., : self._head_dim]
        # Torch's attention on a device reads rows 16 bytes at a time and trusts that they begin at
        # a multiple: behind gaps it fails, or reads what is not there.
        return states_BGSD if self.width == self._head_dim else states_BGSD.contiguous()

    def cut(self, num_rows: int, max_tokens: int) -> Iterator[Heads]:
        """Yield which heads of which rows attention should read at once: all of them."""
        yield Heads(slice(0, num_rows), slice(0, self._num_heads))


class Int8Layout:
    """Records of 8-bit integers; a `width` above theirs leaves gaps."""

    dtype = torch.int8

    def __init__(
        self, num_kv_heads: int, head_dim: int, dtype: torch.dtype, width: int | None = None
    ) -> None:
        self.width = width or count_record_bytes(head_dim)
        self._num_heads = num_kv_heads
        self.token_bytes = 2 * num_kv_heads * self.width
        self._head_dim = head_dim
        self._float_dtype = dtype

    def pack(self, states_D: torch.Tensor) -> torch.Tensor:
        """Return what is kept of keys or values, [..., W]."""
        return quantize_kv(states_D)

    def unpack(self, packed_BGSW: torch.Tensor) -> torch.Tensor:
        """Return what attention reads, [B, G, S, D]."""
        return dequantize_kv(packed_BGSW, self._head_dim, self._float_dtype)

    def cut(self, num_rows: int, max_tokens: int) -> Iterator[Heads]:
        """Yield which heads of which rows attention should read at once, so that they fit.

        The cut depends on the session's limit, not on its present length: torch may round
        differently for another number of heads, and a replay must reproduce the result.
        """
        head_bytes = 2 * max_tokens * self._head_dim * self._float_dtype.itemsize
        heads_at_once = min(self._num_heads, max(1, UNPACKED_BYTES // head_bytes))
        rows_at_once = max(1, UNPACKED_BYTES // (self._num_heads * head_bytes))
        for row in range(0, num_rows, rows_at_once):
            for head in range(0, self._num_heads, heads_at_once):
                yield Heads(
                    slice(row, min(row + rows_at_once, num_rows)),
                    slice(head, min(head + heads_at_once, self._num_heads)),
                )


Layout = FloatLayout | Int8Layout

LAYOUTS: dict[KVFormat, type[FloatLayout] | type[Int8Layout]] = {
    KVFormat.FLOAT: FloatLayout,
    KVFormat.INT8: Int8Layout,
}

PrefixPiece = tuple[slice, slice]
"""A part of a prefix, in indices that only the memory that cut it understands."""


class SessionMemory(ABC):
    """Keys and values of one session in the blocks of its span.

    Reserved tokens may be written and read. Tokens that were never written, or were released in
    between, have arbitrary contents.
    """

    def __init__(
        self, layout: Layout, span: Span, num_rows: int, max_tokens: int, capacity: int
    ) -> None:
        self.layout = layout
        self.span = span
        self.num_rows = num_rows
        self.max_tokens = max_tokens
        """The tokens of each row that the session was opened for."""
        self.capacity = capacity
        """The tokens of each row that there may ever be memory for."""

    def write(
        self, block: int, position: int, keys_BGTD: torch.Tensor, values_BGTD: torch.Tensor
    ) -> None:
        """Write keys and values of a block from `position` on."""
        pack = self.layout.pack
        self.write_packed(block, position, pack(keys_BGTD), pack(values_BGTD))

    def read(self, block: int, stop: int) -> Iterator[tuple[Heads, torch.Tensor, torch.Tensor]]:
        """Yield keys and values of a block up to `stop`, of some heads after others.

        The newest tokens also come back as they are kept, so the time of reading does not matter.
        """
        keys_BGSW, values_BGSW = self.read_packed(block, stop)
        for heads in self.layout.cut(self.num_rows, self.max_tokens):
            yield (
                heads,
                self.layout.unpack(keys_BGSW[*heads, :stop]),
                self.layout.unpack(values_BGSW[*heads, :stop]),
            )

    def put(
        self, block: int, position: int, keys_BGTD: torch.Tensor, values_BGTD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write keys and values; return all up to them, as `read` does, but in one piece.

        Integers of a whole block become floats, which no budget counts.
        """
        self.write(block, position, keys_BGTD, values_BGTD)
        stop = position + keys_BGTD.shape[2]
        keys_BGSD, values_BGSD = (
            self.layout.unpack(states_BGSW[:, :, :stop])
            for states_BGSW in self.read_packed(block, stop)
        )
        return keys_BGSD, values_BGSD

    @abstractmethod
    def reserve(self, num_tokens: int) -> None:
        """Reserve memory for so many tokens of each row; raises CacheFullError if there is none."""

    @abstractmethod
    def release_above(self, num_tokens: int) -> None:
        """Release what is reserved for the tokens of each row from this one on."""

    @abstractmethod
    def release(self) -> None:
        """Release everything, for good."""

    @abstractmethod
    def write_packed(
        self, block: int, position: int, keys_BGTW: torch.Tensor, values_BGTW: torch.Tensor
    ) -> None:
        """Write keys and values of a block, as the layout packed them, from `position` on."""

    @abstractmethod
    def read_packed(self, block: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of a block, [B, G, S, W], where S is `stop` or more."""

    @abstractmethod
    def move_rows(self, rows: Sequence[int], sources: Sequence[int], start: int, stop: int) -> None:
        """Copy each source row into its row of `rows`, from token `start` to `stop`.

        Below `start` they are the same already; tokens above `stop` are not read.
        """

    @abstractmethod
    def cut_prefix(self, num_tokens: int, piece_bytes: int) -> Iterator[PrefixPiece]:
        """Yield the pieces in which the first tokens are copied: of so many bytes, or the least."""

    @abstractmethod
    def copy_piece(self, parent: "SessionMemory", piece: PrefixPiece) -> None:
        """Copy a piece from the memory of a session with the same rows, blocks and layout."""

    @abstractmethod
    def check_integrity(self, num_tokens: int) -> None:
        """Raise LocalProtocolError unless exactly this is reserved (a bug of ours)."""


class KVStore(ABC):
    """The memory of all sessions of one engine. `layouts` say what one token takes."""

    most_bytes: int | None = None
    """All that there is, where it is allocated at once."""

    def __init__(self, num_blocks: int, dtype: torch.dtype, layouts: Mapping[KVFormat, Layout]):
        self.num_blocks = num_blocks
        self.dtype = dtype
        self.layouts = layouts

    @abstractmethod
    def open(
        self, span: Span, num_rows: int, max_tokens: int, num_pages: int, kv_format: KVFormat
    ) -> SessionMemory:
        """Return memory for rows of at most `num_pages` pages; nothing is reserved yet."""

    @abstractmethod
    def check_integrity(self) -> None:
        """Raise LocalProtocolError if two sessions share memory (a bug of ours)."""


def count_pages(num_tokens: int, page_tokens: int = PAGE_TOKENS) -> int:
    """Return how many pages hold so many tokens."""
    return -(-num_tokens // page_tokens)
