"""Keys and values of all sessions of one peer, under one budget in bytes.

A session maps as much memory as it may ever need. The operating system commits it when it is
first touched, so the budget counts what is really committed, in pages of `PAGE_TOKENS` tokens,
and no session pays for its maximum length.
Only the compute thread may touch a pool and its caches; `statistics` is for everybody.

Tensor suffixes: L blocks, B rows of the session, G key-value heads, S tokens, D head size.
"""

import mmap
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from ...protocol.errors import (
    CacheFullError,
    ErrorCode,
    LocalProtocolError,
    RefusedError,
    UsageError,
)
from ...protocol.limits import MAX_BATCH_ROWS, MAX_SESSION_TOKENS
from ...protocol.spans import Span
from ..fair_share import Holder, compute_share

PAGE_TOKENS = 64

TIMES_FREE = 6
"""How many times as much as stays free one address may hold, and one client of what its address
may. A client alone gets 6/7 of 6/7 of the budget, three quarters: most of it, since it is there to
be used. Beside it, another client or address always finds some room, if only for short texts."""

# The pool has no clock and cannot foresee when a session ends: a generation takes seconds.
RETRY_AFTER_SECONDS = 2.0


@dataclass(frozen=True)
class KVCacheStatistics:
    """What a pool holds; `free_tokens` is for one row through all blocks of the peer."""

    budget_bytes: int
    used_bytes: int
    num_sessions: int
    free_tokens: int


class KVCachePool:
    """The KV memory of one peer: hands out leases to sessions and keeps the account.

    Invariant: the committed bytes of all open caches add up to `used_bytes` <= `budget_bytes`.
    """

    def __init__(
        self,
        budget_bytes: int,
        num_blocks: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
    ) -> None:
        if budget_bytes < 0:
            raise UsageError(f"the KV budget must not be negative, got {budget_bytes}")
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self._num_blocks = num_blocks
        self._num_kv_heads = num_kv_heads
        self._head_dim = head_dim
        self.dtype = dtype
        self._caches: set[SessionCache] = set()

    def __repr__(self) -> str:
        return (
            f"<KVCachePool {self.used_bytes}/{self.budget_bytes} bytes, "
            f"{len(self._caches)} sessions>"
        )

    @property
    def token_bytes(self) -> int:
        """Bytes of keys and values of one token of one row in one block."""
        return 2 * self._num_kv_heads * self._head_dim * self.dtype.itemsize

    def open(
        self, num_rows: int, max_tokens: int, span: Span, holder: Holder | None = None
    ) -> "SessionCache":
        """Lease room for a session of `num_rows` rows that may grow to `max_tokens` tokens each.

        Nothing is committed yet. Raises CacheFullError when not even one page is free, or when
        `holder` has its share already; None is the peer itself, which may have everything.
        """
        if not 1 <= num_rows <= MAX_BATCH_ROWS or not 1 <= max_tokens <= MAX_SESSION_TOKENS:
            raise RefusedError(
                ErrorCode.TOO_LONG,
                f"a session may have 1..{MAX_BATCH_ROWS} rows of 1..{MAX_SESSION_TOKENS} tokens, "
                f"not {num_rows} of {max_tokens}",
            )
        page_bytes = PAGE_TOKENS * num_rows * len(span) * self.token_bytes
        self._make_room(holder, page_bytes, largest_bytes=page_bytes)
        # No session can outgrow the budget, so neither need the memory that it may address.
        num_pages = min(-(-max_tokens // PAGE_TOKENS), self.budget_bytes // page_bytes)
        capacity = num_pages * PAGE_TOKENS
        shape = (len(span), 2, num_rows, self._num_kv_heads, capacity, self._head_dim)
        cache = SessionCache(self, span, max_tokens, _Memory(shape, self.dtype), holder)
        self._caches.add(cache)
        return cache

    def statistics(self) -> KVCacheStatistics:
        """Return the present account; pages that rolled back sessions can spare count as free.

        Other threads may ask, too: they get a recent figure, which is all that a hint needs.
        """
        spare_bytes = sum(cache.spare_bytes for cache in tuple(self._caches))
        free_bytes = self.budget_bytes - self.used_bytes + spare_bytes
        page_bytes = PAGE_TOKENS * self._num_blocks * self.token_bytes
        return KVCacheStatistics(
            budget_bytes=self.budget_bytes,
            used_bytes=self.used_bytes,
            num_sessions=len(self._caches),
            free_tokens=free_bytes // page_bytes * PAGE_TOKENS,
        )

    def check_integrity(self) -> None:
        """Raise LocalProtocolError if the account does not add up (a bug of ours)."""
        committed_bytes = sum(cache.committed_bytes for cache in self._caches)
        if committed_bytes != self.used_bytes or self.used_bytes > self.budget_bytes:
            raise LocalProtocolError(f"{self!r} holds {committed_bytes} committed bytes")
        for cache in self._caches:
            cache.check_integrity()

    def take(self, holder: Holder | None, num_bytes: int, largest_bytes: int) -> None:
        """Enter `num_bytes` more of a holder's cache into the account, or raise CacheFullError.

        Trying again only helps if `largest_bytes`, all that the session needs, fits at all.
        """
        self._make_room(holder, num_bytes, largest_bytes)
        self.used_bytes += num_bytes

    def give_back(self, num_bytes: int) -> None:
        """Strike `num_bytes` of a cache from the account."""
        self.used_bytes -= num_bytes

    def forget(self, cache: "SessionCache") -> None:
        """Drop a closed cache."""
        self._caches.discard(cache)

    def _check_share(self, holder: Holder, num_bytes: int, largest_bytes: int) -> None:
        held: Counter[Holder] = Counter()
        for cache in self._caches:
            if cache.holder is not None:
                held[cache.holder] += cache.committed_bytes - cache.spare_bytes
        # Whoever comes gets a page, or a budget of a few pages would be for nobody.
        page_bytes = PAGE_TOKENS * self._num_blocks * self.token_bytes
        share = max(page_bytes, compute_share(holder, held, self.budget_bytes, TIMES_FREE))
        if held[holder] + num_bytes > share:
            most = max(page_bytes, compute_share(holder, {}, self.budget_bytes, TIMES_FREE))
            raise CacheFullError(
                f"{num_bytes} bytes more of the KV cache are beyond your share of {share} bytes",
                RETRY_AFTER_SECONDS if largest_bytes <= most else None,
            )

    def _make_room(self, holder: Holder | None, num_bytes: int, largest_bytes: int) -> None:
        if holder is not None:
            self._check_share(holder, num_bytes, largest_bytes)
        free_bytes = self.budget_bytes - self.used_bytes
        if num_bytes > free_bytes:
            free_bytes += sum(cache.spare_bytes for cache in self._caches)
        if num_bytes > free_bytes:
            can_ever_fit = largest_bytes <= self.budget_bytes
            raise CacheFullError(
                f"the KV cache has {free_bytes} bytes free, {num_bytes} more are needed",
                RETRY_AFTER_SECONDS if can_ever_fit else None,
            )
        for cache in self._caches:
            if num_bytes <= self.budget_bytes - self.used_bytes:
                return
            cache.return_spare_pages()


class SessionCache:
    """One session's lease: keys and values of its rows in every block of its span.

    The first `length` tokens are valid. A step is `prepare`, then writing and reading through
    `keys_values`, then `commit`; without the commit the length stays where `prepare` put it.
    """

    def __init__(
        self,
        pool: KVCachePool,
        span: Span,
        max_tokens: int,
        memory: "_Memory",
        holder: Holder | None,
    ) -> None:
        self.span = span
        self.holder = holder
        self.max_tokens = max_tokens
        self.num_rows = memory.states_LCBGSD.shape[2]
        self.length = 0
        self.is_open = True
        self._pool = pool
        self._memory: _Memory | None = memory
        self._keys_values = [
            (keys_BGSD, values_BGSD) for keys_BGSD, values_BGSD in memory.states_LCBGSD
        ]
        self._page_bytes = PAGE_TOKENS * self.num_rows * len(span) * pool.token_bytes
        self._capacity = memory.states_LCBGSD.shape[4]
        self._num_pages = 0
        # Tokens that must stay addressable: the length, and the step being computed.
        self._num_reserved_tokens = 0

    def __repr__(self) -> str:
        state = f"{self.length}/{self.max_tokens} tokens" if self.is_open else "closed"
        return f"<SessionCache {self.span} x {self.num_rows} rows, {state}>"

    @property
    def committed_bytes(self) -> int:
        """Bytes that this lease has taken from the budget."""
        return self._num_pages * self._page_bytes

    @property
    def spare_bytes(self) -> int:
        """Committed bytes above what is in use: rolled back, kept for growing again."""
        num_spare_pages = self._num_pages - _count_pages(self._num_reserved_tokens)
        return max(0, num_spare_pages) * self._page_bytes

    def prepare(
        self,
        position: int,
        num_tokens: int,
        row_map: Sequence[int] | None = None,
        num_behind: int = 0,
    ) -> None:
        """Make ready for `num_tokens` tokens at `position`: roll back, reorder rows, reserve pages.

        New row i continues old row `row_map[i]`. Pages are reserved for `num_behind` tokens more,
        which will follow. Everything is checked first: an error, such as CacheFullError, leaves
        the cache as it was.
        """
        self._check_step(position, num_tokens + num_behind, row_map)
        self._reserve(position + num_tokens + num_behind)
        self.length = position
        if row_map is not None and list(row_map) != list(range(self.num_rows)):
            self._reorder(row_map)

    @property
    def states_LCBGSD(self) -> torch.Tensor:
        """All keys and values (C), block after block from `span.start` on."""
        assert self._memory is not None
        return self._memory.states_LCBGSD

    def keys_values(self, block: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views (keys_BGSD, values_BGSD) of a block; only reserved tokens may be touched."""
        return self._keys_values[block - self.span.start]

    def commit(self, num_tokens: int) -> None:
        """Count the tokens that were written at `length` as valid."""
        if self.length + num_tokens > self._num_reserved_tokens:
            raise LocalProtocolError(f"{self!r}: {num_tokens} tokens were not prepared")
        self.length += num_tokens

    def abandon(self) -> None:
        """Drop what was prepared and not committed."""
        self._num_reserved_tokens = self.length

    def fall_back(self, position: int) -> None:
        """Forget the tokens from `position` on, and what was prepared: a step there was refused.

        Its session's later steps stand on tokens that never came. They find a gap now, where they
        would have taken the old tokens, which the refused step was to replace, for its own.
        """
        self.length = min(self.length, position)
        self.abandon()

    def close(self) -> None:
        """Give everything back; closing twice is fine."""
        if not self.is_open:
            return
        self.is_open = False
        self._pool.give_back(self.committed_bytes)
        self._pool.forget(self)
        self._num_pages = self._num_reserved_tokens = self.length = 0
        self._keys_values, self._memory = [], None

    def return_spare_pages(self) -> None:
        """Give pages above the reserved tokens back to the operating system and the budget."""
        if self._memory is None or not self.spare_bytes:
            return
        num_pages = _count_pages(self._num_reserved_tokens)
        self._memory.release_above(num_pages * PAGE_TOKENS)
        self._pool.give_back(self.spare_bytes)
        self._num_pages = num_pages

    def check_integrity(self) -> None:
        """Raise LocalProtocolError if lengths and pages contradict each other (a bug of ours)."""
        num_page_tokens = self._num_pages * PAGE_TOKENS
        if not self.length <= self._num_reserved_tokens <= num_page_tokens <= self._capacity:
            raise LocalProtocolError(f"{self!r} has {self._num_pages} pages")

    def _check_step(self, position: int, num_tokens: int, row_map: Sequence[int] | None) -> None:
        if not self.is_open:
            raise RefusedError(ErrorCode.UNKNOWN_SESSION, "the session was closed")
        if num_tokens < 1:
            raise RefusedError(ErrorCode.BAD_VALUES, "a step needs at least one token")
        if not 0 <= position <= self.length:
            # The session table answers gaps; this is what follows a step that was refused.
            raise RefusedError(
                ErrorCode.BAD_VALUES,
                f"the step is at position {position}, the cache ends at {self.length}",
            )
        if position + num_tokens > self.max_tokens:
            raise RefusedError(
                ErrorCode.TOO_LONG,
                f"the session was opened for {self.max_tokens} tokens, this step would make it "
                f"{position + num_tokens}",
            )
        if row_map is not None and (
            len(row_map) != self.num_rows or not all(0 <= row < self.num_rows for row in row_map)
        ):
            raise RefusedError(
                ErrorCode.BAD_VALUES,
                f"a row map of this session needs {self.num_rows} entries below {self.num_rows}",
            )

    def _reserve(self, num_tokens: int) -> None:
        num_pages = _count_pages(num_tokens)
        missing_bytes = max(0, num_pages - self._num_pages) * self._page_bytes
        if missing_bytes:
            # While others are asked for spare pages, ours are none: they are about to be used.
            self._num_reserved_tokens, before = num_tokens, self._num_reserved_tokens
            try:
                largest_bytes = num_pages * self._page_bytes
                self._pool.take(self.holder, missing_bytes, largest_bytes)
            except CacheFullError:
                self._num_reserved_tokens = before
                raise
            self._num_pages = num_pages
        self._num_reserved_tokens = num_tokens

    def _reorder(self, row_map: Sequence[int]) -> None:
        rows = torch.tensor(row_map)
        for pair in self._keys_values:
            for states_BGSD in pair:
                prefix_BGSD = states_BGSD[:, :, : self.length]
                prefix_BGSD.copy_(prefix_BGSD.index_select(0, rows))


def _count_pages(num_tokens: int) -> int:
    return -(-num_tokens // PAGE_TOKENS)


class _Memory:
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
                f"the operating system has no memory for a session: {error}", RETRY_AFTER_SECONDS
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
