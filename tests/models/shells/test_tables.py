"""Tables that no checkpoint holds are computed as transformers computes them, or not at all."""

from typing import Any

import pytest
import torch
from torch import nn

from shoal.models.shells.tables import (
    MAX_TABLE_BYTES,
    TableError,
    count_table_bytes,
    fill_tables,
    has_tables,
)


class Part(nn.Module):
    """A module with a weight, a stored buffer, and two tables."""

    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.register_buffer("stored", torch.ones(size))
        self.register_buffer("table", torch.ones(size), persistent=False)
        self.register_buffer("mask", torch.ones(size, dtype=torch.bool), persistent=False)


class Model:
    """Fills tables of parts as models of transformers do, and perhaps not all of them."""

    def __init__(self, *names: str) -> None:
        self.names = names

    def _init_weights(self, part: Any) -> None:
        if "table" in self.names:
            part.table.copy_(torch.arange(len(part.table)))
        if "mask" in self.names:
            part.mask.zero_()


def build(size: int = 4) -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(2, 2), Part(size))


def fill(module: nn.Module, *names: str) -> None:
    fill_tables(Model(*names), module)  # pyright: ignore[reportArgumentType]


def test_tables_are_filled_and_nothing_else_gets_memory() -> None:
    module = build()

    fill(module, "table", "mask")

    part: Any = module[1]  # pyright: ignore[reportIndexIssue]
    assert part.table.tolist() == [0, 1, 2, 3]
    assert part.mask.tolist() == [False] * 4
    assert part.stored.is_meta
    assert all(weight.is_meta for weight in module.parameters())
    assert has_tables(module)
    assert not has_tables(module[0])  # pyright: ignore[reportIndexIssue]


@pytest.mark.parametrize("names", [(), ("table",), ("mask",)])
def test_a_table_that_transformers_leaves_alone_is_refused(names: tuple[str, ...]) -> None:
    with pytest.raises(TableError, match="buffers that no checkpoint contains"):
        fill(build(), *names)


def test_huge_tables_are_refused_before_they_are_made() -> None:
    with pytest.raises(TableError, match="buffers of more than 256 MiB"):
        fill(build(MAX_TABLE_BYTES // 4), "table", "mask")


def test_tables_take_what_they_will_before_they_are_filled() -> None:
    module = build()
    assert count_table_bytes(module) == 4 * 4 + 4

    fill(module, "table", "mask")

    assert count_table_bytes(module) == 4 * 4 + 4
