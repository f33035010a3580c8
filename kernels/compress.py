"""Tensors to wire bytes and back. Knows lengths and layouts, nothing of frames or of trust."""

import math
from collections.abc import Mapping
from enum import IntEnum

import numpy as np
import torch
from torch import Tensor


class Codec(IntEnum):
    """How the elements of a tensor become bytes; the numbers are those of the wire protocol."""

    RAW = 1
    """The elements themselves, little-endian, in C order."""


DTYPES: Mapping[str, torch.dtype] = {
    "FP32": torch.float32,
    "FP16": torch.float16,
    "BF16": torch.bfloat16,
}
"""What travels; the names are those of the wire protocol."""

# Integers of the same width as each element carry its bits: numpy has no bfloat16.
_CARRIERS: dict[torch.dtype, tuple[torch.dtype, str]] = {
    torch.float32: (torch.int32, "<i4"),
    torch.float16: (torch.int16, "<i2"),
    torch.bfloat16: (torch.int16, "<i2"),
}


def encode_tensor(tensor: Tensor, codec: Codec = Codec.RAW) -> bytes:
    """Return the wire bytes of a float32, float16 or bfloat16 tensor of any layout.

    Raises ValueError for another dtype or codec.

    >>> encode_tensor(torch.tensor([1.0, -2.0])).hex()
    '0000803f000000c0'
    """
    carrier, layout = _carrier(tensor.dtype, codec)
    bits = tensor.detach().to("cpu").view(carrier)
    return bits.numpy().astype(layout, copy=False).tobytes()


def decode_tensor(
    buffer: bytes | memoryview,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    codec: Codec = Codec.RAW,
) -> Tensor:
    """Return the tensor that `buffer` holds; it owns its memory.

    Raises ValueError, before anything is allocated, if the length contradicts the shape or the
    dtype or codec is unknown. Values are not looked at: see `has_only_finite`.

    >>> decode_tensor(bytes.fromhex("0000803f000000c0"), torch.float32, (1, 2)).tolist()
    [[1.0, -2.0]]
    """
    carrier, layout = _carrier(dtype, codec)
    if any(size < 0 for size in shape):
        raise ValueError(f"a shape has no negative sizes, got {shape}")
    expected = math.prod(shape) * carrier.itemsize
    actual = memoryview(buffer).nbytes
    if actual != expected:
        raise ValueError(f"{shape} of {dtype} takes {expected} bytes, the buffer has {actual}")
    # A copy, so that the frame's buffer can go and nobody can write through the tensor into it.
    bits = np.frombuffer(buffer, dtype=layout).astype(layout[1:], copy=True)
    return torch.from_numpy(bits).view(dtype).reshape(shape)


def has_only_finite(tensor: Tensor) -> bool:
    """Return whether no element is NaN or infinite.

    One pass without a temporary, some twenty times faster than `isfinite().all()` at 2 M bfloat16.
    """
    if tensor.numel() == 0:
        return True
    # NaN wins both extremes, an infinity is one of them.
    low, high = torch.aminmax(tensor)
    return math.isfinite(low.item()) and math.isfinite(high.item())


def _carrier(dtype: torch.dtype, codec: Codec) -> tuple[torch.dtype, str]:
    if codec is not Codec.RAW:
        raise ValueError(f"unknown codec {codec!r}")
    if dtype not in _CARRIERS:
        raise ValueError(f"{dtype} does not travel; use float32, float16 or bfloat16")
    return _CARRIERS[dtype]
