"""Tells glibc's allocator how to treat large tensors; does nothing where there is no glibc."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

# Parameters of mallopt(3) and the values that glibc's own dynamic rule would settle at.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_LOADING_MMAP_BYTES = 2**20
_SERVING_MMAP_BYTES = 32 * 2**20
_SERVING_TRIM_BYTES = 64 * 2**20


@contextmanager
def keep_large_tensors_apart() -> Iterator[None]:
    """Inside, memory of dropped tensors over 1 MiB returns to the system at once.

    Loading drops a float copy of every weight that it keeps in 8 bits. In one heap these leave
    holes between the weights: half as much again for the benchmark model. Serving wants the
    opposite, since fresh pages cost more than the product that is computed in them.
    """
    _set(_M_MMAP_THRESHOLD, _LOADING_MMAP_BYTES)
    try:
        yield
    finally:
        _set(_M_MMAP_THRESHOLD, _SERVING_MMAP_BYTES)
        _set(_M_TRIM_THRESHOLD, _SERVING_TRIM_BYTES)


def _set(parameter: int, value: int) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(parameter, value)
