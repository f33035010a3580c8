"""Who gets the room in a KV cache, and what gives way when there is none."""

import pytest
import torch
from kv_cache_scene import SPAN, PoolMaker, assert_holds, take_step, write_tokens

from shoal.peer.engine.cache.kv_cache import KVCachePool, SessionCache
from shoal.peer.engine.cache.kv_memory import PAGE_TOKENS
from shoal.protocol.errors import CacheFullError
from shoal.protocol.fair_share import Tenant
from shoal.protocol.limits import MAX_SESSION_TOKENS


def test_full_cache_refuses_and_changes_nothing(make_pool: PoolMaker) -> None:
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


def test_full_cache_suggests_to_retry_only_if_that_can_help(make_pool: PoolMaker) -> None:
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


def test_open_refuses_only_when_not_one_page_fits(make_pool: PoolMaker) -> None:
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

    assert pool.num_sessions == 1


def fill(pool: KVCachePool, tenant: Tenant, num_rows: int = 1) -> SessionCache:
    """Let a session take page after page until it gets no more, and return it."""
    cache = pool.open(num_rows, MAX_SESSION_TOKENS, SPAN, tenant)
    while True:
        try:
            take_step(cache, cache.length, torch.zeros(num_rows, PAGE_TOKENS))
        except CacheFullError:
            return cache


def test_one_client_gets_most_of_the_budget_and_leaves_some_to_others(make_pool: PoolMaker) -> None:
    pool = make_pool(100)

    greedy = fill(pool, Tenant("home", "greedy"))
    assert greedy.committed_bytes == 73 * make_pool.row_page_bytes
    with pytest.raises(CacheFullError):
        pool.open(16, 500, SPAN, Tenant("home", "greedy"))

    neighbour = fill(pool, Tenant("home", "other"))
    assert neighbour.committed_bytes == 10 * make_pool.row_page_bytes
    stranger = fill(pool, Tenant("elsewhere", "someone"))
    assert stranger.committed_bytes == 12 * make_pool.row_page_bytes
    pool.check_integrity()

    greedy.close()
    take_step(stranger, stranger.length, torch.zeros(1, 30 * PAGE_TOKENS))


def test_what_is_beyond_any_share_is_refused_for_good(make_pool: PoolMaker) -> None:
    pool = make_pool(100)
    cache = pool.open(16, 1000, SPAN, Tenant("home", "a"))

    with pytest.raises(CacheFullError) as refusal:
        cache.prepare(0, 5 * PAGE_TOKENS)  # 80 pages
    assert refusal.value.retry_after_seconds is None
    cache.prepare(0, 4 * PAGE_TOKENS)
    other = pool.open(1, 3000, SPAN, Tenant("home", "b"))
    with pytest.raises(CacheFullError) as refusal:
        other.prepare(0, 30 * PAGE_TOKENS)
    assert refusal.value.retry_after_seconds is not None


def test_refusal_says_what_is_held_already_and_what_helps(make_pool: PoolMaker) -> None:
    pool = make_pool(4)
    take_step(pool.open(1, 500, SPAN, Tenant("home", "a")), 0, torch.zeros(1, PAGE_TOKENS))
    cache = pool.open(1, 500, SPAN, Tenant("home", "a"))

    with pytest.raises(CacheFullError) as refusal:
        cache.prepare(0, 2 * PAGE_TOKENS)

    held, share = make_pool.row_page_bytes, 4 * make_pool.row_page_bytes * 6 // 7 * 6 // 7
    expected = (
        f"your sessions here hold {held} bytes of your share of {share} bytes of the KV cache"
    )
    assert str(refusal.value).startswith(expected)
    assert f"{2 * make_pool.row_page_bytes} more are needed; close some" in str(refusal.value)
    assert "--kv int8" in str(refusal.value)


@pytest.mark.parametrize("num_pages", [1, 2])
def test_budget_of_a_page_is_for_whoever_comes_first(make_pool: PoolMaker, num_pages: int) -> None:
    pool = make_pool(num_pages)

    fill(pool, Tenant("home", "a"))

    assert pool.used_bytes == make_pool.row_page_bytes


def test_rolled_back_pages_are_given_back_at_once(make_pool: PoolMaker) -> None:
    pool = make_pool(4)
    first, second = pool.open(1, 500, SPAN), pool.open(1, 500, SPAN)
    values = torch.arange(4.0 * PAGE_TOKENS)[None]
    take_step(first, 0, values)

    take_step(first, 10, torch.ones(1, 1))

    assert first.committed_bytes == make_pool.row_page_bytes
    assert pool.count_free_tokens(Tenant("a")) == 2 * PAGE_TOKENS
    take_step(second, 0, values[:, : 3 * PAGE_TOKENS])
    assert_holds(first, torch.cat([values[:, :10], torch.ones(1, 1)], dim=1))
    assert_holds(second, values[:, : 3 * PAGE_TOKENS])
    pool.check_integrity()


def test_pages_of_a_prepared_step_are_not_taken_away(make_pool: PoolMaker) -> None:
    pool = make_pool(2)
    first, second = pool.open(1, 500, SPAN), pool.open(1, 500, SPAN)
    first.prepare(0, 2 * PAGE_TOKENS)

    with pytest.raises(CacheFullError):
        second.prepare(0, 1)
    first.abandon()
    second.prepare(0, 1)

    assert first.committed_bytes == 0
    pool.check_integrity()


def test_rollback_leaves_the_pages_of_a_prepared_step(make_pool: PoolMaker) -> None:
    pool = make_pool(4)
    first, second = pool.open(1, 500, SPAN), pool.open(1, 500, SPAN)
    values = torch.arange(4.0 * PAGE_TOKENS)[None]
    take_step(first, 0, values)

    first.prepare(10, PAGE_TOKENS)
    write_tokens(first, values[:, :PAGE_TOKENS], 10)
    take_step(second, 0, values[:, : 2 * PAGE_TOKENS])
    first.commit(PAGE_TOKENS)

    assert first.committed_bytes == 2 * make_pool.row_page_bytes
    assert_holds(first, torch.cat([values[:, :10], values[:, :PAGE_TOKENS]], dim=1))
    pool.check_integrity()
