"""A small pool of pages, in either kind of memory, and tokens that can be told apart in it."""

import torch

from shoal.peer.engine.cache.kv_cache import KVCachePool, SessionCache
from shoal.peer.engine.cache.kv_memory import PAGE_TOKENS, FloatLayout
from shoal.peer.engine.cache.lazy_memory import LazyStore
from shoal.peer.engine.cache.paged_memory import PagedStore
from shoal.protocol.spans import Span
from shoal.protocol.tensors import KVFormat

NUM_HEADS, HEAD_DIM, NUM_BLOCKS = 2, 8, 3
SPAN = Span(5, 5 + NUM_BLOCKS)


class PoolMaker:
    """Makes pools over one kind of memory, "lazy" or "paged"."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        layout = self._make_store(0).layouts[KVFormat.FLOAT]
        assert isinstance(layout, FloatLayout)
        self.row_page_bytes = PAGE_TOKENS * NUM_BLOCKS * layout.token_bytes
        """One page of one row through all blocks."""

    def __call__(self, num_pages: int) -> KVCachePool:
        """Return a pool with room for so many pages of one row."""
        budget_bytes = num_pages * self.row_page_bytes
        return KVCachePool(budget_bytes, self._make_store(budget_bytes))

    def _make_store(self, budget_bytes: int) -> LazyStore | PagedStore:
        if self.kind == "lazy":
            return LazyStore(NUM_BLOCKS, NUM_HEADS, HEAD_DIM, torch.float32)
        cpu = torch.device("cpu")
        return PagedStore(budget_bytes, SPAN, NUM_HEADS, HEAD_DIM, torch.float32, cpu)


def write_tokens(cache: SessionCache, values_BT: torch.Tensor, position: int) -> None:
    """Write a value per row and token into every block; keys are the negated values."""
    for block in range(cache.span.start, cache.span.stop):
        states_BT = (values_BT + block).float()
        keys_BGTD, values_BGTD = (
            each_BT[:, None, :, None].expand(-1, NUM_HEADS, -1, HEAD_DIM)
            for each_BT in (-states_BT, states_BT)
        )
        cache.memory.write(block, position, keys_BGTD, values_BGTD)


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
        expected = (expected_BT + block)[:, None, :, None].expand(-1, NUM_HEADS, -1, HEAD_DIM)
        ((_, keys, values),) = cache.memory.read(block, cache.length)
        assert torch.equal(values, expected)
        assert torch.equal(keys, -expected)
