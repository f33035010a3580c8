"""Keys and values of one step in one block, between transformers' attention and our memory.

Tensor suffixes: B rows, G key-value heads, T tokens of a step, S tokens, D head size,
N numbers of a token.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import gcd
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache
from transformers.modeling_outputs import BaseModelOutputWithPast

from ...kernels.attention.int8_kv import count_record_bytes

CACHE_NAME = next(
    name for name in ("cache", "past_key_values") if name in BaseModelOutputWithPast.__annotations__
)
"""What this release of transformers calls the cache, among arguments and outputs of all models."""

Put = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Writes keys and values [B, G, T, D] at a position; returns all up to them."""

Shapes = tuple[torch.Size, torch.Size]
"""Of the keys and the values [B, G, T, D] of a step in one block."""


_SMALL_HEAD = 16
"""In smaller heads, the scales of int8 states would take too much memory beside them."""

_CUT_HEAD = 32
"""The size of heads where the model's own have no such size in common."""


@dataclass(frozen=True)
class CacheShape:
    """The form in which the KV cache keeps a token in each block: keys and values of these heads.

    Keys and values of that shape are kept as they are. All others are joined to one row of numbers,
    which is cut into such heads, half of them in place of keys: so two shapes cost little more than
    their numbers. Blocks with fewer numbers than others are padded with zeros. If possible, no head
    has parts of both: the int8 numbers of a head share a scale, and keys may be far larger.
    """

    num_heads: int
    head_dim: int

    @classmethod
    def of(cls, shapes: Iterable[Shapes]) -> "CacheShape":
        """Return the smallest form that holds the keys and values of all these blocks."""
        every = set(shapes)
        if len(every) == 1:
            keys, values = next(iter(every))
            if keys == values:
                return cls(keys[1], keys[3])
        most = max(sum(shape[1] * shape[3] for shape in pair) for pair in every)
        common = gcd(*(shape[3] for pair in every for shape in pair))
        sizes = [common >> power for power in range(3) if common % (_SMALL_HEAD << power) == 0]
        head_dims = sizes or [min(_CUT_HEAD, -(-most // 2))]
        found = [cls(-(-most // (2 * head_dim)), head_dim) for head_dim in head_dims]
        return min(found, key=lambda one: one.num_heads * count_record_bytes(one.head_dim))

    def put(
        self, put: Put, position: int, keys_BGTD: Tensor, values_BGTD: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Write keys and values of a step by way of `put`; return all up to them."""
        shapes = keys_BGTD.shape, values_BGTD.shape
        if all((shape[1], shape[3]) == (self.num_heads, self.head_dim) for shape in shapes):
            return put(position, keys_BGTD, values_BGTD)
        joined_BTN = torch.cat([_join(keys_BGTD), _join(values_BGTD)], dim=-1)
        spare = 2 * self.num_heads * self.head_dim - joined_BTN.shape[-1]
        heads_BGTD = _cut(F.pad(joined_BTN, (0, spare)), 2 * self.num_heads)
        halves = put(position, *heads_BGTD.split(self.num_heads, dim=1))
        joined_BSN = _join(torch.cat(halves, dim=1))
        sizes = [shape[1] * shape[3] for shape in shapes]
        keys_BSN, values_BSN, _ = joined_BSN.split([*sizes, spare], dim=-1)
        return _cut(keys_BSN, shapes[0][1]), _cut(values_BSN, shapes[1][1])


def _join(states_BGTD: Tensor) -> Tensor:
    """Return one row of numbers for each token."""
    return states_BGTD.transpose(1, 2).flatten(2)


def _cut(states_BTN: Tensor, num_heads: int) -> Tensor:
    """Return the heads that such rows are made of."""
    return states_BTN.unflatten(2, (num_heads, -1)).transpose(1, 2)


class OtherStateError(LookupError):
    """A block keeps more than keys and values: a recurrent state, for example."""


class _NoLayers(list[Any]):
    """Takes the place of the list in which caches of transformers keep other states."""

    def __getitem__(self, index: Any) -> Any:
        raise OtherStateError


class StepCache(DynamicCache):
    """Keys and values of one step in one block, for transformers' attention.

    `put` writes at `position` of some memory and returns everything up to there; the memory has
    the form `cache_shape`, or takes any shape if that is None. Without `put`, this only records
    shapes.
    """

    def __init__(
        self, position: int, put: Put | None = None, cache_shape: CacheShape | None = None
    ) -> None:
        super().__init__()
        self.layers = _NoLayers()
        self.shapes: list[Shapes] = []
        self._position = position
        self._put = put
        self._cache_shape = cache_shape

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write new keys and values [B, G, T, D] and return all up to them."""
        self.shapes.append((key_states.shape, value_states.shape))
        if self._put is None:
            return key_states, value_states
        if self._cache_shape is None:
            return self._put(self._position, key_states, value_states)
        return self._cache_shape.put(self._put, self._position, key_states, value_states)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return how many tokens lie before the step."""
        return self._position

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Return the number of keys after the step, and the position of the first."""
        return self._position + query_length, 0
