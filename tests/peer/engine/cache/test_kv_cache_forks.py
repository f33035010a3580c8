"""Caches that begin with the prefix of another one, and engines that go on from there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kv_cache_scene import (
    HEAD_DIM,
    NUM_BLOCKS,
    NUM_HEADS,
    SPAN,
    PoolMaker,
    assert_holds,
    copy_prefix,
    take_step,
)

from shoal.peer.engine.cache import kv_cache
from shoal.peer.engine.cache.kv_cache import IDLE_SECONDS
from shoal.peer.engine.cache.kv_memory import PAGE_TOKENS
from shoal.protocol.errors import CacheFullError, ErrorCode, RefusedError
from shoal.protocol.fair_share import Tenant
from shoal.protocol.spans import Span
from shoal.protocol.tensors import KVFormat


def count(num_rows: int, num_tokens: int, start: float = 0.0) -> torch.Tensor:
    return torch.arange(num_rows * num_tokens).view(num_rows, num_tokens) + start


def test_fork_and_parent_go_on_independently(make_pool: PoolMaker) -> None:
    pool = make_pool(20)
    parent, fork = pool.open(2, 300, SPAN), pool.open(2, 200, SPAN)
    take_step(parent, 0, count(2, 70))

    copy_prefix(parent, fork, 66)
    take_step(fork, 66, count(2, 3, 1000))
    take_step(parent, 70, count(2, 4, 2000))

    assert_holds(fork, torch.cat([count(2, 70)[:, :66], count(2, 3, 1000)], dim=1))
    assert_holds(parent, torch.cat([count(2, 70), count(2, 4, 2000)], dim=1))
    parent.close()
    assert pool.used_bytes == fork.committed_bytes == 2 * 2 * make_pool.row_page_bytes
    assert_holds(fork, torch.cat([count(2, 70)[:, :66], count(2, 3, 1000)], dim=1))
    pool.check_integrity()


def test_fork_of_beams_knows_what_they_have_in_common(make_pool: PoolMaker) -> None:
    pool = make_pool(20)
    parent, fork = pool.open(2, 100, SPAN), pool.open(2, 100, SPAN)
    take_step(parent, 0, count(2, 10))
    take_step(parent, 10, count(2, 5, 100), row_map=(1, 1))

    copy_prefix(parent, fork, 12)
    take_step(parent, 15, count(2, 1, 200), row_map=(0, 0))
    take_step(fork, 12, count(2, 1, 300), row_map=(1, 0))

    prefix = torch.cat([count(2, 10)[[1, 1]], count(2, 5, 100)[:, :2]], dim=1)
    assert_holds(fork, torch.cat([prefix[[1, 0]], count(2, 1, 300)], dim=1))
    assert fork._common_prefixes is not None
    assert fork._common_prefixes.find_first_difference([1, 0]) == 10


@pytest.mark.parametrize(
    ("num_rows", "span", "num_tokens", "kv_format"),
    [
        (2, SPAN, 11, KVFormat.FLOAT),
        (1, SPAN, 5, KVFormat.FLOAT),
        (3, SPAN, 5, KVFormat.FLOAT),
        (2, Span(SPAN.start, SPAN.stop - 1), 5, KVFormat.FLOAT),
        (2, Span(SPAN.start - 1, SPAN.stop - 1), 5, KVFormat.FLOAT),
        (2, SPAN, 5, KVFormat.INT8),
    ],
    ids=[
        "longer than the parent",
        "fewer rows",
        "more rows",
        "fewer blocks",
        "other blocks",
        "another format",
    ],
)
def test_prefix_that_is_not_there_is_refused(
    make_pool: PoolMaker, num_rows: int, span: Span, num_tokens: int, kv_format: KVFormat
) -> None:
    pool = make_pool(20)
    parent = pool.open(2, 100, SPAN)
    fork = pool.open(num_rows, 100, span, kv_format=kv_format)
    take_step(parent, 0, count(2, 10))

    with pytest.raises(RefusedError) as refusal:
        copy_prefix(parent, fork, num_tokens)

    assert refusal.value.code is ErrorCode.BAD_VALUES
    assert (fork.length, fork.committed_bytes) == (0, 0)
    assert_holds(parent, count(2, 10))
    pool.check_integrity()


def test_parent_whose_memory_was_taken_is_gone(make_pool: PoolMaker) -> None:
    pool = make_pool(20)
    parent, fork = pool.open(1, 100, SPAN), pool.open(1, 100, SPAN)
    take_step(parent, 0, count(1, 10))
    parent.close()

    with pytest.raises(RefusedError) as refusal:
        copy_prefix(parent, fork, 5)

    assert refusal.value.code is ErrorCode.UNKNOWN_SESSION


def test_copied_tokens_count_in_the_budget_of_their_holder(make_pool: PoolMaker) -> None:
    pool, tenant = make_pool(8), Tenant("home")
    now = 0.0
    pool.now = lambda: now
    parent = pool.open(1, 8 * PAGE_TOKENS, SPAN, tenant)
    take_step(parent, 0, count(1, 4 * PAGE_TOKENS))
    now = 2 * IDLE_SECONDS
    fork = pool.open(1, 8 * PAGE_TOKENS, SPAN, tenant)

    with pytest.raises(CacheFullError):
        copy_prefix(parent, fork, 4 * PAGE_TOKENS)
    assert_holds(parent, count(1, 4 * PAGE_TOKENS))  # it made no room, although it was idle
    copy_prefix(parent, fork, PAGE_TOKENS)

    assert pool.used_bytes == 5 * make_pool.row_page_bytes
    pool.check_integrity()


# ---- piece by piece


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a piece be two tokens of a head."""
    monkeypatch.setattr(kv_cache, "PIECE_BYTES", 2 * HEAD_DIM * 4)


@pytest.mark.parametrize("tokens_in_piece", [2, 7, 16, 1000])
def test_pieces_are_small_and_together_the_prefix(
    monkeypatch: pytest.MonkeyPatch, tokens_in_piece: int
) -> None:
    monkeypatch.setattr(kv_cache, "PIECE_BYTES", tokens_in_piece * HEAD_DIM * 4)
    pool = PoolMaker("lazy")(20)
    parent, fork = pool.open(2, 300, SPAN), pool.open(2, 200, SPAN)
    take_step(parent, 0, count(2, 9))

    num_pieces = copy_prefix(parent, fork, 7)

    num_heads = 2 * NUM_BLOCKS * 2 * NUM_HEADS
    assert num_pieces >= num_heads * 7 / tokens_in_piece
    assert_holds(fork, count(2, 9)[:, :7])


def test_parent_may_go_on_behind_the_prefix_while_it_is_copied(
    make_pool: PoolMaker, small_pieces: None
) -> None:
    pool = make_pool(20)
    parent, fork = pool.open(2, 300, SPAN), pool.open(2, 200, SPAN)
    take_step(parent, 0, count(2, 10))
    take_step(parent, 10, count(2, 1), row_map=(1, 1))
    prefix = count(2, 10)[[1, 1], :7]

    copy = fork.begin_with(parent, 7)
    copy.advance()
    take_step(parent, 7, count(2, 4, 1000))
    take_step(parent, 11, count(2, 1, 2000), row_map=(1, 0))
    assert fork.length == 0
    while not copy.advance():
        pass
    take_step(parent, 3, count(2, 1, 3000))

    assert_holds(fork, prefix)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda parent: take_step(parent, 6, count(2, 4, 1000)), ErrorCode.BAD_VALUES),
        (lambda parent: parent.fall_back(6), ErrorCode.BAD_VALUES),
        (lambda parent: take_step(parent, 10, count(2, 1), (1, 0)), ErrorCode.BAD_VALUES),
        (lambda parent: parent.close(), ErrorCode.UNKNOWN_SESSION),
    ],
    ids=["rolled back", "fallen back", "reordered", "closed"],
)
def test_parent_that_changes_below_the_prefix_ends_the_copy(
    make_pool: PoolMaker, small_pieces: None, change: Any, code: ErrorCode
) -> None:
    pool = make_pool(20)
    parent, fork, later = (pool.open(2, 100, SPAN) for _ in range(3))
    take_step(parent, 0, count(2, 10))

    copy = fork.begin_with(parent, 7)
    copy.advance()
    change(parent)

    with pytest.raises(RefusedError) as refusal:
        copy.advance()
    assert refusal.value.code is code
    assert fork.length == 0
    fork.close()
    if parent.is_open:
        length = min(parent.length, 6)
        copy_prefix(parent, later, length)
        assert later.length == length


def test_fork_that_is_closed_half_way_leaves_nothing(
    make_pool: PoolMaker, small_pieces: None
) -> None:
    pool = make_pool(20)
    parent, fork = pool.open(2, 100, SPAN), pool.open(2, 100, SPAN)
    take_step(parent, 0, count(2, 10))

    copy = fork.begin_with(parent, 7)
    copy.advance()
    fork.close()

    assert pool.used_bytes == parent.committed_bytes
    assert not parent._copies_of_us
    with pytest.raises(RefusedError, match="the fork was closed"):
        copy.advance()
