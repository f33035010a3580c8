"""The KV caches of a peer's sessions, and the pool whose budget they share.

A session's memory is committed as it grows. The budget counts what is committed, in pages of
`PAGE_TOKENS` tokens: no session pays for its maximum length. `kv_memory` says what these pages are.
Only the compute thread may touch a pool and its caches, but for what other threads may read
(`check_can_hold`, `free_tokens`, `committed_bytes`, `is_open`) and set (`touch`, `running`,
`prompts_LBPH`).

Tensor suffixes: B rows of the session, L blocks, P positions, H hidden.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ....protocol.errors import (
    CacheFullError,
    ErrorCode,
    LocalProtocolError,
    RefusedError,
    UsageError,
)
from ....protocol.fair_share import Tenant, compute_share, may_displace
from ....protocol.limits import MAX_BATCH_ROWS, MAX_SESSION_TOKENS
from ....protocol.spans import Span
from ....protocol.tensors import KVFormat
from .kv_memory import PAGE_TOKENS, KVStore, Layout, SessionMemory, count_pages

PIECE_BYTES = 2**21
"""A prefix is copied in pieces of so many bytes. Every waiting step waits for one: about a
millisecond on the machine of the benchmarks, an eighth of a token's time there in 8 blocks."""

TIMES_FREE = 6
"""How many times as much as stays free one address may hold, and one client of what its address
may. A client alone gets 6/7 of 6/7 of the budget, three quarters: most of it, since it is there to
be used. Beside it, another client or address always finds some room, if only for short texts."""

# The pool cannot foresee when a session ends: a generation takes seconds.
RETRY_AFTER_SECONDS = 2.0

IDLE_SECONDS = 10.0
"""A session without a step for so long gives its pages to one that needs them. Its client can
rebuild it from its log, at the price of a prompt; tokens of a text come much closer together."""

_NEW_TENANT = Tenant("a new address", "a new client")


class SessionCache:
    """One session's lease: keys and values of its rows in every block of its span.

    The first `length` tokens are valid. A step is `prepare`, then writing and reading the `memory`
    block by block, then `commit`; without the commit the length stays where `prepare` put it.

    `prompts_LBPH` are added to the inputs of the blocks at the first positions. `used_at` is when
    the last step arrived; any thread may set it. `running` are the steps that wait or are computed,
    in which time the session is not idle; its owner on the event loop changes them.
    """

    def __init__(self, pool: KVCachePool, memory: SessionMemory, tenant: Tenant | None) -> None:
        self.span = memory.span
        self.tenant = tenant
        self.max_tokens = memory.max_tokens
        self.num_rows = memory.num_rows
        self.length = 0
        self.is_open = True
        self.prompts_LBPH: torch.Tensor | None = None
        self._pool = pool
        self.used_at = pool.now()
        self.running: set[asyncio.Future[Any]] = set()
        self._memory: SessionMemory | None = memory
        self._layout = memory.layout
        self._page_bytes = PAGE_TOKENS * self.num_rows * len(self.span) * self._layout.token_bytes
        self._capacity = memory.capacity
        self._num_pages = 0
        # Tokens that must stay addressable: the length, and the step being computed.
        self._num_reserved_tokens = 0
        self._common_prefixes: CommonPrefixes | None = None  # before rows are moved first
        self._copy: PrefixCopy | None = None  # while the beginning is being copied
        self._copies_of_us: set[PrefixCopy] = set()

    def __repr__(self) -> str:
        state = f"{self.length}/{self.max_tokens} tokens" if self.is_open else "closed"
        return f"<SessionCache {self.span} x {self.num_rows} rows, {state}>"

    @property
    def keeps_integers(self) -> bool:
        """Whether keys and values are rounded to integers."""
        return self._layout.dtype is torch.int8

    @property
    def committed_bytes(self) -> int:
        """Bytes that this lease takes from the budget."""
        return self._num_pages * self._page_bytes

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
        self.touch()
        self._reserve(position + num_tokens + num_behind)
        self._truncate(position)
        if row_map is not None and list(row_map) != list(range(self.num_rows)):
            self._reorder(row_map)

    def begin_with(self, parent: SessionCache, num_tokens: int) -> PrefixCopy:
        """Begin to copy the first tokens of another cache; `advance` the copy until it is done.

        Takes the pages for all of them. Raises RefusedError, before anything is changed, when
        there is no such prefix, or no room.
        """
        parent.check_is_open("the parent")
        if (parent.span, parent.num_rows) != (self.span, self.num_rows):
            raise RefusedError(
                ErrorCode.BAD_VALUES,
                f"the parent has {parent.num_rows} rows of blocks {parent.span}, "
                f"not {self.num_rows} of {self.span}",
            )
        if type(parent._layout) is not type(self._layout):
            detail = "the parent's keys and values are kept in another format"
            raise RefusedError(ErrorCode.BAD_VALUES, detail)
        if num_tokens > parent.length:
            raise RefusedError(
                ErrorCode.BAD_VALUES,
                f"a prefix of {num_tokens} tokens is more than the {parent.length} of the parent",
            )
        parent.touch()  # or it might have to make room
        self.prepare(0, num_tokens)
        if parent._common_prefixes is not None:
            self._common_prefixes = parent._common_prefixes.copy(num_tokens)
        self._copy = PrefixCopy(parent, self, num_tokens)
        parent._copies_of_us.add(self._copy)
        return self._copy

    def end_copy(self) -> None:
        """End the copy from the parent: its prefix is here, or no longer wanted."""
        if self._copy is not None:
            self._copy.parent._copies_of_us.discard(self._copy)
            self._copy = None

    def check_is_open(self, name: str = "the session") -> None:
        """Raise RefusedError if this was closed; `name` is its name in the message."""
        if not self.is_open:
            detail = (
                f"{name} was closed: by its client, or, when idle, for others who needed memory"
            )
            raise RefusedError(ErrorCode.UNKNOWN_SESSION, detail)

    def touch(self) -> None:
        """Note that the session is in use; its pages stay."""
        self.used_at = self._pool.now()

    @property
    def memory(self) -> SessionMemory:
        """The memory of the keys and values; only reserved tokens may be touched."""
        assert self._memory is not None
        return self._memory

    def commit(self, num_tokens: int) -> None:
        """Count the tokens that were written at `length` as valid."""
        if self.length + num_tokens > self._num_reserved_tokens:
            raise LocalProtocolError(f"{self!r}: {num_tokens} tokens were not prepared")
        self.length += num_tokens

    def abandon(self) -> None:
        """Drop what was prepared and not committed."""
        self._num_reserved_tokens = self.length
        self._release_above(self.length)

    def fall_back(self, position: int) -> None:
        """Forget the tokens from `position` on, and what was prepared: a step was refused.

        Later steps of the session build on tokens that were never computed. They find a gap now;
        otherwise they would continue the old tokens that the refused step was to replace.
        """
        self._truncate(min(self.length, position))
        self.abandon()

    def close(self) -> None:
        """Give everything back; closing twice is fine."""
        if not self.is_open:
            return
        self.is_open = False
        self.end_copy()
        self.memory.release()
        self._num_pages = self._num_reserved_tokens = self.length = 0
        self._pool.forget(self)
        self._memory = None

    def check_integrity(self) -> None:
        """Raise LocalProtocolError if lengths and pages contradict each other (a bug of ours)."""
        num_page_tokens = self._num_pages * PAGE_TOKENS
        if not self.length <= self._num_reserved_tokens <= num_page_tokens <= self._capacity:
            raise LocalProtocolError(f"{self!r} has {self._num_pages} pages")
        self.memory.check_integrity(num_page_tokens)

    def _check_step(self, position: int, num_tokens: int, row_map: Sequence[int] | None) -> None:
        self.check_is_open()
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
        """Have the pages for so many tokens, and no more."""
        if num_tokens > self._num_pages * PAGE_TOKENS:
            num_pages = count_pages(num_tokens)
            missing_bytes = (num_pages - self._num_pages) * self._page_bytes
            largest_bytes = num_pages * self._page_bytes
            self._pool.grow(self, num_pages * PAGE_TOKENS, missing_bytes, largest_bytes)
            self._num_pages = num_pages
            self._pool.count_again()
        self._num_reserved_tokens = num_tokens
        self._release_above(num_tokens)

    def _release_above(self, num_tokens: int) -> None:
        """Give back the pages behind the first tokens: those in them were rolled back."""
        if num_tokens <= (self._num_pages - 1) * PAGE_TOKENS:
            num_pages = count_pages(num_tokens)
            self.memory.release_above(num_pages * PAGE_TOKENS)
            self._num_pages = num_pages
            self._pool.count_again()

    def _truncate(self, length: int) -> None:
        self._note_change(length)
        self.length = length
        if self._common_prefixes is not None:
            self._common_prefixes.truncate(length)

    def _reorder(self, row_map: Sequence[int]) -> None:
        """Move the rows; what a row has in common with the one it replaces stays where it is."""
        prefixes = self._common_prefixes or CommonPrefixes(self.num_rows)
        start = prefixes.find_first_difference(row_map)
        self._note_change(start)
        moved = [row for row, source in enumerate(row_map) if row != source]
        sources = [row_map[row] for row in moved]
        self.memory.move_rows(moved, sources, start, self.length)
        prefixes.reorder(row_map, self.length)
        self._common_prefixes = prefixes

    def _note_change(self, position: int) -> None:
        for copy in self._copies_of_us:
            copy.note_change(position)


class PrefixCopy:
    """Copies the first tokens of a parent's cache into one that is empty, piece by piece.

    The parent may take steps in between. If it drops any of these tokens, or moves them between
    its rows, the copy fails: the result is the prefix as it was at the beginning, or nothing.
    """

    def __init__(self, parent: SessionCache, cache: SessionCache, num_tokens: int) -> None:
        self.parent = parent
        self._cache = cache
        self._num_tokens = num_tokens
        self._is_intact = True
        self._pieces = deque(cache.memory.cut_prefix(num_tokens, PIECE_BYTES))

    def note_change(self, position: int) -> None:
        """Note that the parent's tokens from `position` on are no longer what they were."""
        if position < self._num_tokens:
            self._is_intact = False

    def advance(self) -> bool:
        """Copy one more piece; return whether it was the last one, and the tokens count.

        Raises RefusedError when there is nothing to copy from any more, or into.
        """
        self.parent.check_is_open("the parent")
        self._cache.check_is_open("the fork")
        if not self._is_intact:
            raise RefusedError(
                ErrorCode.BAD_VALUES,
                f"the first {self._num_tokens} tokens of the parent changed before they were "
                "copied: it was rolled back, or its rows were moved; fork it before or after that",
            )
        # Both are in use, or they might have to make room.
        self.parent.touch()
        self._cache.touch()
        self._cache.memory.copy_piece(self.parent.memory, self._pieces.popleft())
        if self._pieces:
            return False
        self._cache.commit(self._num_tokens)
        self._cache.end_copy()
        return True


class KVCachePool:
    """The KV memory of one peer: hands out leases to sessions and keeps the account.

    Invariant: `used_bytes` <= `budget_bytes`, once those have ended that were admitted under a
    larger budget.
    """

    def __init__(
        self,
        budget_bytes: int,
        store: KVStore,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        if budget_bytes < 0:
            raise UsageError(f"the KV budget must not be negative, got {budget_bytes}")
        self.budget_bytes = budget_bytes
        self.dtype = store.dtype
        self._store = store
        self.now = now
        self._caches: set[SessionCache] = set()
        self.free_tokens = self.count_free_tokens(_NEW_TENANT)
        """Tokens of one row, through all blocks, that a tenant without any may have now. Any thread
        may read it."""
        self.committed_bytes = 0
        """What `used_bytes` was when it changed last. Any thread may read it."""

    def __repr__(self) -> str:
        return (
            f"<KVCachePool {self.used_bytes}/{self.budget_bytes} bytes, "
            f"{self.num_sessions} sessions>"
        )

    @property
    def used_bytes(self) -> int:
        """Bytes that all open caches have committed."""
        return sum(cache.committed_bytes for cache in self._caches)

    @property
    def num_sessions(self) -> int:
        """How many caches are open."""
        return len(self._caches)

    @property
    def token_bytes(self) -> int:
        """Bytes of keys and values of one token of one row in one block, kept as floats."""
        return self._store.layouts[KVFormat.FLOAT].token_bytes

    def open(
        self,
        num_rows: int,
        max_tokens: int,
        span: Span,
        tenant: Tenant | None = None,
        kv_format: KVFormat = KVFormat.FLOAT,
    ) -> SessionCache:
        """Lease room for a session of `num_rows` rows that may grow to `max_tokens` tokens each.

        Nothing is committed yet. Raises CacheFullError when not even one page is free, or when
        `tenant` has its share already; None is the peer itself, which may have everything.
        """
        if not 1 <= num_rows <= MAX_BATCH_ROWS or not 1 <= max_tokens <= MAX_SESSION_TOKENS:
            raise RefusedError(
                ErrorCode.TOO_LONG,
                f"a session may have 1..{MAX_BATCH_ROWS} rows of 1..{MAX_SESSION_TOKENS} tokens, "
                f"not {num_rows} of {max_tokens}",
            )
        layout = self._store.layouts[kv_format]
        page_bytes = PAGE_TOKENS * num_rows * len(span) * layout.token_bytes
        self._make_room(tenant, page_bytes, largest_bytes=page_bytes)
        # No session can outgrow the budget, so neither need the memory that it may address.
        num_pages = min(count_pages(max_tokens), self.budget_bytes // page_bytes)
        memory = self._store.open(span, num_rows, max_tokens, num_pages, kv_format)
        cache = SessionCache(self, memory, tenant)
        self._caches.add(cache)
        return cache

    def check_can_hold(
        self, num_rows: int, max_tokens: int, span: Span, kv_format: KVFormat
    ) -> None:
        """Raise CacheFullError when a stranger's session can never grow to its limit here.

        Such a session would be computed to where its share ends, and be thrown away there.
        """
        row_bytes = PAGE_TOKENS * len(span) * self._store.layouts[kv_format].token_bytes
        num_pages = self._compute_share(Tenant("anybody"), {}) // (num_rows * row_bytes)
        if max_tokens > num_pages * PAGE_TOKENS:
            raise CacheFullError(
                f"the KV cache has room for {num_pages * PAGE_TOKENS} tokens at most in each row "
                f"of a session with {num_rows}, not for {max_tokens}; open it for fewer tokens or "
                "rows, keep them in int8 (--kv int8), or find a peer with a larger --kv-memory"
            )

    def count_free_tokens(self, tenant: Tenant, kv_format: KVFormat = KVFormat.FLOAT) -> int:
        """Return how many more tokens of one row, through all blocks, a tenant may have now."""
        held = self._count_held()
        left_bytes = max(0, self._compute_share(tenant, held) - held[tenant])
        token_bytes = self._store.num_blocks * self._store.layouts[kv_format].token_bytes
        free_bytes = max(0, self.budget_bytes - self.used_bytes)
        num_pages = min(free_bytes, left_bytes) // (PAGE_TOKENS * token_bytes)
        return num_pages * PAGE_TOKENS

    def limit(self, budget_bytes: int) -> None:
        """Hand out at most so many bytes from now on; sessions keep what they have."""
        most_bytes = self._store.most_bytes
        self.budget_bytes = budget_bytes if most_bytes is None else min(budget_bytes, most_bytes)
        self.count_again()

    def check_integrity(self) -> None:
        """Raise LocalProtocolError if the account does not add up (a bug of ours)."""
        if self.used_bytes > self.budget_bytes:
            raise LocalProtocolError(f"{self!r} has committed more than its budget")
        for cache in self._caches:
            cache.check_integrity()
        self._store.check_integrity()

    def grow(
        self, cache: SessionCache, num_tokens: int, num_bytes: int, largest_bytes: int
    ) -> None:
        """Reserve tokens in the memory of a cache, which takes so many bytes more.

        Idle sessions are closed for them if need be. Raises CacheFullError where that does not
        help. Trying again only helps if `largest_bytes`, all that the session needs, fits at all.
        """
        self._make_room(cache.tenant, num_bytes, largest_bytes)
        # If the free pages are not the same ones in all blocks, more sessions have to go.
        while True:
            try:
                cache.memory.reserve(num_tokens)
                return
            except CacheFullError:
                idle = self._find_idle(cache.tenant, num_bytes, cache.span)
                if idle is None:
                    raise
                idle.close()

    def forget(self, cache: SessionCache) -> None:
        """Drop a closed cache."""
        self._caches.discard(cache)
        self.count_again()

    def count_again(self) -> None:
        """Note that a cache has more or fewer pages."""
        self.free_tokens = self.count_free_tokens(_NEW_TENANT)
        self.committed_bytes = self.used_bytes

    def _make_room(self, tenant: Tenant | None, num_bytes: int, largest_bytes: int) -> None:
        """Free so many bytes, if need be by closing idle sessions; CacheFullError if impossible."""
        while True:
            try:
                self._check_room(tenant, num_bytes, largest_bytes)
                return
            except CacheFullError as refusal:
                idle = self._find_idle(tenant, num_bytes)
                if refusal.retry_after_seconds is None or idle is None:
                    raise
                idle.close()

    @property
    def _row_page_bytes(self) -> int:
        return PAGE_TOKENS * self._store.num_blocks * self.token_bytes

    def _count_held(self) -> Counter[Tenant]:
        held: Counter[Tenant] = Counter()
        for cache in self._caches:
            if cache.tenant is not None:
                held[cache.tenant] += cache.committed_bytes
        return held

    def _compute_share(self, tenant: Tenant, held: Mapping[Tenant, int]) -> int:
        # Every tenant gets a page, or nobody could use a budget of a few pages.
        share = compute_share(tenant, held, self.budget_bytes, TIMES_FREE)
        return max(self._row_page_bytes, share)

    def _check_share(self, tenant: Tenant, num_bytes: int, largest_bytes: int) -> None:
        held = self._count_held()
        share = self._compute_share(tenant, held)
        if held[tenant] + num_bytes > share:
            most = self._compute_share(tenant, {})
            raise CacheFullError(
                f"your sessions here hold {held[tenant]} bytes of your share of {share} bytes of "
                f"the KV cache, and {num_bytes} more are needed; close some of them, take fewer "
                "tokens or rows, or keep them in int8 (--kv int8)",
                RETRY_AFTER_SECONDS if largest_bytes <= most else None,
            )

    def _find_idle(
        self, tenant: Tenant | None, num_bytes: int, span: Span | None = None
    ) -> SessionCache | None:
        """Return the longest idle session of those that `tenant` may displace.

        With a span, only of those that use some of its blocks.
        """
        held = self._count_held()
        idle_since = self.now() - IDLE_SECONDS
        candidates = [
            cache
            for cache in self._caches
            if cache.used_at <= idle_since
            and not cache.running
            and (span is None or cache.span.overlap(span) is not None)
            and cache.tenant is not None
            and tenant is not None
            and may_displace(tenant, cache.tenant, held, num_bytes)
        ]
        return min(candidates, key=lambda cache: cache.used_at, default=None)

    def _check_room(self, tenant: Tenant | None, num_bytes: int, largest_bytes: int) -> None:
        if tenant is not None:
            self._check_share(tenant, num_bytes, largest_bytes)
        free_bytes = self.budget_bytes - self.used_bytes
        if num_bytes > free_bytes:
            can_ever_fit = largest_bytes <= self.budget_bytes
            raise CacheFullError(
                f"the KV cache has {free_bytes} bytes free, {num_bytes} more are needed",
                RETRY_AFTER_SECONDS if can_ever_fit else None,
            )


def check_kv_budget(budget_bytes: int, span: Span, layouts: Mapping[KVFormat, Layout]) -> None:
    """Raise UsageError when not even one page of one session fits into the budget."""
    needed_bytes = PAGE_TOKENS * len(span) * layouts[KVFormat.FLOAT].token_bytes
    if budget_bytes < needed_bytes:
        raise UsageError(
            f"--kv-memory {budget_bytes} is too small for any session: use at least "
            f"{needed_bytes} (bytes), which hold {PAGE_TOKENS} tokens in blocks {span}"
        )


class CommonPrefixes:
    """For every two rows of a session, how many of their first tokens are known to be the same.

    Beam search copies rows all the time, and copies differ in their newest tokens only: the tokens
    before these need not be copied. Rows that never were copies of each other have none.
    """

    def __init__(self, num_rows: int) -> None:
        self._lengths_BB = np.zeros((num_rows, num_rows), dtype=np.int32)

    def copy(self, length: int) -> CommonPrefixes:
        """Return the same for copies of the first `length` tokens of these rows."""
        copied = CommonPrefixes(len(self._lengths_BB))
        copied._lengths_BB = np.minimum(self._lengths_BB, length)
        return copied

    def truncate(self, length: int) -> None:
        """Note that all rows end at `length`; what follows may differ."""
        np.minimum(self._lengths_BB, length, out=self._lengths_BB)

    def find_first_difference(self, row_map: Sequence[int]) -> int:
        """Return from which token on a row may differ from the one whose place it takes.

        >>> prefixes = CommonPrefixes(2)
        >>> prefixes.find_first_difference([0, 0])
        0
        >>> prefixes.reorder([0, 0], length=100)
        >>> prefixes.find_first_difference([1, 0])
        100
        """
        moved = [row for row, source in enumerate(row_map) if row != source]
        sources = [row_map[row] for row in moved]
        return int(self._lengths_BB[moved, sources].min(initial=np.iinfo(np.int32).max))

    def reorder(self, row_map: Sequence[int], length: int) -> None:
        """Note that new row i is a copy of old row `row_map[i]`, each of `length` tokens."""
        sources = np.asarray(row_map)
        lengths_BB = np.minimum(self._lengths_BB, length)[np.ix_(sources, sources)]
        lengths_BB[sources[:, None] == sources[None, :]] = length
        self._lengths_BB = lengths_BB
