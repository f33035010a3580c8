"""Norms and gates in Triton, for CUDA devices, each with the digits that an int8 product takes.

A program keeps its row in registers, so that one launch does what took torch and the kernel of the
product two or three. The values are written beside the digits, whoever reads them: so a row has the
same bits alone and in any company, and wherever prompts or adapters need its values.

Imports Triton, so nothing but `row_kernels.py` imports this file, and only for tensors on such a
device.

Tensor suffixes: N rows, I columns, C digits of a row, X gates and then as many ups.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..linear.quantize import DIGIT_LIMITS, MAX_COLUMNS, SMALLEST_ABSMAX, RoundedRows, Rows
from ..linear.triton_int8 import LAUNCH_OPTIONS, choose_row_block, write_digits
from .activations import Activation, gelu_tanh, multiply_gate
from .norm import Norm, NormKind

_ACTIVATIONS = {torch.nn.functional.silu: "silu", gelu_tanh: "gelu_tanh"}


class TritonRows:
    """Norms and gates whose results go into int8 products; what it lacks is torch's."""

    def norm(self, norm: Norm, hidden_NI: Tensor) -> Rows:
        num_columns = hidden_NI.shape[-1]
        if not _can_compute(hidden_NI, num_columns):
            return norm(hidden_NI)
        hidden_NI = _align(hidden_NI)
        rows = _make_rows(hidden_NI, num_columns)
        _launch(
            _norm_row, rows, hidden_NI, norm.weight_H, norm.bias_H, float(num_columns),
            norm.eps,
            IS_LAYER=norm.kind is NormKind.LAYER,
        )  # fmt: skip
        return rows

    def gate(self, activation: Activation, gate_up_NX: Tensor) -> Rows:
        num_columns = gate_up_NX.shape[-1] // 2
        name = _ACTIVATIONS.get(activation)
        if name is None or not _can_compute(gate_up_NX, num_columns):
            return multiply_gate(activation, gate_up_NX)
        gate_up_NX = _align(gate_up_NX)
        rows = _make_rows(gate_up_NX, num_columns)
        _launch(_gate_row, rows, gate_up_NX, ACTIVATION=name)
        return rows


def _can_compute(hidden_NI: Tensor, num_columns: int) -> bool:
    """Return whether programs can, which know one dtype and no gradients."""
    needs_gradient = torch.is_grad_enabled() and hidden_NI.requires_grad
    is_plain = hidden_NI.dim() == 2 and hidden_NI.dtype is torch.float32
    return is_plain and num_columns <= MAX_COLUMNS and not needs_gradient


def _align(hidden_NI: Tensor) -> Tensor:
    """Return it in one piece, at an address that Triton does not compile anew for."""
    hidden_NI = hidden_NI.contiguous()
    return hidden_NI.clone() if hidden_NI.data_ptr() % 16 else hidden_NI


def _make_rows(like_NI: Tensor, num_columns: int) -> RoundedRows:
    num_rows = len(like_NI)
    return RoundedRows(
        like_NI.new_empty(num_rows, num_columns),
        like_NI.new_empty(num_rows, 2, num_columns, dtype=torch.int8),
        like_NI.new_empty(num_rows),
    )


def _launch(kernel: Any, rows: RoundedRows, *arguments: object, **constants: object) -> None:
    num_rows, num_columns = rows.values_NI.shape
    if num_rows == 0:
        return
    kernel[num_rows,](
        rows.values_NI, rows.digits_NCI, rows.steps_N, num_columns, *arguments, **constants,
        LIMIT=float(DIGIT_LIMITS[2]), SMALLEST=SMALLEST_ABSMAX,
        **choose_row_block(num_columns), **LAUNCH_OPTIONS,
    )  # fmt: skip


@triton.jit
def _norm_row(
    values_NI, digits_NCI, steps_N, num_columns,
    hidden_NI, weight_I, bias_I, count, eps,
    IS_LAYER: tl.constexpr, LIMIT: tl.constexpr, SMALLEST: tl.constexpr, BLOCK_I: tl.constexpr,
):  # fmt: skip
    """Norm one row, and round it."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK_I)
    inside = columns < num_columns
    numbers = tl.load(hidden_NI + row * num_columns + columns, inside, other=0.0)
    if IS_LAYER:
        mean = tl.div_rn(tl.sum(numbers, axis=0), count)
        numbers = tl.where(inside, numbers - mean, 0.0)
    mean_square = tl.div_rn(tl.sum(numbers * numbers, axis=0), count)
    factor = tl.div_rn(tl.full((), 1.0, tl.float32), tl.sqrt_rn(mean_square + eps))
    numbers = numbers * factor * tl.load(weight_I + columns, inside, other=0.0).to(tl.float32)
    if bias_I is not None:
        numbers += tl.load(bias_I + columns, inside, other=0.0).to(tl.float32)
    tl.store(values_NI + row * num_columns + columns, numbers, inside)
    write_digits(
        numbers, columns, inside, digits_NCI + row * 2 * num_columns, steps_N + row, num_columns,
        LIMIT, SMALLEST, 2,
    )  # fmt: skip


@triton.jit
def _gate_row(
    values_NI, digits_NCI, steps_N, num_columns,
    gate_up_NX,
    ACTIVATION: tl.constexpr, LIMIT: tl.constexpr, SMALLEST: tl.constexpr, BLOCK_I: tl.constexpr,
):  # fmt: skip
    """Multiply the activations of one row's gates with its ups, and round the products."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK_I)
    inside = columns < num_columns
    places = gate_up_NX + row * 2 * num_columns + columns
    gates = tl.load(places, inside, other=0.0)
    # The power of what is not positive, so that none is too large.
    if ACTIVATION == "silu":
        turned = gates
    else:
        turned = 1.5957691216057308 * (gates + 0.044715 * gates * gates * gates)
    power = tl.exp(-tl.abs(turned))
    # Of both, the activation is the gate times a sigmoid.
    share = tl.div_rn(tl.where(turned < 0, power, 1.0), 1.0 + power)
    numbers = gates * share * tl.load(places + num_columns, inside, other=0.0)
    tl.store(values_NI + row * num_columns + columns, numbers, inside)
    write_digits(
        numbers, columns, inside, digits_NCI + row * 2 * num_columns, steps_N + row, num_columns,
        LIMIT, SMALLEST, 2,
    )  # fmt: skip
