"""Sessions that nobody steps give way to those that need their room."""

from __future__ import annotations

import asyncio

import pytest
import torch
from compute_thread_scene import on_loop

from shoal.peer.engine.cache.kv_cache import IDLE_SECONDS, KVCachePool, SessionCache
from shoal.peer.engine.cache.kv_memory import PAGE_TOKENS
from shoal.peer.engine.cache.lazy_memory import LazyStore
from shoal.protocol.errors import CacheFullError, ErrorCode, RefusedError
from shoal.protocol.fair_share import Tenant
from shoal.protocol.spans import Span

SPAN = Span(0, 1)
PAGE_BYTES = PAGE_TOKENS * 2 * 2 * 8 * 4


class Pool:
    """A pool of some pages whose time only passes when a test says so."""

    def __init__(self, num_pages: int) -> None:
        self.seconds = 0.0
        store = LazyStore(1, 2, 8, torch.float32)
        self.pool = KVCachePool(num_pages * PAGE_BYTES, store, now=lambda: self.seconds)

    def open(self, tenant: Tenant, num_pages: int) -> SessionCache:
        cache = self.pool.open(1, 100 * PAGE_TOKENS, SPAN, tenant)
        grow(cache, num_pages)
        return cache


def grow(cache: SessionCache, num_pages: int) -> None:
    num_tokens = num_pages * PAGE_TOKENS
    cache.prepare(cache.length, num_tokens)
    cache.commit(num_tokens)


def test_idle_session_gives_its_pages_to_one_that_needs_them() -> None:
    scene = Pool(18)
    idle, other = scene.open(Tenant("a"), 10), scene.open(Tenant("b"), 2)
    scene.seconds = IDLE_SECONDS
    other.touch()

    grow(other, 1)
    assert idle.is_open
    grow(other, 6)

    assert not idle.is_open
    assert scene.pool.used_bytes == 9 * PAGE_BYTES
    scene.pool.check_integrity()
    with pytest.raises(RefusedError) as refused:
        idle.prepare(10 * PAGE_TOKENS, 1)
    assert refused.value.code is ErrorCode.UNKNOWN_SESSION


def test_session_in_use_keeps_its_pages() -> None:
    scene = Pool(14)
    busy, other = scene.open(Tenant("a"), 8), scene.open(Tenant("b"), 4)
    scene.seconds = IDLE_SECONDS
    busy.touch()
    scene.seconds += IDLE_SECONDS - 0.1

    with pytest.raises(CacheFullError):
        grow(other, 3)

    assert busy.is_open
    assert busy.length == 8 * PAGE_TOKENS


@on_loop()
async def test_session_whose_step_waits_keeps_its_pages_however_long() -> None:
    scene = Pool(14)
    busy, other = scene.open(Tenant("a"), 8), scene.open(Tenant("b"), 4)
    waiting = asyncio.get_running_loop().create_future()
    busy.running.add(waiting)
    scene.seconds = 2 * IDLE_SECONDS
    with pytest.raises(CacheFullError):
        grow(other, 3)
    assert busy.is_open

    busy.running.discard(waiting)
    grow(other, 3)
    assert not busy.is_open


def test_who_is_idle_for_longest_goes_first_and_no_more_than_needed() -> None:
    scene = Pool(14)
    sessions = []
    for number in range(3):
        scene.seconds = float(number)
        sessions.append(scene.open(Tenant("a", "one"), 3))
    other = scene.open(Tenant("a", "two"), 2)
    scene.seconds = 2 * IDLE_SECONDS
    other.touch()

    grow(other, 1)

    assert [cache.is_open for cache in sessions] == [False, True, True]


def test_nobody_drives_a_smaller_user_out() -> None:
    scene = Pool(14)
    small = scene.open(Tenant("small"), 2)
    greedy = scene.open(Tenant("greedy"), 8)
    scene.seconds = 2 * IDLE_SECONDS
    greedy.touch()

    with pytest.raises(CacheFullError):
        grow(greedy, 5)

    assert small.is_open


def test_what_can_never_fit_drives_nobody_out() -> None:
    scene = Pool(14)
    idle, other = scene.open(Tenant("a"), 6), scene.open(Tenant("b"), 1)
    scene.seconds = 2 * IDLE_SECONDS
    other.touch()

    with pytest.raises(CacheFullError) as refused:
        grow(other, 20)

    assert refused.value.retry_after_seconds is None
    assert idle.is_open
