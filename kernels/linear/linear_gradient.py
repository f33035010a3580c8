"""Linears under autograd: gradients for what goes in, none for the frozen weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..native.pauses import Pauses
from .linear import InputGradient, Linear, RowPrecision


class GradientLinears:
    """Computes linears in pieces, and lets autograd differentiate them.

    With `is_keeping`, what a weight's gradient needs is made once and kept as long as this is: for
    linears that see the rows of a batch in several calls. An `unread` linear is only there for its
    gradient, and returns zeros.
    """

    def __init__(self, pauses: Pauses, *, is_keeping: bool, unread: Linear | None = None) -> None:
        self.pauses = pauses
        self.unread = unread
        self._is_keeping = is_keeping
        self._kept: dict[Linear, InputGradient] = {}

    def __call__(self, linear: Linear, hidden_NI: Tensor, precision: RowPrecision) -> Tensor:
        """Return `hidden_NO`; its gradient is that of the weights as they are.

        Rounding activations to int8 digits counts as doing nothing (a straight-through estimate).
        """
        return _LinearFunction.apply(hidden_NI, linear, precision, self)  # type: ignore[no-any-return]

    def open_gradient(self, linear: Linear) -> InputGradient:
        """Return what turns gradients of a linear's output into those of its input."""
        if linear in self._kept:
            return self._kept[linear]
        gradient = linear.open_gradient(self.pauses)
        if self._is_keeping:
            self._kept[linear] = gradient
        return gradient


class _LinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_NI: Tensor, linear: Linear, precision: RowPrecision, run: GradientLinears
    ) -> Tensor:
        ctx.linear, ctx.run = linear, run
        if linear is run.unread:
            return hidden_NI.new_zeros(1, 1).expand(len(hidden_NI), linear.out_features)
        return linear.multiply_in_pieces(hidden_NI, precision, run.pauses)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gradient = ctx.run.open_gradient(ctx.linear)
        return gradient(grads[0], ctx.run.pauses), None, None, None
