"""The rows of a pass: texts that are computed from their beginning, and leave nothing behind.

Tensor suffixes: N rows times tokens of the pass.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ....kernels.linear.linear import GradientLinears, Linear, RowPrecision
from ....kernels.pauses import Pauses
from .rows import AdaptedRows, Rotation, RowRange

PRECISION = RowPrecision.ONE_DIGIT
"""Texts are prompts to int8 weights."""


@dataclass(frozen=True)
class PassRows:
    """Rows that all have `num_tokens` tokens, which attend to those before them in their row.

    `rotations` are those of the tokens' positions, in the order of the model's ropes. What each
    token computes for itself is computed for `tokens_at_once` of them, so that little of it is
    in memory.
    """

    num_rows: int
    num_tokens: int
    rotations: tuple[Rotation, ...]
    pauses: Pauses
    tokens_at_once: int
    adapters: tuple[AdaptedRows, ...] = ()
    """Of the block that computes them."""

    def cut(
        self, *, is_whole: bool = False, unread: Linear | None = None
    ) -> list[tuple[slice, list[RowRange]]]:
        """Return ranges of N, with what linears have to know about each; or one of all N.

        The output of a linear that is `unread` need not be computed.
        """
        linears = GradientLinears(self.pauses, is_keeping=not is_whole, unread=unread)
        num_all = self.num_rows * self.num_tokens
        step = num_all if is_whole else self.tokens_at_once
        pieces = [slice(start, min(start + step, num_all)) for start in range(0, num_all, step)]
        return [
            (
                piece,
                [RowRange(0, piece.stop - piece.start, PRECISION, linears, self._adapt(piece))],
            )
            for piece in pieces
        ]

    def _adapt(self, piece: slice) -> tuple[AdaptedRows, ...]:
        """Return the adapters of some of the rows, which are counted from the first of these."""
        found = []
        for adapted in self.adapters:
            start = max(adapted.rows.start, piece.start) - piece.start
            stop = min(adapted.rows.stop, piece.stop) - piece.start
            if start < stop:
                found.append(AdaptedRows(slice(start, stop), adapted.parts))
        return tuple(found)


def differentiate(
    function: Callable[..., torch.Tensor], inputs: Sequence[torch.Tensor], grads: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Return the gradients of the inputs, given those of what a function makes of them.

    Those of adapters are added up in their matrices.
    """
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    with torch.enable_grad():
        output = function(*leaves)
    torch.autograd.backward(output, grads)
    return tuple(leaf.grad for leaf in leaves if leaf.grad is not None)
