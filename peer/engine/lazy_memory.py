"""Memory that costs nothing before it is touched, for KV caches.

Tensor suffixes: L blocks, B rows of a session, G key-value heads, S tokens, D head size.
"""

import mmap
from math import prod

import torch

from ...protocol.errors import CacheFullError

_RETRY_AFTER_SECONDS = 2.0


class LazyMemory:
    """Anonymous memory of the operating system, seen as one tensor (C: keys, values).

    torch.empty would also be committed lazily, but where huge pages are always on, touching the
    first tokens of every head would commit megabytes, and freed memory could stay allocated.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        try:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            self._mapping = mmap.mmap(-1, prod(shape) * dtype.itemsize, flags=flags)
        except OSError as error:
            raise CacheFullError(
                f"the operating system has no memory for a session: {error}",
                _RETRY_AFTER_SECONDS,
            ) from error
        if hasattr(mmap, "MADV_NOHUGEPAGE"):
            self._mapping.madvise(mmap.MADV_NOHUGEPAGE)
        self.states_LCBGSD = torch.frombuffer(self._mapping, dtype=dtype).view(shape)

    def release_above(self, num_tokens: int) -> None:
        """Let the operating system have every head's memory above `num_tokens` tokens back."""
        *_, capacity, head_dim = self.states_LCBGSD.shape
        token_bytes = head_dim * self.states_LCBGSD.itemsize
        head_bytes = capacity * token_bytes
        for head_start in range(0, self.states_LCBGSD.nbytes, head_bytes):
            # Partial pages at both ends may hold tokens that stay, ours or the next head's.
            start = -(-(head_start + num_tokens * token_bytes) // mmap.PAGESIZE) * mmap.PAGESIZE
            stop = (head_start + head_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
            if start < stop:
                self._mapping.madvise(mmap.MADV_DONTNEED, start, stop - start)
