"""Sums of gradients that do not depend on the order, or on the grouping, of what is added.

Floating-point addition rounds, so its result depends on who adds what first. Here each gradient is
rounded once, to a multiple of a power of two (the unit of the tensor), and multiples are added
exactly: they are kept as whole numbers in float64, which adds whole numbers below 2^53 exactly.
So an addend can be taken out again, too, and nothing of it is left.

The exponent of a tensor says how large its sums are expected to be, as powers of two:

    2^(exponent - 34)           2^exponent                 2^(exponent + 18)
    unit: what is rounded       largest of the last sum    no sum exceeds it
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

FIRST_EXPONENT = -12
"""Before anything is known: sums of a mean loss from 2^-46 up to 2^6."""

_BITS_BELOW = 34
_BITS = 53
LEAST_EXPONENT, MOST_EXPONENT = -80, 60
"""Between them 2^(34 - exponent) fits into float32; larger multiples are clamped."""


class ExactSum:
    """The sum of some gradients of one tensor, at most `room` of them.

    An addend of which an element could make the whole sum inexact is clamped there. That depends on
    the addend alone, so that all groupings still have the same sum; such gradients are 2^18 over
    the room (rounded up to a power of two) times as large as the last sum.

    Units are whole numbers, and never a negative zero: equal sums are equal bit for bit.
    """

    def __init__(self, shape: torch.Size, exponent: int, room: int) -> None:
        self.units = torch.zeros(shape, dtype=torch.float64)
        """The sum, as whole multiples of the unit."""
        self.num_addends = 0
        self.room = room
        self._limit = _choose_limit(room)
        self._set_exponent(exponent)

    def reset(self, exponent: int) -> None:
        """Begin a sum of zero addends in another unit, in the same memory."""
        self.units.zero_()
        self.num_addends = 0
        self._set_exponent(exponent)

    def add(self, gradient: Tensor) -> None:
        """Add a gradient of finite float32 numbers."""
        assert self.num_addends < self.room
        self.units.add_(self._round(gradient))
        self.num_addends += 1

    def subtract(self, gradient: Tensor) -> None:
        """Take a gradient out again that was added before."""
        assert self.num_addends > 0
        self.units.sub_(self._round(gradient))
        self.num_addends -= 1

    def merge(self, units: Tensor, num_addends: int) -> None:
        """Add the sum of other gradients, in the same unit.

        Raises ValueError where no such sum can have these units; then nothing is added.
        """
        self._check(units, self.num_addends + num_addends, num_addends)
        self.units.add_(units)
        self.num_addends += num_addends

    def load(self, units: Tensor, num_addends: int) -> None:
        """Replace the sum by another one in the same unit; raises ValueError like `merge`."""
        self._check(units, num_addends, num_addends)
        self.units.zero_().add_(units)  # not a copy: that would keep negative zeros
        self.num_addends = num_addends

    def read(self) -> Tensor:
        """Return the sum in float32, rounded once."""
        return self.convert(self.units)

    def convert(self, units: Tensor) -> Tensor:
        """Return a sum of these units in float32, rounded once."""
        return (units / self._scale).to(torch.float32)

    def _set_exponent(self, exponent: int) -> None:
        self.exponent = exponent
        self._scale = 2.0 ** (_BITS_BELOW - exponent)

    def _round(self, gradient: Tensor) -> Tensor:
        return gradient.mul(self._scale).round_().clamp_(-self._limit, self._limit)

    def _check(self, units: Tensor, num_together: int, num_addends: int) -> None:
        if not 0 <= num_addends <= num_together <= self.room:
            raise ValueError(f"a sum of at most {self.room} gradients cannot have {num_together}")
        if units.dtype != torch.float64 or units.shape != self.units.shape:
            raise ValueError(
                f"units must be float64 {list(self.units.shape)}, "
                f"not {units.dtype} {list(units.shape)}"
            )
        check_units(units, num_addends, self.room)


def check_units(units: Tensor, num_addends: int, room: int) -> None:
    """Raise ValueError if no sum of so many gradients in such a room has these units.

    `units` may be any piece of a sum, so that whoever sums pieces of many tensors checks them.
    """
    bound = num_addends * _choose_limit(room)
    if units.numel() and not _find_largest(units) <= bound:  # false for NaN, too
        raise ValueError(f"units of {num_addends} gradients must be at most {bound:.0f}")
    if not torch.equal(units.trunc(), units):
        raise ValueError("units must be whole numbers")


def _choose_limit(room: int) -> float:
    """Return the largest multiple of the unit of one addend: a power of two, exact in float32."""
    return 2.0 ** (_BITS - 1 - (room - 1).bit_length())


def _find_largest(tensor: Tensor) -> float:
    """Return the largest absolute value, in one pass over memory; NaN where there is one."""
    lowest, highest = torch.aminmax(tensor)
    return float(torch.maximum(-lowest, highest))


def choose_exponent(total: Tensor, before: int) -> int:
    """Return the exponent for the sums that follow one with this result.

    A sum of zeros leaves it as it was.
    """
    largest = _find_largest(total) if total.numel() else 0.0
    if largest == 0.0:
        return before
    return min(max(math.frexp(largest)[1], LEAST_EXPONENT), MOST_EXPONENT)
