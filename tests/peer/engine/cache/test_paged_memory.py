"""Pages of a device: whose they are, and what sessions of other blocks and formats make of them."""

from __future__ import annotations

import pytest
import torch
from kv_cache_scene import (
    HEAD_DIM,
    NUM_BLOCKS,
    NUM_HEADS,
    SPAN,
    assert_holds,
    copy_prefix,
    take_step,
)

from shoal.peer.engine.cache import kv_cache
from shoal.peer.engine.cache.kv_cache import IDLE_SECONDS, KVCachePool, SessionCache
from shoal.peer.engine.cache.kv_memory import PAGE_TOKENS
from shoal.peer.engine.cache.paged_memory import PagedMemory, PagedStore
from shoal.protocol.errors import CacheFullError, LocalProtocolError
from shoal.protocol.fair_share import Tenant
from shoal.protocol.spans import Span
from shoal.protocol.tensors import KVFormat

CPU = torch.device("cpu")


def make_pool(num_pages: int, dtype: torch.dtype = torch.float32) -> tuple[KVCachePool, PagedStore]:
    """Return a pool for so many pages of the store in each block."""
    page_bytes = PagedStore(0, SPAN, NUM_HEADS, HEAD_DIM, dtype, CPU).page_bytes
    budget_bytes = num_pages * NUM_BLOCKS * page_bytes
    store = PagedStore(budget_bytes, SPAN, NUM_HEADS, HEAD_DIM, dtype, CPU)
    return KVCachePool(budget_bytes, store), store


def count_taken(cache: SessionCache) -> int:
    assert isinstance(cache.memory, PagedMemory)
    return cache.memory.taken_BM.size


def fill(cache: SessionCache, num_tokens: int) -> None:
    cache.prepare(cache.length, num_tokens)
    cache.commit(num_tokens)


@pytest.mark.parametrize(
    ("kv_format", "dtype", "num_pages"),
    [
        (KVFormat.FLOAT, torch.float32, 4),
        (KVFormat.FLOAT, torch.bfloat16, 2),
        (KVFormat.INT8, torch.float32, 1),
    ],
)
def test_account_is_that_of_the_pages_that_are_taken(
    kv_format: KVFormat, dtype: torch.dtype, num_pages: int
) -> None:
    pool, store = make_pool(20, dtype)
    cache = pool.open(2, 300, SPAN, None, kv_format)

    fill(cache, PAGE_TOKENS + 1)

    assert count_taken(cache) == 2 * 2 * num_pages
    assert pool.used_bytes == count_taken(cache) * NUM_BLOCKS * store.page_bytes
    pool.check_integrity()


def test_budget_is_allocated_with_one_page_more() -> None:
    _, store = make_pool(7)

    for block in range(SPAN.start, SPAN.stop):
        for dtype in (torch.float32, torch.int8):
            assert store.pages(block, dtype).nbytes == 8 * store.page_bytes
    assert store.nobodys_page == 7


def test_pages_go_from_sessions_of_one_format_to_those_of_another() -> None:
    pool, _ = make_pool(8)
    floats = pool.open(1, 128, SPAN)
    fill(floats, 128)
    with pytest.raises(CacheFullError):
        pool.open(1, 64, SPAN, None, KVFormat.INT8)
    floats.close()

    integers = [pool.open(1, 64, SPAN, None, KVFormat.INT8) for _ in range(8)]
    for cache in integers:
        fill(cache, 64)
    integers.pop(3).close()
    integers.pop(5).close()
    integers.pop(0).close()
    integers.pop(2).close()
    later = pool.open(1, 64, SPAN)
    take_step(later, 0, torch.arange(64.0)[None])

    assert_holds(later, torch.arange(64.0)[None])
    assert pool.used_bytes == pool.budget_bytes
    pool.check_integrity()


def test_sessions_of_different_blocks_have_the_same_pages() -> None:
    pool, _ = make_pool(4)
    first = pool.open(1, 64, Span(SPAN.start, SPAN.start + 1))
    second = pool.open(1, 64, Span(SPAN.start + 1, SPAN.stop))

    for number, cache in enumerate((first, second)):
        take_step(cache, 0, torch.full((1, 64), 10.0 * number))

    assert pool.used_bytes == pool.budget_bytes
    pool.check_integrity()
    for number, cache in enumerate((first, second)):
        assert_holds(cache, torch.full((1, 64), 10.0 * number))


def test_holes_that_do_not_lie_side_by_side_are_refused_for_a_while() -> None:
    pool, _ = make_pool(8)
    low, high = (
        [pool.open(1, 64, span) for _ in range(2)]
        for span in (Span(SPAN.start, SPAN.start + 1), Span(SPAN.start + 1, SPAN.stop))
    )
    for cache in (*low, *high):
        fill(cache, 64)
    low[0].close()
    high[1].close()
    whole = pool.open(1, 64, SPAN)

    with pytest.raises(CacheFullError, match="lie side by side") as refusal:
        whole.prepare(0, 1)

    assert refusal.value.retry_after_seconds is not None
    assert whole.committed_bytes == 0
    pool.check_integrity()
    high[0].close()
    fill(whole, 64)
    pool.check_integrity()


class Holes:
    """Pages for four sessions in each block. Some are free, of which none lie side by side."""

    def __init__(self) -> None:
        self.pool, _ = make_pool(16)
        self.asker = Tenant("a")
        low, self.high = (
            [self.pool.open(1, 64, span, self.asker if n == 0 else None) for n in range(4)]
            for span in (Span(SPAN.start, SPAN.start + 1), Span(SPAN.start + 1, SPAN.stop))
        )
        for cache in (*low, *self.high):
            fill(cache, 64)
        low[0].close()
        self.high[1].close()


def test_idle_sessions_give_way_where_free_pages_do_not_lie_side_by_side() -> None:
    holes = Holes()
    holes.high[0].used_at -= IDLE_SECONDS

    fill(holes.pool.open(1, 64, SPAN, holes.asker), 64)

    assert not holes.high[0].is_open
    holes.pool.check_integrity()


def test_idle_session_of_other_blocks_gives_way_to_nobody_who_could_not_use_its_pages() -> None:
    holes = Holes()
    holes.high[0].close()
    elsewhere = holes.pool.open(1, 64, Span(SPAN.stop - 1, SPAN.stop), holes.asker)
    fill(elsewhere, 64)
    elsewhere.used_at -= IDLE_SECONDS
    first_two = Span(SPAN.start, SPAN.start + 2)
    fill(holes.pool.open(1, 64, first_two), 64)
    other = holes.pool.open(1, 64, first_two, holes.asker)

    with pytest.raises(CacheFullError, match="lie side by side"):
        other.prepare(0, 1)

    assert elsewhere.is_open
    holes.pool.check_integrity()


def test_rows_have_pages_of_their_own_after_they_were_moved() -> None:
    pool, _ = make_pool(40)
    cache = pool.open(3, 200, SPAN)
    values = torch.arange(3.0 * 70).view(3, 70)
    take_step(cache, 0, values)

    take_step(cache, 70, torch.zeros(3, 1), row_map=(1, 1, 0))
    take_step(cache, 40, torch.arange(3.0)[:, None])

    assert_holds(cache, torch.cat([values[[1, 1, 0], :40], torch.arange(3.0)[:, None]], dim=1))
    pool.check_integrity()


@pytest.mark.parametrize(("pages_in_piece", "num_pieces"), [(0, 36), (2, 36), (4, 18), (1000, 3)])
def test_prefix_is_copied_in_pages_of_all_rows(
    monkeypatch: pytest.MonkeyPatch, pages_in_piece: int, num_pieces: int
) -> None:
    pool, store = make_pool(200)
    monkeypatch.setattr(kv_cache, "PIECE_BYTES", pages_in_piece * store.page_bytes)
    parent, fork = (pool.open(2, 400, SPAN) for _ in range(2))
    values = torch.arange(2.0 * 200).view(2, 200)
    take_step(parent, 0, values)

    assert copy_prefix(parent, fork, 190) == num_pieces  # 12 pages of 16 tokens in each block

    assert_holds(fork, values[:, :190])


@pytest.mark.parametrize("fault", ["shared", "lost", "taken twice", "too few"])
def test_check_integrity_notices_pages_that_went_astray(fault: str) -> None:
    pool, store = make_pool(20)
    one, other = (pool.open(1, 200, SPAN) for _ in range(2))
    fill(one, 64)
    fill(other, 64)
    pool.check_integrity()
    ours, theirs = one.memory, other.memory
    assert isinstance(ours, PagedMemory)
    assert isinstance(theirs, PagedMemory)

    if fault == "shared":
        ours.taken_BM[0, 1] = theirs.taken_BM[0, 2]
    elif fault == "lost":
        store.take(SPAN, 1)
    elif fault == "taken twice":
        ours.taken_BM[0, 1] = ours.taken_BM[0, 2]
    else:
        ours.release_above(16)

    with pytest.raises(LocalProtocolError):
        pool.check_integrity()


@pytest.mark.parametrize("head_dim", [16, 20, 64, 96, 256])
def test_rows_of_16_bits_begin_where_16_bytes_are_read_at_once(head_dim: int) -> None:
    store = PagedStore(2**20, SPAN, NUM_HEADS, head_dim, torch.bfloat16, CPU)
    pages_PCGSW = store.pages(SPAN.start, torch.bfloat16)

    assert pages_PCGSW.stride(-2) * pages_PCGSW.itemsize % 16 == 0
    assert pages_PCGSW.shape[-1] == store.pages(SPAN.start, torch.int8).shape[-1] > head_dim


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_attention_reads_have_no_gaps(dtype: torch.dtype) -> None:
    pool, _ = make_pool(20, dtype)
    cache = pool.open(1, 300, SPAN, None, KVFormat.FLOAT)
    fill(cache, 40)

    for _, keys_BGSD, values_BGSD in cache.memory.read(SPAN.start, 40):
        assert keys_BGSD.stride(-2) == values_BGSD.stride(-2) == HEAD_DIM
