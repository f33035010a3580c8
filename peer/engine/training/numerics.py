"""What makes machines compute the same bits, and how to find out whether two of them do."""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.deterministic
from torch import Tensor

_SETTINGS: Any = torch.utils.deterministic
"""Whose attribute torch declares in a way that type checkers do not see."""

_BF16_CAPABILITIES = ("avx512_bf16", "amx_bf16", "bf16")
"""Torch's names for them; the last one is ARM's."""

_changing_settings = threading.RLock()
"""Torch's settings belong to the process: whoever trains keeps others from changing them."""

_NUMBERS_AT_ONCE = 2**14
"""Sums of so many numbers are never divided among threads, which would round them otherwise."""


def describe_machine(num_threads: int) -> str:
    """Return what the class of a machine depends on most, as far as torch tells."""
    capability = torch.backends.cpu.get_cpu_capability()
    threads = "1 thread" if num_threads == 1 else f"{num_threads} threads"
    return f"torch {torch.__version__}, {capability}, {threads}"


def set_num_threads(num_threads: int) -> None:
    """Set torch's threads for the calling thread; waits while another one computes alike.

    A thread that does not say it may have the number of whichever thread set it last.
    """
    with _changing_settings:
        torch.set_num_threads(num_threads)


def has_bf16_products() -> bool:
    """Return whether the processor multiplies in bfloat16, as far as torch tells; without that,
    torch emulates it, which takes many times as long.
    """
    read_capabilities = getattr(torch.cpu, "get_capabilities", dict)
    return any(read_capabilities().get(name) for name in _BF16_CAPABILITIES)


@contextmanager
def computing_alike(num_threads: int) -> Iterator[None]:
    """Compute with so many threads, and with kernels of torch that have one result for them.

    Some sums are divided among threads, so their number decides how these round (LayerNorm's
    gradients). Others are added in the order in which threads come (those of some experts).
    """
    with _changing_settings:
        threads_before = torch.get_num_threads()
        was_deterministic = torch.are_deterministic_algorithms_enabled()
        filled_before = _SETTINGS.fill_uninitialized_memory
        torch.set_num_threads(num_threads)
        torch.use_deterministic_algorithms(True)
        _SETTINGS.fill_uninitialized_memory = False
        try:
            yield
        finally:
            torch.set_num_threads(threads_before)
            torch.use_deterministic_algorithms(was_deterministic)
            _SETTINGS.fill_uninitialized_memory = filled_before


def digest_bits(tensors: Iterable[Tensor]) -> bytes:
    """Return a digest of float32 tensors: of the sum of the bits of each one.

    A SHA-256 of all bits would take longer. Whoever changes numbers on purpose could as well send
    the digest of others, so nothing is gained by one.
    """
    sums = [int(tensor.detach().contiguous().view(torch.int32).sum()) for tensor in tensors]
    return hashlib.sha256(",".join(map(str, sums)).encode()).digest()


def sum_squares(tensor: Tensor) -> float:
    """Return the squared norm of a tensor, whatever number of threads computes it."""
    pieces = tensor.flatten().split(_NUMBERS_AT_ONCE)
    return math.fsum(float(piece.double().square().sum()) for piece in pieces)
