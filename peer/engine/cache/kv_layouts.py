"""How the keys and values of a session lie in memory, for each format that it may be opened with.

Tensor suffixes: B rows, G key-value heads, S tokens, D head size, W elements that a layout has for
them.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from ....kernels.attention.int8_states import count_record_bytes, dequantize_states, quantize_states
from ....protocol.tensors import KVFormat

UNPACKED_BYTES = 2**23
"""Of integers so many bytes are floats at a time, or one head of one row if that takes more. No
budget counts them, for they are one session's, in one block, and gone before the next."""


class Heads(NamedTuple):
    """Some of a session's key-value heads, in some of its rows."""

    rows: slice
    heads: slice


class FloatLayout:
    """As they are, in the dtype of the activations; a `width` above the head size leaves gaps."""

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
        return packed_BGSW[..., : self._head_dim]

    def cut(self, num_rows: int, max_tokens: int) -> Iterator[Heads]:
        """Yield which heads of which rows attention should read at once: all of them."""
        yield Heads(slice(0, num_rows), slice(0, self._num_heads))


class Int8Layout:
    """As records of 8-bit integers."""

    dtype = torch.int8

    def __init__(self, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
        self.width = count_record_bytes(head_dim)
        self._num_heads = num_kv_heads
        self.token_bytes = 2 * num_kv_heads * self.width
        self._head_dim = head_dim
        self._float_dtype = dtype

    def pack(self, states_D: torch.Tensor) -> torch.Tensor:
        """Return what is kept of keys or values, [..., W]."""
        return quantize_states(states_D)

    def unpack(self, packed_BGSW: torch.Tensor) -> torch.Tensor:
        """Return what attention reads, [B, G, S, D]."""
        return dequantize_states(packed_BGSW, self._head_dim, self._float_dtype)

    def cut(self, num_rows: int, max_tokens: int) -> Iterator[Heads]:
        """Yield which heads of which rows attention should read at once, so that they fit.

        That follows from the session alone, not from how long it is by now: torch need not round
        alike for other numbers of heads, and a replay has to.
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
