"""Keys and values of any shape come back as they were written."""

import pytest
import torch
from torch import Tensor

from shoal.kernels.attention.int8_kv import dequantize_kv, quantize_kv
from shoal.models.shells.step_cache import CacheShape, StepCache


class Memory:
    """Keeps two numbers of one shape for each token, head and place, as caches of peers do."""

    def __init__(self, cache_shape: CacheShape, num_rows: int, num_tokens: int) -> None:
        self.states = torch.full(
            (2, num_rows, cache_shape.num_heads, num_tokens, cache_shape.head_dim), 99.0
        )

    def put(self, position: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        stop = position + keys.shape[2]
        self.states[0, :, :, position:stop] = keys
        self.states[1, :, :, position:stop] = values
        return self.states[0, :, :, :stop], self.states[1, :, :, :stop]


def shape(num_heads: int, head_dim: int) -> torch.Size:
    return torch.Size([1, num_heads, 1, head_dim])


@pytest.mark.parametrize(
    ("blocks", "cache_shape"),
    [
        ([(shape(2, 6), shape(2, 6))] * 2, CacheShape(2, 6)),
        ([(shape(1, 18), shape(1, 8))], CacheShape(1, 13)),
        ([(shape(3, 5), shape(3, 4))], CacheShape(1, 14)),
        ([(shape(4, 16), shape(4, 16)), (shape(2, 64), shape(2, 64))], CacheShape(8, 16)),
        ([(shape(4, 3), shape(6, 1)), (shape(8, 2), shape(2, 5))], CacheShape(1, 13)),
        # As in DeepSeek's models: in nine heads of 32 there is room for 576 numbers.
        ([(shape(1, 512), shape(1, 64))], CacheShape(9, 32)),
        ([(shape(1, 64), shape(1, 512))], CacheShape(9, 32)),
        ([(shape(8, 192), shape(8, 128))], CacheShape(20, 64)),
    ],
)
def test_what_is_kept_has_room_for_every_block(blocks: list, cache_shape: CacheShape) -> None:
    assert CacheShape.of(blocks) == cache_shape


@pytest.mark.parametrize(
    ("keys", "values", "cache_shape"),
    [
        ((2, 6), (2, 6), CacheShape(2, 6)),
        ((1, 18), (1, 8), CacheShape(1, 13)),
        ((3, 5), (3, 4), CacheShape(1, 14)),
        ((1, 64), (1, 16), CacheShape(3, 16)),
        ((4, 16), (4, 16), CacheShape(2, 64)),
        ((4, 3), (6, 1), CacheShape(1, 13)),
    ],
)
def test_steps_read_what_all_steps_wrote(
    keys: tuple, values: tuple, cache_shape: CacheShape
) -> None:
    draw = torch.Generator().manual_seed(1)
    all_keys, all_values = (torch.randn(3, n, 9, d, generator=draw) for n, d in (keys, values))
    memory = Memory(cache_shape, 3, 9)

    for start, stop in ((0, 5), (5, 6), (3, 9)):
        cache = StepCache(start, memory.put, cache_shape)
        found = cache.update(all_keys[:, :, start:stop], all_values[:, :, start:stop])

        assert torch.equal(found[0], all_keys[:, :, :stop])
        assert torch.equal(found[1], all_values[:, :, :stop])
        assert cache.get_mask_sizes(stop - start) == (stop, 0)


class IntegerMemory(Memory):
    """Keeps integers, as int8 caches of peers do."""

    def put(self, position: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        size = keys.shape[3]
        records = (quantize_kv(states) for states in (keys, values))
        floats = (dequantize_kv(record, size, torch.float32) for record in records)
        return super().put(position, *floats)


@pytest.mark.parametrize(("keys", "values"), [((1, 512), (1, 64)), ((4, 16), (2, 48))])
@pytest.mark.parametrize("times", [1.0, 100.0])
def test_integers_of_large_states_do_not_spoil_small_ones(
    keys: tuple, values: tuple, times: float
) -> None:
    draw = torch.Generator().manual_seed(1)
    small, large = (torch.randn(3, n, 9, d, generator=draw) for n, d in (keys, values))
    cache_shape = CacheShape.of([(shape(*keys), shape(*values))])

    cache = StepCache(0, IntegerMemory(cache_shape, 3, 9).put, cache_shape)
    found = cache.update(small, large * times)

    for ours, exact in zip(found, (small, large * times), strict=True):
        assert (ours - exact).norm() < 0.01 * exact.norm()
