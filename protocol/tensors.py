"""Dtype and shape of a tensor on the wire, as bounded numbers."""

import math
from dataclasses import dataclass
from enum import IntEnum

from . import limits


class WireDtype(IntEnum):
    """Element type of a tensor on the wire."""

    FP32 = 1
    FP16 = 2
    BF16 = 3

    INT8 = 4
    """8-bit integers. The numbers of each row and token are taken in groups of INT8_GROUP, the last
    one maybe smaller, and the integers of each times its scale are the numbers. First come the
    scales of all groups, in BF16, then all integers."""


class KVFormat(IntEnum):
    """How a peer keeps the keys and values of a session."""

    FLOAT = 0
    """In the dtype of the peer's activations; what is meant where nothing is said."""

    INT8 = 1
    """As 8-bit integers, with one scale for each token, key-value head and side."""


ELEMENT_BYTES = {WireDtype.FP32: 4, WireDtype.FP16: 2, WireDtype.BF16: 2, WireDtype.INT8: 1}
"""Of the elements alone, without the scales of INT8."""

INT8_GROUP = 64
"""How many numbers share a scale. A few hidden states of each token are a hundred times as large as
the others: only their own group is rounded as coarsely as they are."""

_SCALE_BYTES = 2

_MAX_SHAPE = (limits.MAX_BATCH_ROWS, limits.MAX_STEP_TOKENS, limits.MAX_HIDDEN_SIZE)


@dataclass(frozen=True, slots=True)
class WireTensor:
    """A tensor of shape (rows, tokens, width) as it travels.

    `data` are the elements, C-contiguous and little-endian.
    """

    dtype: WireDtype
    rows: int
    tokens: int
    width: int
    data: bytes | memoryview

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return (rows, tokens, width)."""
        return self.rows, self.tokens, self.width


def compute_num_bytes(dtype: WireDtype, rows: int, tokens: int, width: int) -> int:
    """Return how many bytes a raw tensor of this shape has.

    >>> compute_num_bytes(WireDtype.BF16, 2, 3, 8)
    96
    >>> compute_num_bytes(WireDtype.INT8, 2, 3, 65)
    414
    """
    token_bytes = width * ELEMENT_BYTES[dtype]
    if dtype is WireDtype.INT8:
        token_bytes += _SCALE_BYTES * math.ceil(width / INT8_GROUP)
    return rows * tokens * token_bytes


def check_tensor(tensor: WireTensor) -> None:
    """Raise ValueError unless shape and length are within bounds and fit each other.

    >>> check_tensor(WireTensor(WireDtype.FP32, 1, 1, 3, bytes(8)))
    Traceback (most recent call last):
    ...
    ValueError: a 1x1x3 tensor has 12 bytes, not 8
    """
    rows, tokens, width = tensor.rows, tensor.tokens, tensor.width
    most_rows, most_tokens, most_width = _MAX_SHAPE
    if not (0 < rows <= most_rows and 0 < tokens <= most_tokens and 0 < width <= most_width):
        raise ValueError(f"tensor shape {rows}x{tokens}x{width} is outside {_MAX_SHAPE}")
    expected = compute_num_bytes(tensor.dtype, rows, tokens, width)
    num_bytes = memoryview(tensor.data).nbytes
    if num_bytes != expected:
        raise ValueError(f"a {rows}x{tokens}x{width} tensor has {expected} bytes, not {num_bytes}")
