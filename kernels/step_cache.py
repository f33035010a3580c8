"""Keys and values of one step in one block, between transformers' attention and our memory.

Tensor suffixes: B rows, G key-value heads, T tokens of a step, S tokens, D head size.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import gcd
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache

Put = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Writes keys and values [B, G, T, D] at a position; returns all up to them."""

Shapes = tuple[torch.Size, torch.Size]
"""Of the keys and the values [B, G, T, D] of a step in one block."""


@dataclass(frozen=True)
class KeptShape:
    """What memory keeps of a token in each block: two times `head_dim` numbers in each head.

    Keys and values of that shape are kept as they are. All others are joined to one row of numbers
    in each head, which is cut in the middle: so two shapes cost no more than what they hold. A
    block that has less than others is filled up with zeros.
    """

    num_heads: int
    head_dim: int

    @classmethod
    def of(cls, shapes: Iterable[Shapes]) -> "KeptShape":
        """Return what holds the keys and values of all these blocks."""
        every = set(shapes)
        if len(every) == 1:
            keys, values = next(iter(every))
            if keys == values:
                return cls(keys[1], keys[3])
        num_heads = gcd(*(shape[1] for pair in every for shape in pair))
        most = max(sum(shape[1] * shape[3] for shape in pair) for pair in every)
        return cls(num_heads, -(-most // (2 * num_heads)))

    def put(
        self, put: Put, position: int, keys_BGTD: Tensor, values_BGTD: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Write keys and values of a step by way of `put`; return all up to them."""
        shapes = keys_BGTD.shape, values_BGTD.shape
        if all((shape[1], shape[3]) == (self.num_heads, self.head_dim) for shape in shapes):
            return put(position, keys_BGTD, values_BGTD)
        joined_BGTN = torch.cat([self._group(keys_BGTD), self._group(values_BGTD)], dim=-1)
        spare = 2 * self.head_dim - joined_BGTN.shape[-1]
        halves = F.pad(joined_BGTN, (0, spare)).split(self.head_dim, dim=-1)
        joined_BGSN = torch.cat(put(position, *halves), dim=-1)
        sizes = [shape[1] * shape[3] // self.num_heads for shape in shapes]
        keys_BGSN, values_BGSN, _ = joined_BGSN.split([*sizes, spare], dim=-1)
        return _ungroup(keys_BGSN, shapes[0]), _ungroup(values_BGSN, shapes[1])

    def _group(self, states_BGTD: Tensor) -> Tensor:
        """Return states of fewer heads, which are larger."""
        states_BTN = states_BGTD.transpose(1, 2).flatten(2)
        return states_BTN.unflatten(2, (self.num_heads, -1)).transpose(1, 2)


def _ungroup(states_BGSN: Tensor, shape: torch.Size) -> Tensor:
    """Return states of as many heads as in `shape`."""
    states_BSN = states_BGSN.transpose(1, 2).flatten(2)
    return states_BSN.unflatten(2, (shape[1], shape[3])).transpose(1, 2)


class OtherStateError(LookupError):
    """A block asks for more than keys and values: what a recurrence keeps, for one."""


class _NoLayers(list[Any]):
    """What caches of transformers keep other states in."""

    def __getitem__(self, index: Any) -> Any:
        raise OtherStateError


class StepCache(DynamicCache):
    """Keys and values of one step in one block, for transformers' attention.

    `put` writes at `position` of some memory, which keeps what `kept` says or else anything, and
    returns everything up to there. Without it, this only remembers what shape would be written.
    """

    def __init__(
        self, position: int, put: Put | None = None, kept: KeptShape | None = None
    ) -> None:
        super().__init__()
        self.layers = _NoLayers()
        self.shapes: list[Shapes] = []
        self._position = position
        self._put = put
        self._kept = kept

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write new keys and values [B, G, T, D] and return all up to them."""
        self.shapes.append((key_states.shape, value_states.shape))
        if self._put is None:
            return key_states, value_states
        if self._kept is None:
            return self._put(self._position, key_states, value_states)
        return self._kept.put(self._put, self._position, key_states, value_states)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return how many tokens lie before the step."""
        return self._position

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Return the number of keys after the step, and the position of the first."""
        return self._position + query_length, 0
