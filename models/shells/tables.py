"""Tables of transformers' modules that are in no checkpoint: rotations, positions, masks.

Fills them for modules that were built without memory, as transformers does after it has loaded a
checkpoint.
"""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

MAX_TABLE_BYTES = 2**28
"""Of all tables of one module: several times those of any model. Bounds what a damaged config.json
makes us allocate."""


class TableError(Exception):
    """The tables of a module cannot be computed; the message is the second half of a sentence."""


def has_tables(module: nn.Module) -> bool:
    """Return whether a module, or one in it, has buffers that no checkpoint holds."""
    return any(_list_tables(part) for part in module.modules())


def count_table_bytes(module: nn.Module) -> int:
    """Return the memory that the tables of a module and of those in it take, filled or not."""
    return sum(table.nbytes for part in module.modules() for table in _list_tables(part).values())


@torch.no_grad()
def fill_tables(model: PreTrainedModel, module: nn.Module) -> None:
    """Compute the tables of a part of a model whose weights have no memory yet.

    Raises TableError where transformers does not, or where they would be huge.
    """
    for part in module.modules():
        tables = _list_tables(part)
        if any(table.is_meta for table in tables.values()):
            _fill(model, part, tables)


def _list_tables(part: nn.Module) -> dict[str, Tensor]:
    names = part._non_persistent_buffers_set
    return {
        name: table for name, table in part._buffers.items() if name in names and table is not None
    }


def _fill(model: PreTrainedModel, part: nn.Module, tables: dict[str, Tensor]) -> None:
    if sum(table.nbytes for table in tables.values()) > MAX_TABLE_BYTES:
        raise TableError(f"it has buffers of more than {MAX_TABLE_BYTES >> 20} MiB")
    # Twice, over different numbers: tables that transformers leaves alone then differ.
    first, second = (_compute(model, part, tables, number) for number in (0, 1))
    if not all(torch.equal(first[name], second[name]) for name in tables):
        raise TableError("it has buffers that no checkpoint contains")


def _compute(
    model: PreTrainedModel, part: nn.Module, tables: dict[str, Tensor], number: int
) -> dict[str, Tensor]:
    """Return the tables as transformers computes them where every number was `number` before."""
    for name, table in tables.items():
        part._buffers[name] = torch.full(table.shape, number, dtype=table.dtype, device="cpu")
    model._init_weights(part)
    return _list_tables(part)
