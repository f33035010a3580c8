"""The KV memory of one peer: a budget in bytes, shared out to sessions page by page.

Only the compute thread may touch a pool and its caches.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping

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
from .kv_cache import SessionCache
from .kv_memory import PAGE_TOKENS, KVStore, Layout, count_pages

TIMES_FREE = 6
"""How many times as much as stays free one address may hold, and one client of what its address
may. A client alone gets 6/7 of 6/7 of the budget, three quarters: most of it, since it is there to
be used. Beside it, another client or address always finds some room, if only for short texts."""

# The pool cannot foresee when a session ends: a generation takes seconds.
RETRY_AFTER_SECONDS = 2.0

IDLE_SECONDS = 10.0
"""A session without a step for so long gives its pages to one that needs them. Its client can
rebuild it from its log, at the price of a prompt; tokens of a text come much closer together."""


_NEWCOMER = Tenant("a newcomer", "a new client")


class KVCachePool:
    """The KV memory of one peer: hands out leases to sessions and keeps the account.

    Invariant: the committed bytes of all open caches add up to `used_bytes` <= `budget_bytes`.
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
        self.used_bytes = 0
        self.dtype = store.dtype
        self._store = store
        self.now = now
        self._caches: set[SessionCache] = set()
        self.free_tokens = self.count_free_tokens(_NEWCOMER)
        """Tokens of one row, through all blocks, that a tenant without any may have now; pages that
        rolled back sessions can spare count as free. Any thread may read it."""

    def __repr__(self) -> str:
        return (
            f"<KVCachePool {self.used_bytes}/{self.budget_bytes} bytes, "
            f"{self.num_sessions} sessions>"
        )

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
        spare_bytes = sum(cache.spare_bytes for cache in self._caches)
        free_bytes = self.budget_bytes - self.used_bytes + spare_bytes
        held = self._count_held()
        left_bytes = max(0, self._compute_share(tenant, held) - held[tenant])
        token_bytes = self._store.num_blocks * self._store.layouts[kv_format].token_bytes
        num_pages = min(free_bytes, left_bytes) // (PAGE_TOKENS * token_bytes)
        return num_pages * PAGE_TOKENS

    def check_integrity(self) -> None:
        """Raise LocalProtocolError if the account does not add up (a bug of ours)."""
        committed_bytes = sum(cache.committed_bytes for cache in self._caches)
        if committed_bytes != self.used_bytes or self.used_bytes > self.budget_bytes:
            raise LocalProtocolError(f"{self!r} holds {committed_bytes} committed bytes")
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
        self._reserve(cache, num_tokens, num_bytes)
        self.used_bytes += num_bytes

    def give_back(self, num_bytes: int) -> None:
        """Strike `num_bytes` of a cache from the account."""
        self.used_bytes -= num_bytes

    def forget(self, cache: SessionCache) -> None:
        """Drop a closed cache."""
        self._caches.discard(cache)
        self.count_again()

    def count_again(self) -> None:
        """Note that a cache uses more or fewer of its pages."""
        self.free_tokens = self.count_free_tokens(_NEWCOMER)

    def _make_room(self, tenant: Tenant | None, num_bytes: int, largest_bytes: int) -> None:
        """Free so many bytes, if need be by closing idle sessions; CacheFullError if impossible."""
        while True:
            try:
                self._check_room(tenant, num_bytes, largest_bytes)
                break
            except CacheFullError as refusal:
                idle = self._find_idle(tenant, num_bytes)
                if refusal.retry_after_seconds is None or idle is None:
                    raise
                idle.close()
        for cache in self._caches:
            if num_bytes <= self.budget_bytes - self.used_bytes:
                return
            cache.return_spare_pages()

    def _reserve(self, cache: SessionCache, num_tokens: int, num_bytes: int) -> None:
        """Reserve tokens in the memory of a cache, for whose bytes there is room.

        If the free pages are not the same ones in all blocks of the cache, idle sessions are closed
        as in `_make_room`.
        """
        while True:
            try:
                cache.memory.reserve(num_tokens)
                return
            except CacheFullError:
                if not self._return_spare_pages():
                    idle = self._find_idle(cache.tenant, num_bytes, cache.span)
                    if idle is None:
                        raise
                    idle.close()

    @property
    def _row_page_bytes(self) -> int:
        return PAGE_TOKENS * self._store.num_blocks * self.token_bytes

    def _count_held(self) -> Counter[Tenant]:
        held: Counter[Tenant] = Counter()
        for cache in self._caches:
            if cache.tenant is not None:
                held[cache.tenant] += cache.committed_bytes - cache.spare_bytes
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

    def _return_spare_pages(self) -> bool:
        """Have all caches give back what they do not use; return whether that was anything."""
        used_bytes = self.used_bytes
        for cache in self._caches:
            cache.return_spare_pages()
        return self.used_bytes < used_bytes

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
            free_bytes += sum(cache.spare_bytes for cache in self._caches)
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
            f"{budget_bytes} bytes of KV memory (--kv-memory) are too few for a session: "
            f"{len(span)} blocks of this model need {needed_bytes} bytes for every "
            f"{PAGE_TOKENS} tokens"
        )
