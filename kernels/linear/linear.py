"""The linear layers of a block in one of four weight formats, and their gradients.

Inputs get gradients from autograd; the frozen weights get none.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from enum import Enum
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..pauses import BYTE_COST, NO_PAUSES, Pauses
from .nf4 import Nf4Weight
from .quantize import (
    MAX_COLUMNS,
    OUTPUT_MULTIPLE,
    AddingProduct,
    Int8Kernel,
    Int8Weight,
    Rows,
)

MAX_ROUNDING_ERROR = 0.04
"""How much of its length a row may lose by rounding to one digit. Rows of normally distributed
numbers lose one percent, outputs of a gated activation two or three."""

_ROWS_AT_ONCE, _OUTPUTS_AT_ONCE = 32, 128
"""Fewer rows at a time take longer each, and so do fewer outputs of float weights."""


class RowPrecision(Enum):
    """How many int8 digits each number of a row keeps when it meets int8 weights.

    Choose it by the kind of row, never by the number of rows: then neither other sessions in the
    same batch nor the way a prompt was cut change a session's results.
    """

    TWO_DIGITS = 2
    """For generated tokens: as good as float activations, and nearly free for a few rows, where
    reading the weights takes longer."""

    ONE_DIGIT = 1
    """For prompts: half the work where multiplying takes longer; differs by about one percent. A
    row that would lose more than `MAX_ROUNDING_ERROR`, because few of its numbers are far larger
    than the others, keeps two digits.

    Microseconds of two digits / one digit at 1, 4, 8, 16 and 128 rows of 1024 -> 2816, weights out
    of cache: 136 / 78, 172 / 117, 290 / 147, 480 / 264, 3481 / 1794. One thread of an EPYC with
    AVX512-VNNI, in one run of `engine_benchmarks/kernels.py`."""


InputGradient = Callable[[Tensor, Pauses], Tensor]
"""Takes gradients `grads_NO` to `grads_NI` of their dtype, for the weights as they are stored."""


def get_values(rows: Rows) -> Tensor:
    """Return the rows as a matrix of floats."""
    return rows if isinstance(rows, Tensor) else rows.values_NI


class Linear(ABC):
    """`hidden @ weight.T + bias` with frozen weights; made by `make_linear` in select.py."""

    in_features: int
    out_features: int
    num_bytes: int
    """Memory held: weights, scales and bias."""

    @abstractmethod
    def __call__(self, hidden_NI: Tensor, precision: RowPrecision) -> Tensor:
        """Return `hidden_NO` in the dtype of `hidden_NI`, a matrix with one row per token.

        With int8 weights, each row's result depends on that row alone. Float weights promise it up
        to rounding only: there the library that multiplies takes other sums for other numbers of
        rows.
        """

    def multiply_and_add(
        self, rows: Rows, precision: RowPrecision, added_NO: Tensor | None
    ) -> Tensor:
        """Return what the call does with the values of rows, added to `added_NO` if that is given.

        The same bits, in fewer steps where the kernel of the linear can do it.
        """
        hidden_NO = self(get_values(rows), precision)
        return hidden_NO if added_NO is None else added_NO + hidden_NO

    @abstractmethod
    def multiply_in_pieces(
        self, hidden_NI: Tensor, precision: RowPrecision, pauses: Pauses
    ) -> Tensor:
        """Return the same as the call does, up to the rounding of float weights."""

    @abstractmethod
    def open_gradient(self, pauses: Pauses = NO_PAUSES) -> InputGradient:
        """Return the function that turns gradients of the output into those of the input.

        It may hold memory of its own, as much as the weights at most; to be dropped after use.
        """


def _count_bytes(*tensors: Tensor | None) -> int:
    return sum(t.nbytes for t in tensors if t is not None)


class FloatLinear(Linear):
    """Weights in a float format; the precision of rows makes no difference."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None, dtype: torch.dtype) -> None:
        self.out_features, self.in_features = weight_OI.shape
        self.num_bytes = _count_bytes(weight_OI, bias_O)
        self._weight_OI = weight_OI
        self._bias_O = bias_O
        self._needs_conversion = weight_OI.dtype != dtype

    def __call__(self, hidden_NI: Tensor, precision: RowPrecision) -> Tensor:
        if not self._needs_conversion:
            return F.linear(hidden_NI, self._weight_OI, self._bias_O)
        hidden_NO = F.linear(hidden_NI.to(self._weight_OI.dtype), self._weight_OI)
        hidden_NO = hidden_NO.to(hidden_NI.dtype)
        return hidden_NO if self._bias_O is None else hidden_NO + self._bias_O

    def multiply_in_pieces(
        self, hidden_NI: Tensor, precision: RowPrecision, pauses: Pauses
    ) -> Tensor:
        if not self._needs_conversion:
            return _multiply(hidden_NI, self._weight_OI.t(), self._bias_O, pauses)
        hidden_NO = _multiply(
            hidden_NI.to(self._weight_OI.dtype), self._weight_OI.t(), None, pauses
        )
        hidden_NO = hidden_NO.to(hidden_NI.dtype)
        return hidden_NO if self._bias_O is None else hidden_NO.add_(self._bias_O)

    def open_gradient(self, pauses: Pauses = NO_PAUSES) -> InputGradient:
        weight_OI = self._weight_OI
        if weight_OI.itemsize < 4 and weight_OI.device.type == "cpu":
            # As it lies, processors that know no 16-bit products take 17 times as long.
            weight_OI = _turn(weight_OI, pauses)

        def multiply(grads_NO: Tensor, pauses: Pauses) -> Tensor:
            grads_NI = _multiply(grads_NO.to(weight_OI.dtype), weight_OI, None, pauses)
            return grads_NI.to(grads_NO.dtype)

        return multiply


def _multiply(rows_NK: Tensor, weight_KM: Tensor, bias_M: Tensor | None, pauses: Pauses) -> Tensor:
    """Return the product of matrices of one dtype, piece by piece."""
    num_inputs, num_outputs = weight_KM.shape
    row_bytes = num_inputs * weight_KM.itemsize
    result_NM = rows_NK.new_empty(len(rows_NK), num_outputs)
    for rows in pauses.cut(len(rows_NK), row_bytes * _OUTPUTS_AT_ONCE, _ROWS_AT_ONCE):
        part_NK = rows_NK[rows]
        for outputs in pauses.cut(num_outputs, row_bytes * len(part_NK), _OUTPUTS_AT_ONCE):
            target_NM, factor_KM = result_NM[rows, outputs], weight_KM[:, outputs]
            if bias_M is None:
                torch.mm(part_NK, factor_KM, out=target_NM)
            else:
                torch.addmm(bias_M[outputs], part_NK, factor_KM, out=target_NM)
    return result_NM


def _turn(weight_OI: Tensor, pauses: Pauses) -> Tensor:
    """Return an equal matrix in which each column lies together, made piece by piece."""
    num_outputs, num_inputs = weight_OI.shape
    turned_IO = weight_OI.new_empty(num_inputs, num_outputs)
    for outputs in pauses.cut(num_outputs, 2 * num_inputs * weight_OI.itemsize * BYTE_COST):
        turned_IO[:, outputs] = weight_OI[outputs].t()
    return turned_IO.t()


class Nf4Linear(Linear):
    """Weights in four bits; the precision of rows makes no difference."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        self.out_features, self.in_features = weight_OI.shape
        self._weight = Nf4Weight(weight_OI)
        self._bias_O = bias_O
        self.num_bytes = self._weight.num_bytes + _count_bytes(bias_O)

    def __call__(self, hidden_NI: Tensor, precision: RowPrecision) -> Tensor:
        return self._weight.multiply(hidden_NI, self._bias_O)

    def multiply_in_pieces(
        self, hidden_NI: Tensor, precision: RowPrecision, pauses: Pauses
    ) -> Tensor:
        weight_OI = self._weight.dequantize(hidden_NI.dtype)
        return _multiply(hidden_NI, weight_OI.t(), self._bias_O, pauses)

    def open_gradient(self, pauses: Pauses = NO_PAUSES) -> InputGradient:
        def multiply(grads_NO: Tensor, pauses: Pauses) -> Tensor:
            return _multiply(grads_NO, self._weight.dequantize(grads_NO.dtype), None, pauses)

        return multiply


class Int8Linear(Linear):
    """Weights as int8 with one scale per output, multiplied where they lie."""

    def __init__(self, weight: Int8Weight, bias_O: Tensor | None, kernel: Int8Kernel) -> None:
        self.out_features, self.in_features = weight.shape
        if self.in_features > MAX_COLUMNS:
            raise ValueError(f"int8 weights have at most {MAX_COLUMNS} columns")
        self._product = product = kernel.pack(weight, bias_O)
        self._adding = product if isinstance(product, AddingProduct) else None
        self.num_bytes = self._product.num_bytes
        # Rounding to whole numbers changes each by 1 / sqrt(12), as a root mean square.
        self._enough_squares = math.ceil(self.in_features / 12 / MAX_ROUNDING_ERROR**2)

    def __call__(self, hidden_NI: Tensor, precision: RowPrecision) -> Tensor:
        if hidden_NI.requires_grad and torch.is_grad_enabled():
            # Rounding has no gradient: autograd would return a plausible, wrong one.
            raise ValueError("an int8 linear has no backward of its own; GradientLinears has")
        if precision is RowPrecision.TWO_DIGITS:
            return self._product.multiply(hidden_NI, 2)
        hidden_NO, squares_N = self._product.multiply_roughly(hidden_NI)
        # A list: for the row of one token, three operations of torch take as long as its norm.
        squares = enumerate(squares_N.tolist())
        rough = [row for row, total in squares if total < self._enough_squares]
        if rough:
            hidden_NO[rough] = self._product.multiply(hidden_NI[rough], 2)
        return hidden_NO

    def multiply_and_add(
        self, rows: Rows, precision: RowPrecision, added_NO: Tensor | None
    ) -> Tensor:
        if self._adding is None or precision is RowPrecision.ONE_DIGIT:
            return super().multiply_and_add(rows, precision, added_NO)
        return self._adding.multiply_and_add(rows, added_NO)

    def multiply_in_pieces(
        self, hidden_NI: Tensor, precision: RowPrecision, pauses: Pauses
    ) -> Tensor:
        cost_each = self.in_features * self.out_features * precision.value
        parts = [
            self(hidden_NI[rows], precision)
            for rows in pauses.cut(len(hidden_NI), cost_each, _ROWS_AT_ONCE)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def open_gradient(self, pauses: Pauses = NO_PAUSES) -> InputGradient:
        """Multiply with the transposed whole numbers, and with two digits of the gradients.

        A row of gradients takes the scales of the outputs first. It loses as much by rounding as
        the activations of generated tokens do, a few parts in a hundred thousand, and does not
        depend on the other rows either.
        """
        step = MAX_COLUMNS // OUTPUT_MULTIPLE * OUTPUT_MULTIPLE
        parts = [
            (outputs, self._product.transpose(outputs.start, outputs.stop))
            for start in range(0, self.out_features, step)
            for outputs in (slice(start, min(start + step, self.out_features)),)
        ]

        def multiply(grads_NO: Tensor) -> Tensor:
            scaled_NO = grads_NO * self._product.scales_O
            results = [product.multiply(scaled_NO[:, outputs], 2) for outputs, product in parts]
            return sum(results[1:], results[0]).to(grads_NO.dtype)

        def multiply_in_pieces(grads_NO: Tensor, pauses: Pauses) -> Tensor:
            cost_each = self.in_features * self.out_features * 2
            rows = pauses.cut(len(grads_NO), cost_each, _ROWS_AT_ONCE)
            results = [multiply(grads_NO[part]) for part in rows]
            return results[0] if len(results) == 1 else torch.cat(results)

        return multiply_in_pieces


class GradientLinears:
    """Computes linears in pieces, and lets autograd differentiate them.

    With `is_keeping`, the function for a weight's gradient is made once and kept as long as this
    object: for linears that see the rows of a batch in several calls. An `unread` linear returns
    zeros: only its gradient is used.
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
        """Return the function that turns gradients of a linear's output into those of its input."""
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
