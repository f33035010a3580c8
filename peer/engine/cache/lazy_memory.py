"""KV memory on the CPU: the operating system commits it when it is first touched.

Tensor suffixes: L blocks, C keys and values, B rows of a session, G key-value heads, S tokens,
D head size, N heads of all rows, keys and values of all blocks, T and W as in `kv_memory`.
"""

import mmap
from collections.abc import Iterator, Sequence
from math import prod

import torch

from ....protocol.errors import CacheFullError
from ....protocol.spans import Span
from ....protocol.tensors import KVFormat
from .kv_memory import LAYOUTS, PAGE_TOKENS, KVStore, Layout, PrefixPiece, SessionMemory

_RETRY_AFTER_SECONDS = 2.0


class LazyStore(KVStore):
    """Gives every session a mapping of its own."""

    def __init__(
        self, num_blocks: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> None:
        layouts = {name: layout(num_kv_heads, head_dim, dtype) for name, layout in LAYOUTS.items()}
        super().__init__(num_blocks, dtype, layouts)
        self._num_kv_heads = num_kv_heads

    def open(
        self, span: Span, num_rows: int, max_tokens: int, num_pages: int, kv_format: KVFormat
    ) -> SessionMemory:
        layout = self.layouts[kv_format]
        capacity = num_pages * PAGE_TOKENS
        return LazyMemory(layout, span, num_rows, max_tokens, capacity, self._num_kv_heads)

    def check_integrity(self) -> None:
        """Nothing is shared."""


class LazyMemory(SessionMemory):
    """Anonymous memory of the operating system, seen as one tensor, `states_LCBGSD`.

    The system commits what is touched, so nothing has to be done to reserve it.

    torch.empty would also be committed lazily, but where huge pages are always on, touching the
    first tokens of every head would commit megabytes, and freed memory could stay allocated.
    """

    def __init__(
        self,
        layout: Layout,
        span: Span,
        num_rows: int,
        max_tokens: int,
        capacity: int,
        num_kv_heads: int,
    ) -> None:
        super().__init__(layout, span, num_rows, max_tokens, capacity)
        shape = (len(span), 2, num_rows, num_kv_heads, capacity, layout.width)
        try:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            self._mapping = mmap.mmap(-1, prod(shape) * layout.dtype.itemsize, flags=flags)
        except OSError as error:
            raise CacheFullError(
                f"the operating system has no memory for a session: {error}",
                _RETRY_AFTER_SECONDS,
            ) from error
        if hasattr(mmap, "MADV_NOHUGEPAGE"):
            self._mapping.madvise(mmap.MADV_NOHUGEPAGE)
        self.states_LCBGSD = torch.frombuffer(self._mapping, dtype=layout.dtype).view(shape)
        self._keys_values = [(states[0], states[1]) for states in self.states_LCBGSD]

    def reserve(self, num_tokens: int) -> None:
        """The system commits pages when they are first touched."""

    def release_above(self, num_tokens: int) -> None:
        """Return every head's memory above `num_tokens` tokens to the operating system."""
        *_, capacity, head_dim = self.states_LCBGSD.shape
        token_bytes = head_dim * self.states_LCBGSD.itemsize
        head_bytes = capacity * token_bytes
        for head_start in range(0, self.states_LCBGSD.nbytes, head_bytes):
            # Partial pages at both ends may hold tokens that stay, ours or the next head's.
            start = -(-(head_start + num_tokens * token_bytes) // mmap.PAGESIZE) * mmap.PAGESIZE
            stop = (head_start + head_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
            if start < stop:
                self._mapping.madvise(mmap.MADV_DONTNEED, start, stop - start)

    def release(self) -> None:
        """The mapping is freed with its last tensor."""

    def write_packed(
        self, block: int, position: int, keys_BGTW: torch.Tensor, values_BGTW: torch.Tensor
    ) -> None:
        keys_BGSD, values_BGSD = self._keys_values[block - self.span.start]
        stop = position + keys_BGTW.shape[2]
        keys_BGSD[:, :, position:stop] = keys_BGTW
        values_BGSD[:, :, position:stop] = values_BGTW

    def read_packed(self, block: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._keys_values[block - self.span.start]

    def move_rows(self, rows: Sequence[int], sources: Sequence[int], start: int, stop: int) -> None:
        sources_B = torch.tensor(sources)
        tail_LCBGSD = self.states_LCBGSD[:, :, :, :, start:stop]
        # Block by block: the copy in between must not be large.
        for tail_CBGSD in tail_LCBGSD:
            tail_CBGSD[:, rows] = tail_CBGSD.index_select(1, sources_B)

    def cut_prefix(self, num_tokens: int, piece_bytes: int) -> Iterator[PrefixPiece]:
        """Yield the heads and tokens of each piece: many short heads, or a part of a long one."""
        token_bytes = self.layout.width * self.states_LCBGSD.itemsize
        num_heads = prod(self.states_LCBGSD.shape[:4])
        tokens_at_once = min(num_tokens, max(1, piece_bytes // token_bytes))
        heads_at_once = max(1, piece_bytes // (tokens_at_once * token_bytes))
        for head in range(0, num_heads, heads_at_once):
            for token in range(0, num_tokens, tokens_at_once):
                stop = min(token + tokens_at_once, num_tokens)
                yield slice(head, head + heads_at_once), slice(token, stop)

    def copy_piece(self, parent: SessionMemory, piece: PrefixPiece) -> None:
        assert isinstance(parent, LazyMemory)
        self.states_LCBGSD.flatten(0, 3)[piece].copy_(parent.states_LCBGSD.flatten(0, 3)[piece])

    def check_integrity(self, num_tokens: int) -> None:
        """Only the system knows what it has committed."""
