"""Picks the kernels of this process, once, by what the processor has."""

from functools import cache

from . import int8_native, int8_torch
from .int8 import Int8Kernel


def list_int8_kernels() -> list[Int8Kernel]:
    """Return every int8 kernel that runs here, fastest first. All compute the same bits."""
    return [*int8_native.list_kernels(), int8_torch.make_kernel()]


@cache
def choose_int8_kernel() -> Int8Kernel:
    """Return the kernel that every int8 linear of this process uses."""
    return list_int8_kernels()[0]
