"""The pages of a KV cache: committed as tokens come, given back, and accounted for."""

import mmap
import random
from dataclasses import dataclass, field

import pytest
import torch
from kv_cache_scene import SPAN, PoolMaker, assert_holds, take_step, write_tokens

from shoal.peer.engine.cache.kv_cache import SessionCache
from shoal.peer.engine.cache.kv_memory import PAGE_TOKENS
from shoal.protocol.errors import (
    CacheFullError,
    ErrorCode,
    LocalProtocolError,
    RefusedError,
    UsageError,
)
from shoal.protocol.limits import MAX_BATCH_ROWS, MAX_SESSION_TOKENS


def test_nothing_is_committed_until_tokens_come(make_pool: PoolMaker) -> None:
    pool = make_pool(10)

    cache = pool.open(2, 5 * PAGE_TOKENS, SPAN)
    assert pool.used_bytes == 0
    cache.prepare(0, 1)
    assert pool.used_bytes == 2 * make_pool.row_page_bytes
    cache.commit(1)
    cache.prepare(1, PAGE_TOKENS)

    assert pool.used_bytes == cache.committed_bytes == 4 * make_pool.row_page_bytes
    pool.check_integrity()


def test_memory_is_really_committed_page_by_page() -> None:
    # 3 blocks x 2 x 2 heads x 2**18 tokens x 32 bytes = 100 MB addressable.
    pool = PoolMaker("lazy")(2**12)
    # The first use of torch's operations makes their code resident.
    take_step(pool.open(1, 2**18, SPAN), 0, torch.ones(1, PAGE_TOKENS))
    before = read_resident_bytes()

    cache = pool.open(1, 2**18, SPAN)
    take_step(cache, 0, torch.ones(1, PAGE_TOKENS))

    assert read_resident_bytes() - before < 2**20


def test_rolled_back_pages_really_go_back_to_the_operating_system() -> None:
    make_pool = PoolMaker("lazy")
    num_tokens = 2**16
    pool = make_pool(num_tokens // PAGE_TOKENS)
    cache = pool.open(1, num_tokens, SPAN)
    before = read_resident_bytes()
    take_step(cache, 0, torch.ones(1, num_tokens))
    grown_bytes = read_resident_bytes() - before

    take_step(cache, 0, torch.full((1, 5), 3.0))

    assert grown_bytes > 0.9 * pool.budget_bytes
    assert read_resident_bytes() - before < 0.1 * grown_bytes
    assert pool.used_bytes == make_pool.row_page_bytes
    assert_holds(cache, torch.full((1, 5), 3.0))


def read_resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * mmap.PAGESIZE


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
    make_pool: PoolMaker, position: int, num_tokens: int, row_map, code: ErrorCode
) -> None:
    pool = make_pool(8)
    cache = pool.open(2, 100, SPAN)
    values = torch.arange(6.0).view(2, 3)
    take_step(cache, 0, values)

    with pytest.raises(RefusedError) as refusal:
        cache.prepare(position, num_tokens, row_map)

    assert refusal.value.code == code
    assert_holds(cache, values)


def test_more_than_was_prepared_cannot_be_committed(make_pool: PoolMaker) -> None:
    cache = make_pool(4).open(1, 100, SPAN)
    cache.prepare(0, 2)

    with pytest.raises(LocalProtocolError):
        cache.commit(3)


@pytest.mark.parametrize(
    ("num_rows", "max_tokens"),
    [(0, 1), (MAX_BATCH_ROWS + 1, 1), (1, 0), (1, MAX_SESSION_TOKENS + 1)],
)
def test_open_refuses_sizes_outside_of_the_limits(
    make_pool: PoolMaker, num_rows: int, max_tokens: int
) -> None:
    with pytest.raises(RefusedError) as refusal:
        make_pool(4).open(num_rows, max_tokens, SPAN)
    assert refusal.value.code is ErrorCode.TOO_LONG


def test_sessions_at_the_limits_cost_address_space_only(make_pool: PoolMaker) -> None:
    pool = make_pool(MAX_BATCH_ROWS)

    caches = [pool.open(MAX_BATCH_ROWS, MAX_SESSION_TOKENS, SPAN) for _ in range(20)]
    take_step(caches[-1], 0, torch.ones(MAX_BATCH_ROWS, 2))

    assert pool.used_bytes == pool.budget_bytes


def test_negative_budget_is_refused_and_zero_serves_nobody(make_pool: PoolMaker) -> None:
    with pytest.raises(UsageError):
        make_pool(-1)
    with pytest.raises(CacheFullError):
        make_pool(0).open(1, 1, SPAN)


def test_close_gives_every_byte_back_and_ends_the_cache(make_pool: PoolMaker) -> None:
    pool = make_pool(8)
    cache = pool.open(2, 100, SPAN)
    take_step(cache, 0, torch.ones(2, 70))

    cache.close()
    cache.close()

    assert pool.used_bytes == 0
    assert pool.num_sessions == 0
    assert "closed" in repr(cache)
    with pytest.raises(RefusedError) as refusal:
        cache.prepare(0, 1)
    assert refusal.value.code is ErrorCode.UNKNOWN_SESSION


def test_pool_shows_the_account(make_pool: PoolMaker) -> None:
    pool = make_pool(8)
    cache = pool.open(1, 200, SPAN)
    take_step(cache, 0, torch.ones(1, 65))

    page_bytes = make_pool.row_page_bytes
    assert pool.used_bytes == 2 * make_pool.row_page_bytes
    # A newcomer may have six sevenths of six sevenths of eight pages.
    assert pool.free_tokens == 5 * PAGE_TOKENS
    assert repr(pool) == f"<KVCachePool {2 * page_bytes}/{8 * page_bytes} bytes, 1 sessions>"
    assert repr(cache) == "<SessionCache 5:8 x 1 rows, 65/200 tokens>"


def test_check_integrity_notices_a_wrong_account(make_pool: PoolMaker) -> None:
    pool = make_pool(8)
    pool.open(1, 200, SPAN).prepare(0, 1)
    pool.budget_bytes = pool.used_bytes - 1

    with pytest.raises(LocalProtocolError):
        pool.check_integrity()


@dataclass
class Oracle:
    """What a cache must hold: plain rows of numbers."""

    cache: SessionCache
    values_BT: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.values_BT = torch.zeros(self.cache.num_rows, 0)


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.thorough) for seed in (2, 3))]
)
def test_random_sessions_agree_with_an_oracle(make_pool: PoolMaker, seed: int) -> None:
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
