"""A small pool of pages, and tokens that can be told apart in it."""

import torch

from shoal.peer.engine.kv_cache import PAGE_TOKENS, SessionCache
from shoal.peer.engine.kv_pool import KVCachePool
from shoal.protocol.spans import Span

NUM_HEADS, HEAD_DIM, NUM_BLOCKS = 2, 8, 3
SPAN = Span(5, 5 + NUM_BLOCKS)
ROW_PAGE_BYTES = PAGE_TOKENS * NUM_BLOCKS * 2 * NUM_HEADS * HEAD_DIM * 4
"""One page of one row through all blocks."""


def make_pool(num_pages: int) -> KVCachePool:
    return KVCachePool(num_pages * ROW_PAGE_BYTES, NUM_BLOCKS, NUM_HEADS, HEAD_DIM, torch.float32)


def write_tokens(cache: SessionCache, values_BT: torch.Tensor, position: int) -> None:
    """Write a value per row and token into every block; keys are the negated values."""
    stop = position + values_BT.shape[1]
    for block in range(cache.span.start, cache.span.stop):
        keys, values = cache.keys_values(block)
        keys[:, :, position:stop] = -(values_BT + block)[:, None, :, None]
        values[:, :, position:stop] = (values_BT + block)[:, None, :, None]


def take_step(cache: SessionCache, position: int, values_BT: torch.Tensor, row_map=None) -> None:
    cache.prepare(position, values_BT.shape[1], row_map)
    write_tokens(cache, values_BT, position)
    cache.commit(values_BT.shape[1])


def copy_prefix(parent: SessionCache, fork: SessionCache, num_tokens: int) -> int:
    """Let a cache begin with the prefix of another one; return how many pieces that took."""
    copy = fork.begin_with(parent, num_tokens)
    num_pieces = 1
    while not copy.advance():
        num_pieces += 1
    return num_pieces


def assert_holds(cache: SessionCache, expected_BT: torch.Tensor) -> None:
    assert cache.length == expected_BT.shape[1]
    for block in range(cache.span.start, cache.span.stop):
        keys, values = cache.keys_values(block)
        expected = (expected_BT + block)[:, None, :, None].expand(-1, NUM_HEADS, -1, HEAD_DIM)
        assert torch.equal(values[:, :, : cache.length], expected)
        assert torch.equal(keys[:, :, : cache.length], -expected)
