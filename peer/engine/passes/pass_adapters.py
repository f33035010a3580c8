"""The adapters of a pass: whose rows they change, and where their gradients gather.

Tensor suffixes: N rows times tokens of the pass.
"""

from collections.abc import Mapping, Sequence
from itertools import groupby

import torch
from torch import Tensor

from ....kernels.linear.linear import Linear
from ..adapters.adapters import Adapter, AdapterPart, Place
from ..blocks.rows import AdaptedRows

Parts = Mapping[Place, Sequence[AdapterPart]]


class PassAdapters:
    """Which adapter each row of a pass has; None for a row without.

    With `has_gradients`, matrices are copied, and autograd adds up their gradients in the copies.
    """

    def __init__(
        self,
        adapters: Sequence[Adapter | None],
        num_tokens: int,
        place: torch.device,
        *,
        has_gradients: bool,
    ) -> None:
        self._parts: dict[Adapter, Parts] = {
            adapter: {
                where: tuple(part.open(place, has_gradients) for part in parts)
                for where, parts in adapter.parts.items()
            }
            for adapter in dict.fromkeys(adapters)
            if adapter is not None
        }
        self._ranges: list[tuple[slice, Adapter]] = []
        for adapter, group in groupby(enumerate(adapters), key=lambda item: item[1]):
            rows = [row for row, _ in group]
            if adapter is not None:
                tokens = slice(rows[0] * num_tokens, (rows[-1] + 1) * num_tokens)
                self._ranges.append((tokens, adapter))

    def bind(self, block: int, linears: Mapping[str, Linear]) -> tuple[AdaptedRows, ...]:
        """Return what changes the linears of a block, which are known by their places."""
        return tuple(
            AdaptedRows(
                rows,
                {
                    linear: self._parts[adapter].get((block, name), ())
                    for name, linear in linears.items()
                },
            )
            for rows, adapter in self._ranges
        )

    def collect(self) -> dict[Adapter, dict[str, Tensor]]:
        """Return the gradients of each adapter's matrices, in float32, by PEFT's names."""
        return {
            adapter: {
                name: torch.zeros_like(matrix) if matrix.grad is None else matrix.grad
                for parts in places.values()
                for part in parts
                for name, matrix in part.named_matrices()
            }
            for adapter, places in self._parts.items()
        }
