"""Activations and gradients of parts as bytes: exact, or as 8-bit integers.

Integers of 8 bits come in groups of 64 with one scale, padded to whole elements of four bytes.
"""

from __future__ import annotations

import math

import torch
from torch import Generator, Tensor

from ....kernels.wire_tensors import decode_int8, decode_tensor, encode_int8, encode_tensor
from ....protocol.runs.training_run import Mode
from ....protocol.tensors import WireDtype, compute_num_bytes

_ELEMENT_BYTES = 4


def count_bytes(mode: Mode, shape: tuple[int, int, int]) -> int:
    """Return how many bytes activations of this shape take."""
    dtype = WireDtype.FP32 if mode == "exact" else WireDtype.INT8
    return _round_up(compute_num_bytes(dtype, *shape), _ELEMENT_BYTES)


def encode(mode: Mode, tensor: Tensor, generator: Generator | None = None) -> bytes:
    """Return the bytes of float32 numbers; int8 rounds stochastically by the generator, if any."""
    if mode == "exact":
        return encode_tensor(tensor)
    data = encode_int8(tensor, generator)
    return data.ljust(_round_up(len(data), _ELEMENT_BYTES), b"\0")


def decode(mode: Mode, data: bytes | memoryview, shape: tuple[int, ...]) -> Tensor:
    """Return the numbers that `encode` has made bytes of, as many bytes as `count_bytes` says."""
    if mode == "exact":
        return decode_tensor(data, torch.float32, shape)
    *rows, width = shape
    num_bytes = math.prod(rows) * compute_num_bytes(WireDtype.INT8, 1, 1, width)
    return decode_int8(memoryview(data)[:num_bytes], shape)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
