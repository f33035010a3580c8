"""Sums of gradients that do not depend on the order, or on the grouping, of what is added.

Floating-point addition rounds, so its result depends on who adds what first. Here each gradient is
rounded once, to a multiple of a power of two (the unit of the tensor), and multiples are added
exactly: they are kept as whole numbers in float64, which adds whole numbers below 2^53 exactly.

The exponent of a tensor says how large its sums are expected to be, as powers of two:

    2^(exponent - 34)           2^exponent                 2^(exponent + 19)
    unit: what is rounded       largest of the last sum    beyond it float64 would round
"""

from __future__ import annotations

import torch
from torch import Tensor

FIRST_EXPONENT = -12
"""Before anything is known: sums of a mean loss from 2^-46 up to 2^7."""

_BITS_BELOW = 34
_BITS = 53
_LEAST_EXPONENT, _MOST_EXPONENT = -80, 60
"""Between them 2^(34 - exponent) fits into float32; larger multiples are clamped."""


class ExactSum:
    """The sum of some gradients of one tensor, in a number of addends that is known before.

    An addend of which an element could make the whole sum inexact is clamped there. That depends on
    the addend alone, so that all groupings still have the same sum; such gradients are 2^19 over
    the number of addends times as large as the last sum.
    """

    def __init__(self, shape: torch.Size, exponent: int, num_addends: int) -> None:
        self.units = torch.zeros(shape, dtype=torch.float64)
        """The sum, as whole multiples of the unit."""
        self.exponent = exponent
        self._scale = 2.0 ** (_BITS_BELOW - exponent)
        self._limit = float(2 ** (_BITS - 1) // num_addends)

    def add(self, gradient: Tensor) -> None:
        """Add a gradient of finite float32 numbers."""
        units = gradient.mul(self._scale).round_().clamp_(-self._limit, self._limit)
        self.units.add_(units)

    def merge(self, units: Tensor) -> None:
        """Add the sum of other gradients, in the same unit."""
        self.units.add_(units)

    def read(self) -> Tensor:
        """Return the sum in float32, rounded once."""
        return (self.units / self._scale).to(torch.float32)


def choose_exponent(total: Tensor, before: int) -> int:
    """Return the exponent for the sums that follow one with this result.

    A sum of zeros leaves it as it was.
    """
    largest = float(total.abs().max()) if total.numel() else 0.0
    if largest == 0.0:
        return before
    exponent = torch.frexp(torch.tensor(largest, dtype=torch.float64)).exponent
    return min(max(int(exponent), _LEAST_EXPONENT), _MOST_EXPONENT)
