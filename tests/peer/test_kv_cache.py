"""The pages of a KV cache: committed as tokens come, given back, and accounted for."""

import mmap
import random
from dataclasses import dataclass, field

import pytest
import torch
from kv_cache_scene import ROW_PAGE_BYTES, SPAN, assert_holds, make_pool, take_step, write_tokens

from shoal.peer.engine.kv_cache import PAGE_TOKENS, SessionCache
from shoal.protocol.errors import (
    CacheFullError,
    ErrorCode,
    LocalProtocolError,
    RefusedError,
    UsageError,
)
from shoal.protocol.limits import MAX_BATCH_ROWS, MAX_SESSION_TOKENS


def test_nothing_is_committed_until_tokens_come() -> None:
    pool = make_pool(10)

    cache = pool.open(2, 5 * PAGE_TOKENS, SPAN)
    assert pool.used_bytes == 0
    cache.prepare(0, 1)
    assert pool.used_bytes == 2 * ROW_PAGE_BYTES
    cache.commit(1)
    cache.prepare(1, PAGE_TOKENS)

    assert pool.used_bytes == cache.committed_bytes == 4 * ROW_PAGE_BYTES
    pool.check_integrity()


def test_memory_is_really_committed_page_by_page() -> None:
    # 3 blocks x 2 x 2 heads x 2**18 tokens x 32 bytes = 100 MB addressable.
    pool = make_pool(2**12)
    # The first use of torch's operations makes their code resident.
    take_step(pool.open(1, 2**18, SPAN), 0, torch.ones(1, PAGE_TOKENS))
    before = read_resident_bytes()

    cache = pool.open(1, 2**18, SPAN)
    take_step(cache, 0, torch.ones(1, PAGE_TOKENS))

    assert read_resident_bytes() - before < 2**20


def test_spare_pages_really_go_back_to_the_operating_system() -> None:
    num_tokens = 2**16
    pool = make_pool(num_tokens // PAGE_TOKENS)
    cache = pool.open(1, num_tokens, SPAN)
    before = read_resident_bytes()
    take_step(cache, 0, torch.ones(1, num_tokens))
    grown_bytes = read_resident_bytes() - before
    take_step(cache, 0, torch.full((1, 5), 3.0))

    cache.return_spare_pages()

    assert grown_bytes > 0.9 * pool.budget_bytes
    assert read_resident_bytes() - before < 0.1 * grown_bytes
    assert pool.used_bytes == ROW_PAGE_BYTES
    assert_holds(cache, torch.full((1, 5), 3.0))


def read_resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * mmap.PAGESIZE


<<<<<<< HEAD
=======
def test_full_cache_refuses_and_changes_nothing() -> None:
    pool = make_pool(3)
    other = pool.open(1, 500, SPAN)
    take_step(other, 0, torch.zeros(1, PAGE_TOKENS))
    cache = pool.open(2, 500, SPAN)
    values = torch.arange(80.0).view(2, 40)
    take_step(cache, 0, values)
    used_bytes = pool.used_bytes

    with pytest.raises(CacheFullError) as refusal:
        cache.prepare(30, PAGE_TOKENS, row_map=(1, 0))

    assert refusal.value.retry_after_seconds is None  # two rows of two pages never fit three
    assert pool.used_bytes == used_bytes
    assert_holds(cache, values)
    pool.check_integrity()
    take_step(cache, 40, torch.ones(2, PAGE_TOKENS - 40))


def test_full_cache_suggests_to_retry_only_if_that_can_help() -> None:
    pool = make_pool(3)
    other = pool.open(1, 500, SPAN)
    take_step(other, 0, torch.zeros(1, 2 * PAGE_TOKENS))
    cache = pool.open(1, 500, SPAN)

    with pytest.raises(CacheFullError) as refusal:
        cache.prepare(0, 3 * PAGE_TOKENS)
    assert refusal.value.retry_after_seconds is not None
    with pytest.raises(CacheFullError) as refusal:
        cache.prepare(0, 3 * PAGE_TOKENS + 1)
    assert refusal.value.retry_after_seconds is None

    other.close()
    cache.prepare(0, 3 * PAGE_TOKENS)


def test_open_refuses_only_when_not_one_page_fits() -> None:
    pool = make_pool(3)
    held = pool.open(1, 500, SPAN)
    take_step(held, 0, torch.zeros(1, 2 * PAGE_TOKENS))

    pool.open(1, 500, SPAN).close()
    with pytest.raises(CacheFullError) as refusal:
        pool.open(2, 500, SPAN)
    assert refusal.value.retry_after_seconds is not None
    with pytest.raises(CacheFullError) as refusal:
        pool.open(4, 500, SPAN)
    assert refusal.value.retry_after_seconds is None

    assert pool.statistics().num_sessions == 1


def fill(pool: KVCachePool, holder: Holder, num_rows: int = 1) -> SessionCache:
    """Let a session take page after page until it gets no more, and return it."""
    cache = pool.open(num_rows, MAX_SESSION_TOKENS, SPAN, holder)
    while True:
        try:
            take_step(cache, cache.length, torch.zeros(num_rows, PAGE_TOKENS))
        except CacheFullError:
            return cache


def test_one_client_gets_most_of_the_budget_and_leaves_some_to_others() -> None:
    pool = make_pool(100)

    greedy = fill(pool, Holder("home", "greedy"))
    assert greedy.committed_bytes == 73 * ROW_PAGE_BYTES
    with pytest.raises(CacheFullError):
        pool.open(16, 500, SPAN, Holder("home", "greedy"))

    neighbour = fill(pool, Holder("home", "other"))
    assert neighbour.committed_bytes == 10 * ROW_PAGE_BYTES
    stranger = fill(pool, Holder("elsewhere", "someone"))
    assert stranger.committed_bytes == 12 * ROW_PAGE_BYTES
    pool.check_integrity()

    greedy.close()
    take_step(stranger, stranger.length, torch.zeros(1, 30 * PAGE_TOKENS))


def test_what_is_beyond_any_share_is_refused_for_good() -> None:
    pool = make_pool(100)
    cache = pool.open(16, 1000, SPAN, Holder("home", "a"))

    with pytest.raises(CacheFullError) as refusal:
        cache.prepare(0, 5 * PAGE_TOKENS)  # 80 pages
    assert refusal.value.retry_after_seconds is None
    cache.prepare(0, 4 * PAGE_TOKENS)
    other = pool.open(1, 3000, SPAN, Holder("home", "b"))
    with pytest.raises(CacheFullError) as refusal:
        other.prepare(0, 30 * PAGE_TOKENS)
    assert refusal.value.retry_after_seconds is not None


@pytest.mark.parametrize("num_pages", [1, 2])
def test_budget_of_a_page_is_for_whoever_comes_first(num_pages: int) -> None:
    pool = make_pool(num_pages)

    fill(pool, Holder("home", "a"))

    assert pool.used_bytes == ROW_PAGE_BYTES


def test_rolled_back_pages_are_kept_until_another_session_needs_them() -> None:
    pool = make_pool(4)
    first, second = pool.open(1, 500, SPAN), pool.open(1, 500, SPAN)
    values = torch.arange(4.0 * PAGE_TOKENS)[None]
    take_step(first, 0, values)
    take_step(first, 10, torch.ones(1, 1))
    assert first.committed_bytes == 4 * ROW_PAGE_BYTES
    assert first.spare_bytes == 3 * ROW_PAGE_BYTES
    assert pool.count_free_tokens(Holder("a")) == 2 * PAGE_TOKENS

    take_step(second, 0, values[:, : 3 * PAGE_TOKENS])

    assert first.committed_bytes == ROW_PAGE_BYTES
    assert_holds(first, torch.cat([values[:, :10], torch.ones(1, 1)], dim=1))
    assert_holds(second, values[:, : 3 * PAGE_TOKENS])
    pool.check_integrity()


def test_pages_of_a_prepared_step_are_not_taken_away() -> None:
    pool = make_pool(2)
    first, second = pool.open(1, 500, SPAN), pool.open(1, 500, SPAN)
    first.prepare(0, 2 * PAGE_TOKENS)

    with pytest.raises(CacheFullError):
        second.prepare(0, 1)
    first.abandon()
    second.prepare(0, 1)

    assert first.committed_bytes == 0
    pool.check_integrity()


def test_reclaiming_leaves_the_pages_of_a_prepared_step() -> None:
    pool = make_pool(4)
    first, second = pool.open(1, 500, SPAN), pool.open(1, 500, SPAN)
    values = torch.arange(4.0 * PAGE_TOKENS)[None]
    take_step(first, 0, values)

    first.prepare(10, PAGE_TOKENS)
    write_tokens(first, values[:, :PAGE_TOKENS], 10)
    take_step(second, 0, values[:, : 2 * PAGE_TOKENS])
    first.commit(PAGE_TOKENS)

    assert first.committed_bytes == 2 * ROW_PAGE_BYTES
    assert_holds(first, torch.cat([values[:, :10], values[:, :PAGE_TOKENS]], dim=1))
    pool.check_integrity()


>>>>>>> e5be7db (Count those of an address that give no name as one client)
@pytest.mark.parametrize(
    ("position", "num_tokens", "row_map", "code"),
    [
        (4, 1, None, ErrorCode.BAD_VALUES),
        (-1, 1, None, ErrorCode.BAD_VALUES),
        (3, 0, None, ErrorCode.BAD_VALUES),
        (3, 98, None, ErrorCode.TOO_LONG),
        (3, 1, (0,), ErrorCode.BAD_VALUES),
        (3, 1, (0, 2), ErrorCode.BAD_VALUES),
        (3, 1, (-1, 0), ErrorCode.BAD_VALUES),
    ],
)
def test_steps_that_do_not_fit_are_refused_and_change_nothing(
    position: int, num_tokens: int, row_map, code: ErrorCode
) -> None:
    pool = make_pool(8)
    cache = pool.open(2, 100, SPAN)
    values = torch.arange(6.0).view(2, 3)
    take_step(cache, 0, values)

    with pytest.raises(RefusedError) as refusal:
        cache.prepare(position, num_tokens, row_map)

    assert refusal.value.code == code
    assert_holds(cache, values)


def test_more_than_was_prepared_cannot_be_committed() -> None:
    cache = make_pool(4).open(1, 100, SPAN)
    cache.prepare(0, 2)

    with pytest.raises(LocalProtocolError):
        cache.commit(3)


@pytest.mark.parametrize(
    ("num_rows", "max_tokens"),
    [(0, 1), (MAX_BATCH_ROWS + 1, 1), (1, 0), (1, MAX_SESSION_TOKENS + 1)],
)
def test_open_refuses_sizes_outside_of_the_limits(num_rows: int, max_tokens: int) -> None:
    with pytest.raises(RefusedError) as refusal:
        make_pool(4).open(num_rows, max_tokens, SPAN)
    assert refusal.value.code is ErrorCode.TOO_LONG


def test_sessions_at_the_limits_cost_address_space_only() -> None:
    pool = make_pool(MAX_BATCH_ROWS)

    caches = [pool.open(MAX_BATCH_ROWS, MAX_SESSION_TOKENS, SPAN) for _ in range(20)]
    take_step(caches[-1], 0, torch.ones(MAX_BATCH_ROWS, 2))

    assert pool.used_bytes == pool.budget_bytes


def test_negative_budget_is_refused_and_zero_serves_nobody() -> None:
    with pytest.raises(UsageError):
        make_pool(-1)
    with pytest.raises(CacheFullError):
        make_pool(0).open(1, 1, SPAN)


def test_close_gives_every_byte_back_and_ends_the_cache() -> None:
    pool = make_pool(8)
    cache = pool.open(2, 100, SPAN)
    take_step(cache, 0, torch.ones(2, 70))

    cache.close()
    cache.close()

    assert pool.used_bytes == 0
    assert pool.statistics().num_sessions == 0
    assert "closed" in repr(cache)
    with pytest.raises(RefusedError) as refusal:
        cache.prepare(0, 1)
    assert refusal.value.code is ErrorCode.UNKNOWN_SESSION


def test_statistics_and_repr_show_the_account() -> None:
    pool = make_pool(8)
    cache = pool.open(1, 200, SPAN)
    take_step(cache, 0, torch.ones(1, 65))

    statistics = pool.statistics()

    assert statistics.budget_bytes == 8 * ROW_PAGE_BYTES
    assert statistics.used_bytes == 2 * ROW_PAGE_BYTES
    # A newcomer may have six sevenths of six sevenths of eight pages.
    assert statistics.free_tokens == 5 * PAGE_TOKENS
    assert (
        repr(pool) == f"<KVCachePool {2 * ROW_PAGE_BYTES}/{8 * ROW_PAGE_BYTES} bytes, 1 sessions>"
    )
    assert repr(cache) == "<SessionCache 5:8 x 1 rows, 65/200 tokens>"


def test_check_integrity_notices_a_wrong_account() -> None:
    pool = make_pool(8)
    pool.open(1, 200, SPAN).prepare(0, 1)
    pool.used_bytes -= 1

    with pytest.raises(LocalProtocolError):
        pool.check_integrity()


@dataclass
class Oracle:
    """What a cache must hold: plain rows of numbers."""

    cache: SessionCache
    values_BT: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.values_BT = torch.zeros(self.cache.num_rows, 0)


@pytest.mark.parametrize("seed", range(8))
def test_random_sessions_agree_with_an_oracle(seed: int) -> None:
    print("seed", seed)
    chance = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    pool = make_pool(12)
    oracles: list[Oracle] = []
    num_refused = 0
    for _ in range(250):
        if not oracles or chance.random() < 0.1:
            try:
                cache = pool.open(chance.randint(1, 3), chance.randint(50, 300), SPAN)
                oracles.append(Oracle(cache))
            except CacheFullError:
                num_refused += 1
                oracles.pop(chance.randrange(len(oracles))).cache.close()
            continue
        if chance.random() < 0.05:
            oracles.pop(chance.randrange(len(oracles))).cache.close()
            continue
        num_refused += take_random_step(chance.choice(oracles), chance, generator)
        pool.check_integrity()
        for oracle in oracles:
            assert_holds(oracle.cache, oracle.values_BT)

    assert num_refused > 0
    for oracle in oracles:
        oracle.cache.close()
    assert pool.used_bytes == 0


def take_random_step(oracle: Oracle, chance: random.Random, generator: torch.Generator) -> bool:
    """Take a step on cache and oracle; return whether it was refused."""
    cache = oracle.cache
    position = cache.length if chance.random() < 0.7 else chance.randint(0, cache.length)
    num_tokens = chance.choice([1, 1, 1, chance.randint(1, 150)])
    values_BT = torch.randint(0, 1000, (cache.num_rows, num_tokens), generator=generator).float()
    row_map = None
    if chance.random() < 0.3:
        row_map = [chance.randrange(cache.num_rows) for _ in range(cache.num_rows)]
    try:
        cache.prepare(position, num_tokens, row_map)
    except RefusedError:
        return True
    write_tokens(cache, values_BT, position)
    old_BT = oracle.values_BT[:, :position]
    if row_map is not None:
        old_BT = old_BT[row_map]
    if chance.random() < 0.1:
        cache.abandon()
        oracle.values_BT = old_BT
    else:
        cache.commit(num_tokens)
        oracle.values_BT = torch.cat([old_BT, values_BT], dim=1)
    return False
