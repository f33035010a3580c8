"""The int8 kernel in Triton, for CUDA devices: the bits of quantize.py, one program per tile.

Imports Triton, so nothing but `select.py` imports this file, and only for tensors on such a device.

Tensor suffixes: N rows, I columns, O outputs, C digits, the high one first.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .quantize import DIGIT_LIMITS, SMALLEST_ABSMAX, Int8Kernel, Int8Product, Int8Weight

MAX_ROWS_ONE_BY_ONE = 2
"""Above, tiles for the matrix units read each weight once for all rows. Not measured yet."""

LAUNCH_OPTIONS = {"enable_fp_fusion": False}
"""A product that is added is rounded first, as the rules say."""

_ROUND_BLOCK = 1024

_ROW_TILE = {"BLOCK_O": 16, "BLOCK_I": 512}
"""512 products of two digits and a weight, 32639 * 128 at most each, still fit into 32 bits."""

_FEW_ROWS_TILE = {"BLOCK_N": 16, "BLOCK_O": 64, "BLOCK_I": 128}
_MANY_ROWS_TILE = {"BLOCK_N": 64, "BLOCK_O": 64, "BLOCK_I": 128}
"""Sixteen rows are the fewest that matrix units take."""

# Adding and subtracting it leaves a whole number, rounded to even, of magnitudes up to 2**22:
# float32 has no digits behind the point there.
_ROUNDER = tl.constexpr(1.5 * 2**23)


def make_kernel() -> Int8Kernel:
    """Return the kernel for tensors on a CUDA device."""
    return Int8Kernel("int8: triton", _TritonProduct)


class _TritonProduct:
    """A weight as it is, and the launches."""

    def __init__(self, weight: Int8Weight, bias_O: Tensor | None) -> None:
        self._values_OI = weight.values_OI.contiguous()
        self.scales_O = weight.scales_O.contiguous()
        self._bias_O = None if bias_O is None else bias_O.to(torch.float32, copy=True)
        tensors = (self._values_OI, self.scales_O, self._bias_O)
        self.num_bytes = sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def multiply(self, hidden_NI: Tensor, num_digits: int) -> Tensor:
        return self._run(hidden_NI, num_digits, None)

    def multiply_roughly(self, hidden_NI: Tensor) -> tuple[Tensor, Tensor]:
        squares_N = hidden_NI.new_empty(len(hidden_NI), dtype=torch.int32)
        return self._run(hidden_NI, 1, squares_N), squares_N

    def transpose(self, first_output: int, last_output: int) -> Int8Product:
        values_IO = self._values_OI[first_output:last_output].t().contiguous()
        return _TritonProduct(Int8Weight(values_IO, self.scales_O.new_ones(len(values_IO))), None)

    def _run(self, hidden_NI: Tensor, num_digits: int, squares_N: Tensor | None) -> Tensor:
        num_rows, num_columns = hidden_NI.shape
        num_outputs = len(self._values_OI)
        if num_columns != self._values_OI.shape[1]:
            raise ValueError(
                f"rows of {num_columns} numbers for {self._values_OI.shape[1]} columns"
            )
        result_NO = hidden_NI.new_empty(num_rows, num_outputs, dtype=torch.float32)
        if num_rows == 0:
            return result_NO.to(hidden_NI.dtype)
        digits_CNI = hidden_NI.new_empty(num_digits, num_rows, num_columns, dtype=torch.int8)
        steps_N = hidden_NI.new_empty(num_rows, dtype=torch.float32)
        _launch(
            _round_row, (num_rows,),
            hidden_NI.contiguous(), digits_CNI, steps_N, squares_N, num_rows, num_columns,
            LIMIT=float(DIGIT_LIMITS[num_digits]), SMALLEST=SMALLEST_ABSMAX,
            NUM_DIGITS=num_digits, BLOCK_I=_ROUND_BLOCK,
        )  # fmt: skip
        kernel, grid, tile = _choose_tiles(num_rows, num_outputs)
        _launch(
            kernel, grid,
            digits_CNI, steps_N, self._values_OI, self.scales_O, self._bias_O, result_NO,
            num_rows, num_columns, num_outputs, NUM_DIGITS=num_digits, **tile,
        )  # fmt: skip
        # By torch, since Triton's interpreter cuts off where a device rounds.
        return result_NO.to(hidden_NI.dtype)


def _choose_tiles(num_rows: int, num_outputs: int) -> tuple[Any, tuple[int, int], dict[str, int]]:
    """Return the program, its grid, and the sizes of its tile; all choices give the same bits."""
    if num_rows <= MAX_ROWS_ONE_BY_ONE:
        grid = num_rows, -(-num_outputs // _ROW_TILE["BLOCK_O"])
        return _multiply_row, grid, _ROW_TILE
    is_few = num_rows <= _FEW_ROWS_TILE["BLOCK_N"]
    tile = _FEW_ROWS_TILE if is_few else _MANY_ROWS_TILE
    grid = -(-num_rows // tile["BLOCK_N"]), -(-num_outputs // tile["BLOCK_O"])
    return _multiply_rows, grid, tile


def _launch(kernel: Any, grid: tuple[int, ...], *arguments: object, **constants: object) -> None:
    kernel[grid](*arguments, **constants, **LAUNCH_OPTIONS)


@triton.jit
def _round_row(
    hidden_NI,
    digits_CNI,
    steps_N,
    squares_N,
    num_rows,
    num_columns,
    LIMIT: tl.constexpr,
    SMALLEST: tl.constexpr,
    NUM_DIGITS: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    """Write the whole numbers of one row, digit by digit, its step, and the sum of its squares."""
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK_I)
    largest = tl.full((BLOCK_I,), SMALLEST, tl.float32)
    odd = tl.zeros((BLOCK_I,), tl.int32)
    for start in range(0, num_columns, BLOCK_I):
        columns = start + offsets
        numbers = tl.load(hidden_NI + row * num_columns + columns, columns < num_columns, other=0.0)
        magnitudes = tl.abs(numbers.to(tl.float32))
        # No comparison is true for NaN, and a maximum may lose it.
        odd += tl.where(magnitudes < float("inf"), 0, 1)
        largest = tl.maximum(largest, magnitudes)
    is_finite = tl.max(odd, axis=0) == 0
    absmax = tl.where(is_finite, tl.max(largest, axis=0), 1.0)
    limit = tl.full((), LIMIT, tl.float32)
    # The plain division of a device is not rounded correctly.
    inverse = tl.div_rn(limit, absmax)
    tl.store(steps_N + row, tl.where(is_finite, tl.div_rn(absmax, limit), float("nan")))

    squares = tl.zeros((BLOCK_I,), tl.int32)
    for start in range(0, num_columns, BLOCK_I):
        columns = start + offsets
        inside = columns < num_columns
        numbers = tl.load(hidden_NI + row * num_columns + columns, inside, other=0.0)
        numbers = tl.where(is_finite, numbers.to(tl.float32), 0.0)
        whole = ((numbers * inverse + _ROUNDER) - _ROUNDER).to(tl.int32)
        if squares_N is not None:
            squares += whole * whole
        if NUM_DIGITS == 2:
            high = (whole + 128) >> 8
            tl.store(digits_CNI + row * num_columns + columns, high.to(tl.int8), inside)
            whole -= high << 8
        last = (NUM_DIGITS - 1) * num_rows + row
        tl.store(digits_CNI + last * num_columns + columns, whole.to(tl.int8), inside)
    if squares_N is not None:
        tl.store(squares_N + row, tl.sum(squares, axis=0))


@triton.jit
def _multiply_row(
    digits_CNI,
    steps_N,
    values_OI,
    scales_O,
    bias_O,
    result_NO,
    num_rows,
    num_columns,
    num_outputs,
    NUM_DIGITS: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    """Multiply one row with some outputs' weights: reading those is what takes the time."""
    row = tl.program_id(0).to(tl.int64)
    outputs = tl.program_id(1).to(tl.int64) * BLOCK_O + tl.arange(0, BLOCK_O)
    has_output = outputs < num_outputs
    sums = tl.zeros((BLOCK_O,), tl.int64)
    for start in range(0, num_columns, BLOCK_I):
        columns = start + tl.arange(0, BLOCK_I)
        inside = columns < num_columns
        numbers = tl.load(digits_CNI + row * num_columns + columns, inside, other=0).to(tl.int32)
        if NUM_DIGITS == 2:
            low = tl.load(digits_CNI + (num_rows + row) * num_columns + columns, inside, other=0)
            numbers = numbers * 256 + low
        weights = tl.load(
            values_OI + outputs[:, None] * num_columns + columns[None, :],
            has_output[:, None] & inside[None, :],
            other=0,
        )
        sums += tl.sum(weights.to(tl.int32) * numbers[None, :], axis=1).to(tl.int64)
    result = sums.to(tl.float32) * tl.load(steps_N + row)
    result *= tl.load(scales_O + outputs, has_output, other=0.0)
    if bias_O is not None:
        result += tl.load(bias_O + outputs, has_output, other=0.0)
    tl.store(result_NO + row * num_outputs + outputs, result, has_output)


@triton.jit
def _multiply_rows(
    digits_CNI,
    steps_N,
    values_OI,
    scales_O,
    bias_O,
    result_NO,
    num_rows,
    num_columns,
    num_outputs,
    NUM_DIGITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    """Multiply some rows with some outputs' weights, each digit on the matrix units."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    outputs = tl.program_id(1).to(tl.int64) * BLOCK_O + tl.arange(0, BLOCK_O)
    has_row = rows < num_rows
    has_output = outputs < num_outputs
    first = tl.zeros((BLOCK_N, BLOCK_O), tl.int32)
    second = tl.zeros((BLOCK_N, BLOCK_O), tl.int32)
    for start in range(0, num_columns, BLOCK_I):
        columns = start + tl.arange(0, BLOCK_I)
        inside = columns < num_columns
        weights_IO = tl.load(
            values_OI + outputs[None, :] * num_columns + columns[:, None],
            inside[:, None] & has_output[None, :],
            other=0,
        )
        places = digits_CNI + rows[:, None] * num_columns + columns[None, :]
        is_there = has_row[:, None] & inside[None, :]
        digits_NI = tl.load(places, is_there, other=0)
        first = tl.dot(digits_NI, weights_IO, first, out_dtype=tl.int32)
        if NUM_DIGITS == 2:
            digits_NI = tl.load(
                places + tl.cast(num_rows, tl.int64) * num_columns, is_there, other=0
            )
            second = tl.dot(digits_NI, weights_IO, second, out_dtype=tl.int32)
    if NUM_DIGITS == 2:
        sums = (first.to(tl.int64) * 256 + second).to(tl.float32)
    else:
        sums = first.to(tl.float32)
    result = sums * tl.load(steps_N + rows, has_row, other=0.0)[:, None]
    result *= tl.load(scales_O + outputs, has_output, other=0.0)[None, :]
    if bias_O is not None:
        result += tl.load(bias_O + outputs, has_output, other=0.0)[None, :]
    tl.store(
        result_NO + rows[:, None] * num_outputs + outputs[None, :],
        result,
        has_row[:, None] & has_output[None, :],
    )
