"""How the keys and values of a session lie in memory, for each format that it may be opened with.

Tensor suffixes: D head size, W elements that a layout has for them.
"""

import torch

from ...kernels.int8_states import count_record_bytes, dequantize_states, quantize_states
from ...protocol.tensors import KVFormat


class FloatLayout:
    """As they are, in the dtype of the activations."""

    def __init__(self, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.width = head_dim
        self.token_bytes = 2 * num_kv_heads * head_dim * dtype.itemsize
        """Bytes of keys and values of one token of one row in one block."""

    def pack(self, states_D: torch.Tensor) -> torch.Tensor:
        """Return what is kept of keys or values, [..., W]."""
        return states_D

    def unpack(self, packed_W: torch.Tensor) -> torch.Tensor:
        """Return what attention reads, [..., D]."""
        return packed_W


class Int8Layout:
    """As records of 8-bit integers."""

    dtype = torch.int8

    def __init__(self, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
        self.width = count_record_bytes(head_dim)
        self.token_bytes = 2 * num_kv_heads * self.width
        self._head_dim = head_dim
        self._float_dtype = dtype

    def pack(self, states_D: torch.Tensor) -> torch.Tensor:
        """Return what is kept of keys or values, [..., W]."""
        return quantize_states(states_D)

    def unpack(self, packed_W: torch.Tensor) -> torch.Tensor:
        """Return what attention reads, [..., D]."""
        return dequantize_states(packed_W, self._head_dim, self._float_dtype)


Layout = FloatLayout | Int8Layout

LAYOUTS: dict[KVFormat, type[FloatLayout] | type[Int8Layout]] = {
    KVFormat.FLOAT: FloatLayout,
    KVFormat.INT8: Int8Layout,
}
