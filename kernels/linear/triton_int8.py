"""The int8 kernel in Triton, for CUDA devices: the bits of quantize.py, one program per tile.

Imports Triton, so nothing but `select.py` imports this file, and only for tensors on such a device.

Tensor suffixes: N rows, I columns, O outputs, C digits of a row, the high one first, M digits of
all rows.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .quantize import (
    DIGIT_LIMITS,
    SMALLEST_ABSMAX,
    Int8Kernel,
    Int8Product,
    Int8Weight,
    RoundedRows,
    Rows,
)

LAUNCH_OPTIONS = {"enable_fp_fusion": False}
"""A product that is added is rounded first, as the rules say."""


class Tile(NamedTuple):
    """How one program's part of a product is cut; every choice gives the same bits."""

    digits: int
    """M: each digit of a row is a row to the matrix units. A row alone goes without them."""
    outputs: int
    columns: int
    num_warps: int
    num_stages: int
    is_weights_first: bool = False
    """Whether the weights are the left factor to the matrix units."""

    @property
    def constants(self) -> dict[str, int | bool]:
        """What its program is compiled with."""
        constants = {
            "BLOCK_O": self.outputs, "BLOCK_I": self.columns,
            "num_warps": self.num_warps, "num_stages": self.num_stages,
        }  # fmt: skip
        if self.digits == 1:
            return constants
        return {**constants, "BLOCK_M": self.digits, "WEIGHTS_FIRST": self.is_weights_first}


Tiles = tuple[Tile, Tile]
"""For weights with up to twice as many outputs as columns, and for wider ones."""

ROW_TILES: Tiles = Tile(1, 2, 1024, 1, 3), Tile(1, 4, 512, 2, 3)
FEW_ROWS_TILES: dict[int, Tiles] = {
    16: (Tile(16, 16, 512, 4, 4, True), Tile(16, 16, 256, 2, 4, True)),
    32: (Tile(32, 16, 512, 4, 4, True), Tile(32, 64, 256, 4, 4, True)),
    256: (Tile(64, 32, 256, 4, 3), Tile(64, 64, 256, 4, 3, True)),
}
"""By the most digits that they are for."""
MANY_ROWS_TILE = Tile(128, 64, 128, 4, 4, True)
# Measured on an H100, with weights out of its caches; of the tiles that fit into Ampere's smaller
# cards. To split sums over columns as well, where outputs are few, won less than a tenth.

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
        result_NO = self._multiply(*_round(hidden_NI, num_digits, None), None)
        # By torch, since Triton's interpreter cuts off where a device rounds.
        return result_NO.to(hidden_NI.dtype)

    def multiply_roughly(self, hidden_NI: Tensor) -> tuple[Tensor, Tensor]:
        squares_N = hidden_NI.new_empty(len(hidden_NI), dtype=torch.int32)
        result_NO = self._multiply(*_round(hidden_NI, 1, squares_N), None)
        return result_NO.to(hidden_NI.dtype), squares_N

    def multiply_and_add(self, rows: Rows, added_NO: Tensor | None) -> Tensor:
        values_NI = rows if isinstance(rows, Tensor) else rows.values_NI
        if values_NI.dtype is not torch.float32:
            result_NO = self.multiply(values_NI, 2)
            return result_NO if added_NO is None else added_NO + result_NO
        if isinstance(rows, RoundedRows):
            return self._multiply(rows.digits_NCI, rows.steps_N, added_NO)
        return self._multiply(*_round(values_NI, 2, None), added_NO)

    def transpose(self, first_output: int, last_output: int) -> Int8Product:
        values_IO = self._values_OI[first_output:last_output].t().contiguous()
        return _TritonProduct(Int8Weight(values_IO, self.scales_O.new_ones(len(values_IO))), None)

    def _multiply(self, digits_NCI: Tensor, steps_N: Tensor, added_NO: Tensor | None) -> Tensor:
        num_rows, num_digits, num_columns = digits_NCI.shape
        num_outputs = len(self._values_OI)
        if num_columns != self._values_OI.shape[1]:
            raise ValueError(
                f"rows of {num_columns} numbers for {self._values_OI.shape[1]} columns"
            )
        result_NO = steps_N.new_empty(num_rows, num_outputs)
        if num_rows == 0:
            return result_NO
        tile = choose_tile(num_rows, num_digits, num_columns, num_outputs)
        is_single = num_rows == 1
        num_tiles = 1 if is_single else -(-num_rows * num_digits // tile.digits)
        _launch(
            _multiply_row if is_single else _multiply_rows,
            (num_tiles, -(-num_outputs // tile.outputs)),
            digits_NCI, steps_N, self._values_OI, self.scales_O, self._bias_O,
            None if added_NO is None else added_NO.contiguous(), result_NO,
            num_rows, num_columns, num_outputs, NUM_DIGITS=num_digits, **tile.constants,
        )  # fmt: skip
        return result_NO


def _round(hidden_NI: Tensor, num_digits: int, squares_N: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the digits of rows and their steps."""
    num_rows, num_columns = hidden_NI.shape
    digits_NCI = hidden_NI.new_empty(num_rows, num_digits, num_columns, dtype=torch.int8)
    steps_N = hidden_NI.new_empty(num_rows, dtype=torch.float32)
    if num_rows:
        _launch(
            _round_row, (num_rows,),
            hidden_NI.contiguous(), digits_NCI, steps_N, squares_N, num_columns,
            LIMIT=float(DIGIT_LIMITS[num_digits]), SMALLEST=SMALLEST_ABSMAX, NUM_DIGITS=num_digits,
            **choose_row_block(num_columns),
        )  # fmt: skip
    return digits_NCI, steps_N


def choose_row_block(num_columns: int) -> dict[str, int]:
    """Return how a program keeps a row in registers, with warps as measured on an H100."""
    block = 1 << (num_columns - 1).bit_length()
    return {"BLOCK_I": block, "num_warps": min(16, max(4, block // 256))}


def choose_tile(num_rows: int, num_digits: int, num_columns: int, num_outputs: int) -> Tile:
    """Return how a product is cut.

    >>> choose_tile(1, 2, 1024, 2816).digits, choose_tile(17, 2, 1024, 2816).digits
    (1, 64)
    """
    is_wide = num_outputs > 2 * num_columns
    if num_rows == 1:
        return ROW_TILES[is_wide]
    for most_digits, tiles in FEW_ROWS_TILES.items():
        if num_rows * num_digits <= most_digits:
            return tiles[is_wide]
    return MANY_ROWS_TILE


def _launch(kernel: Any, grid: tuple[int, ...], *arguments: object, **constants: object) -> None:
    kernel[grid](*arguments, **constants, **LAUNCH_OPTIONS)


@triton.jit
def _round_row(
    hidden_NI, digits_NCI, steps_N, squares_N, num_columns,
    LIMIT: tl.constexpr, SMALLEST: tl.constexpr, NUM_DIGITS: tl.constexpr, BLOCK_I: tl.constexpr,
):  # fmt: skip
    """Write the whole numbers of one row, digit by digit, its step, and the sum of its squares."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK_I)
    inside = columns < num_columns
    numbers = tl.load(hidden_NI + row * num_columns + columns, inside, other=0.0).to(tl.float32)
    whole = write_digits(
        numbers, columns, inside, digits_NCI + row * NUM_DIGITS * num_columns, steps_N + row,
        num_columns, LIMIT, SMALLEST, NUM_DIGITS,
    )  # fmt: skip
    if squares_N is not None:
        tl.store(squares_N + row, tl.sum(whole * whole, axis=0))


@triton.jit
def write_digits(
    numbers_I, columns_I, inside_I, digits_CI, step, num_columns,
    LIMIT: tl.constexpr, SMALLEST: tl.constexpr, NUM_DIGITS: tl.constexpr,
):  # fmt: skip
    """Write the whole numbers of a row, digit by digit, and its step; return the numbers.

    Numbers that are not inside are zero.
    """
    magnitudes = tl.abs(numbers_I)
    # No comparison is true for NaN, and a maximum may lose it.
    is_finite = tl.max(tl.where(magnitudes < float("inf"), 0, 1), axis=0) == 0
    absmax = tl.where(is_finite, tl.maximum(tl.max(magnitudes, axis=0), SMALLEST), 1.0)
    limit = tl.full((), LIMIT, tl.float32)
    # The plain division of a device is not rounded correctly.
    tl.store(step, tl.where(is_finite, tl.div_rn(absmax, limit), float("nan")))
    scaled = tl.where(is_finite, numbers_I, 0.0) * tl.div_rn(limit, absmax)
    numbers = ((scaled + _ROUNDER) - _ROUNDER).to(tl.int32)
    digits = digits_CI + columns_I
    rest = numbers
    if NUM_DIGITS == 2:
        high = (numbers + 128) >> 8
        tl.store(digits, high.to(tl.int8), inside_I)
        rest = numbers - (high << 8)
        digits += num_columns
    tl.store(digits, rest.to(tl.int8), inside_I)
    return numbers


@triton.jit(do_not_specialize=["num_rows"])
def _multiply_row(
    digits_NCI, steps_N, values_OI, scales_O, bias_O, added_NO, result_NO,
    num_rows, num_columns, num_outputs,
    NUM_DIGITS: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr,
):  # fmt: skip
    """Multiply one row with some outputs' weights: reading those is what takes the time."""
    row = tl.program_id(0).to(tl.int64)
    outputs = tl.program_id(1).to(tl.int64) * BLOCK_O + tl.arange(0, BLOCK_O)
    has_output = outputs < num_outputs
    # Of 2**16 / BLOCK_I products each, 32639 * 128 at most: 32 bits hold them.
    sums_OI = tl.zeros((BLOCK_O, BLOCK_I), tl.int32)
    digits = digits_NCI + row * NUM_DIGITS * num_columns
    for start in range(0, num_columns, BLOCK_I):
        columns = start + tl.arange(0, BLOCK_I)
        inside = columns < num_columns
        weights_OI = tl.load(
            values_OI + outputs[:, None] * num_columns + columns[None, :],
            has_output[:, None] & inside[None, :],
            other=0,
        )
        numbers = tl.load(digits + columns, inside, other=0).to(tl.int32)
        if NUM_DIGITS == 2:
            numbers = numbers * 256 + tl.load(digits + num_columns + columns, inside, other=0)
        sums_OI += weights_OI.to(tl.int32) * numbers[None, :]
    result = tl.sum(sums_OI.to(tl.int64), axis=1).to(tl.float32) * tl.load(steps_N + row)
    result *= tl.load(scales_O + outputs, has_output, other=0.0)
    if bias_O is not None:
        result += tl.load(bias_O + outputs, has_output, other=0.0)
    if added_NO is not None:
        result += tl.load(added_NO + row * num_outputs + outputs, has_output, other=0.0)
    tl.store(result_NO + row * num_outputs + outputs, result, has_output)


@triton.jit(do_not_specialize=["num_rows"])
def _multiply_rows(
    digits_NCI, steps_N, values_OI, scales_O, bias_O, added_NO, result_NO,
    num_rows, num_columns, num_outputs,
    NUM_DIGITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr,
    WEIGHTS_FIRST: tl.constexpr,
):  # fmt: skip
    """Multiply some rows with some outputs' weights, on the matrix units."""
    BLOCK_N: tl.constexpr = BLOCK_M // NUM_DIGITS
    first_row = tl.program_id(0).to(tl.int64) * BLOCK_N
    digits_M = first_row * NUM_DIGITS + tl.arange(0, BLOCK_M)
    has_digit = digits_M < num_rows * NUM_DIGITS
    outputs = tl.program_id(1).to(tl.int64) * BLOCK_O + tl.arange(0, BLOCK_O)
    has_output = outputs < num_outputs
    columns = tl.arange(0, BLOCK_I)
    if WEIGHTS_FIRST:
        weights = values_OI + outputs[:, None] * num_columns + columns[None, :]
        digits = digits_NCI + digits_M[None, :] * num_columns + columns[:, None]
        sums = tl.zeros((BLOCK_O, BLOCK_M), tl.int32)
    else:
        weights = values_OI + outputs[None, :] * num_columns + columns[:, None]
        digits = digits_NCI + digits_M[:, None] * num_columns + columns[None, :]
        sums = tl.zeros((BLOCK_M, BLOCK_O), tl.int32)
    for start in range(0, num_columns, BLOCK_I):
        inside = start + columns < num_columns
        if WEIGHTS_FIRST:
            left = tl.load(weights, has_output[:, None] & inside[None, :], other=0)
            right = tl.load(digits, inside[:, None] & has_digit[None, :], other=0)
        else:
            left = tl.load(digits, has_digit[:, None] & inside[None, :], other=0)
            right = tl.load(weights, inside[:, None] & has_output[None, :], other=0)
        sums = tl.dot(left, right, sums, out_dtype=tl.int32)
        weights += BLOCK_I
        digits += BLOCK_I
    sums_MO = tl.trans(sums) if WEIGHTS_FIRST else sums
    if NUM_DIGITS == 2:
        factors = tl.where(tl.arange(0, 2) == 0, 256, 1).to(tl.int64)
        pairs = tl.reshape(sums_MO, (BLOCK_N, 2, BLOCK_O)).to(tl.int64)
        whole = tl.sum(pairs * factors[None, :, None], axis=1)
    else:
        whole = sums_MO
    rows = first_row + tl.arange(0, BLOCK_N)
    has_row = rows < num_rows
    result = whole.to(tl.float32) * tl.load(steps_N + rows, has_row, other=0.0)[:, None]
    result *= tl.load(scales_O + outputs, has_output, other=0.0)[None, :]
    if bias_O is not None:
        result += tl.load(bias_O + outputs, has_output, other=0.0)[None, :]
    places = rows[:, None] * num_outputs + outputs[None, :]
    is_there = has_row[:, None] & has_output[None, :]
    if added_NO is not None:
        result += tl.load(added_NO + places, is_there, other=0.0)
    tl.store(result_NO + places, result, is_there)
