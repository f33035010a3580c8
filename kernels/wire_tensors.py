"""Tensors to wire bytes and back, and the tensors of a replay joined.

Knows lengths and layouts, nothing of frames or of trust.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

DTYPES: Mapping[str, torch.dtype] = {
    "FP32": torch.float32,
    "FP16": torch.float16,
    "BF16": torch.bfloat16,
}
"""Dtypes that travel unchanged; the names are those of the wire protocol."""

INT8 = "INT8"
"""The encoding that rounds to 8 bits; its name in the wire protocol."""

INT8_GROUP = 64
"""How many numbers share a scale, as the wire protocol has it."""

_LARGEST_INT8 = 127

FEW_ELEMENTS = 2**20
"""To copy them takes less than to ask torch for each of many tensors."""

# Integers of the same width as each element carry its bits: numpy has no bfloat16.
_CARRIERS: dict[torch.dtype, tuple[torch.dtype, str]] = {
    torch.float32: (torch.int32, "<i4"),
    torch.float16: (torch.int16, "<i2"),
    torch.bfloat16: (torch.int16, "<i2"),
}


def encode_tensor(tensor: Tensor) -> bytes:
    """Return the wire bytes of a float32, float16 or bfloat16 tensor of any layout.

    They are its elements, little-endian, in C order. Raises ValueError for another dtype.

    >>> encode_tensor(torch.tensor([1.0, -2.0])).hex()
    '0000803f000000c0'
    """
    carrier, layout = _carrier(tensor.dtype)
    bits = tensor.detach().to("cpu").view(carrier)
    return bits.numpy().astype(layout, copy=False).tobytes()


def decode_tensor(buffer: bytes | memoryview, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Return the tensor that `buffer` holds; it owns its memory.

    Raises ValueError, before anything is allocated, if the length contradicts the shape or the
    dtype is unknown. Values are not looked at: see `has_only_finite`.

    >>> decode_tensor(bytes.fromhex("0000803f000000c0"), torch.float32, (1, 2)).tolist()
    [[1.0, -2.0]]
    """
    carrier, layout = _carrier(dtype)
    if any(size < 0 for size in shape):
        raise ValueError(f"a shape has no negative sizes, got {shape}")
    expected = math.prod(shape) * carrier.itemsize
    actual = memoryview(buffer).nbytes
    if actual != expected:
        raise ValueError(f"{shape} of {dtype} takes {expected} bytes, the buffer has {actual}")
    # A copy, so that the frame's buffer can go and nobody can write through the tensor into it.
    bits = np.frombuffer(buffer, dtype=layout).astype(layout[1:], copy=True)
    return torch.from_numpy(bits).view(dtype).reshape(shape)


def encode_as(name: str, tensor: Tensor) -> bytes:
    """Return the bytes of floats as one of DTYPES, or as INT8."""
    return encode_int8(tensor) if name == INT8 else encode_tensor(tensor.to(DTYPES[name]))


def decode_as(name: str, buffer: bytes | memoryview, shape: tuple[int, ...]) -> Tensor:
    """Return the tensor that `encode_as` has made bytes of; see `decode_tensor`."""
    if name == INT8:
        return decode_int8(buffer, shape)
    return decode_tensor(buffer, DTYPES[name], shape)


def choose_decoded_dtype(name: str) -> torch.dtype:
    """Return the dtype that `decode_as` returns for a name."""
    return torch.float32 if name == INT8 else DTYPES[name]


def encode_int8(tensor: Tensor, generator: torch.Generator | None = None) -> bytes:
    """Return floats as 8-bit integers behind the scales of all groups, in bfloat16.

    A group is INT8_GROUP neighbours in a row. What was decoded becomes the same bytes again: a
    scale of 8 bits times an integer of 7 is exact in float32. A group with NaN or infinities is
    decoded with NaN. With a generator, a number is rounded up with the probability that is its
    distance from the integer below, so that the mean error is 0 (stochastic rounding).

    >>> decode_int8(encode_int8(torch.tensor([[127.0, -2.4]])), (1, 2)).tolist()
    [[127.0, -2.0]]
    """
    width = tensor.shape[-1]
    rest = -width % INT8_GROUP
    floats = torch.nn.functional.pad(tensor.detach().to("cpu", torch.float32), (0, rest))
    groups = floats.unflatten(-1, (-1, INT8_GROUP))
    scales = (groups.abs().amax(-1) / _LARGEST_INT8).bfloat16()
    divisors = scales.float().masked_fill(scales == 0, 1.0).unsqueeze(-1)
    integers = (groups / divisors).nan_to_num(0.0)
    if generator is None:
        integers.round_()
    else:
        integers.add_(torch.rand(integers.shape, generator=generator)).floor_()
    integers.clamp_(-_LARGEST_INT8, _LARGEST_INT8)
    numbers = integers.to(torch.int8).flatten(-2)[..., :width]
    return encode_tensor(scales) + numbers.contiguous().numpy().tobytes()


def decode_int8(buffer: bytes | memoryview, shape: tuple[int, ...]) -> Tensor:
    """Return the float32 tensor that `encode_int8` has made bytes of; see `decode_tensor`."""
    *lengths, width = shape
    num_groups = math.ceil(width / INT8_GROUP)
    view = memoryview(buffer).cast("B")
    num_scale_bytes = math.prod(lengths) * num_groups * torch.bfloat16.itemsize
    expected = num_scale_bytes + math.prod(shape)
    if min(shape) < 0 or view.nbytes != expected:
        raise ValueError(f"{shape} in int8 takes {expected} bytes, the buffer has {view.nbytes}")
    scales = decode_tensor(view[:num_scale_bytes], torch.bfloat16, (*lengths, num_groups))
    integers = np.frombuffer(view[num_scale_bytes:], dtype="i1").reshape(shape)
    wide_scales = scales.float().repeat_interleave(INT8_GROUP, dim=-1)[..., :width]
    return torch.from_numpy(integers.astype("<f4")) * wide_scales


def has_only_finite(tensor: Tensor) -> bool:
    """Return whether no element is NaN or infinite.

    One pass without a temporary, some twenty times faster than `isfinite().all()` at 2 M bfloat16.
    """
    if tensor.numel() == 0:
        return True
    # NaN wins both extremes, an infinity is one of them.
    low, high = torch.aminmax(tensor)
    return math.isfinite(low.item()) and math.isfinite(high.item())


def list_finite(tensors: Sequence[Tensor]) -> list[bool]:
    """Return for each whether `has_only_finite`; few elements are looked at all together first."""
    are_few = len(tensors) > 1 and sum(tensor.numel() for tensor in tensors) <= FEW_ELEMENTS
    if are_few and has_only_finite(torch.cat([tensor.flatten() for tensor in tensors])):
        return [True] * len(tensors)
    return [has_only_finite(tensor) for tensor in tensors]


def _carrier(dtype: torch.dtype) -> tuple[torch.dtype, str]:
    if dtype not in _CARRIERS:
        raise ValueError(f"{dtype} does not travel; use float32, float16 or bfloat16")
    return _CARRIERS[dtype]


class Piece(Protocol):
    """Rows and tokens to take of a tensor; see `ReplayPiece` in `protocol/session/`."""

    @property
    def num_tokens(self) -> int: ...
    @property
    def is_decoded(self) -> bool: ...
    @property
    def rows(self) -> tuple[int, ...] | None: ...
    @property
    def payload(self) -> Tensor: ...


def join_pieces(group: Sequence[Piece]) -> Tensor:
    """Return a group of pieces as hidden states [B, T, H]; a piece of a prompt is taken whole."""
    parts = [_select(piece) for piece in group]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _select(piece: Piece) -> Tensor:
    hidden_BTH = piece.payload[:, : piece.num_tokens] if piece.is_decoded else piece.payload
    return hidden_BTH if piece.rows is None else hidden_BTH[list(piece.rows)]
