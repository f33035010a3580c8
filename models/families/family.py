"""What a family is to the engine: a reader of its `config.json` and the names of its tensors."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum

from .spec import ModelSpec


class FusedOrder(Enum):
    """How the outputs of one stored linear for queries, keys and values are ordered."""

    STACKED = "stacked"
    """All queries, then all keys, then all values."""

    BY_GROUP = "by group"
    """For each key-value head: its queries, its key, its value."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """How one family's `config.json` is read and what its checkpoints call a block's tensors.

    `tensor_names` maps block-local names to names below `prefixes`, where `{block}` is the index
    of the block and `{expert}` that of an expert. Linears that are stored as one have their local
    names joined: "query_key_value", "gate_up". Where checkpoints differ, there are several
    prefixes or names. Conv1D layers store their weights transposed.
    """

    name: str
    read_spec: Callable[[Mapping[str, object]], ModelSpec]
    prefixes: tuple[str, ...]
    tensor_names: Mapping[str, str | tuple[str, ...]]
    fused_order: FusedOrder = FusedOrder.STACKED
    stores_transposed: bool = False

    def checkpoint_names(self, block: int, local_name: str, expert: int = 0) -> list[str]:
        """Return what checkpoints may call a block-local tensor, the usual name first."""
        names = self.tensor_names[local_name]
        return [
            (prefix + name).format(block=block, expert=expert)
            for prefix in self.prefixes
            for name in ([names] if isinstance(names, str) else names)
        ]
