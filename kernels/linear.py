"""The linear layers of a block, in one of three weight formats; int8 has two paths by row count."""

from abc import ABC, abstractmethod
from enum import Enum

import torch
import torch.nn.functional as F
from torch import Tensor

from .quantize import INT8_MAX, WeightFormat, quantize_int8


class RowPath(Enum):
    """How an int8 linear treats its rows; the two differ by about one percent of the result."""

    FEW = "few"
    """Float activations times int8 weights: bound by reading the weights."""

    MANY = "many"
    """Activations rounded to int8 row by row, integers multiplied and summed exactly."""


FEW_ROWS_LIMIT = 8
"""Most rows for which FEW is used: where the two cross.

Microseconds of FEW / MANY at 1, 4, 8, 10 and 128 rows of 1024 -> 2816, weights out of cache:
155 / 124, 183 / 308, 328 / 336, 425 / 356, 4603 / 1165; plain float32 needs 637 for one row. One
thread of an EPYC with AVX512-VNNI, torch 2.13; 1024 -> 1024 and 2816 -> 1024 cross there too. One
row takes FEW although MANY is faster: its activations keep their digits.
"""


def choose_row_path(num_rows: int) -> RowPath:
    """Return the path for one session's step of `num_rows` rows (sequences times tokens).

    To be called once per step and session and passed to every linear. Deciding by the size of a
    batch shared with strangers would let them change a session's results.
    """
    return RowPath.FEW if num_rows <= FEW_ROWS_LIMIT else RowPath.MANY


class Linear(ABC):
    """`hidden @ weight.T + bias` with frozen weights; made by `make_linear`."""

    in_features: int
    out_features: int
    num_bytes: int
    """Memory held: weights, scales and bias."""
    num_parameters: int
    """Weights and biases of the layer, however they are stored."""

    @abstractmethod
    def __call__(self, hidden_NI: Tensor, path: RowPath) -> Tensor:
        """Return `hidden_NO` in the dtype of `hidden_NI`, a matrix with one row per token.

        Each row's result depends on that row alone.
        """


def make_linear(
    weight_OI: Tensor, bias_O: Tensor | None, weights: WeightFormat, dtype: torch.dtype
) -> Linear:
    """Return a linear layer with its own copy of the weights in the given format.

    `dtype` is that of the activations in and out, and of the bias. Raises ValueError for shapes
    that contradict each other, a `dtype` without fractions, or weights that cannot be quantized.
    """
    if weight_OI.dim() != 2:
        raise ValueError(f"a weight is a matrix [out, in], got shape {tuple(weight_OI.shape)}")
    if bias_O is not None and bias_O.shape != weight_OI.shape[:1]:
        raise ValueError(f"bias {tuple(bias_O.shape)} for weight {tuple(weight_OI.shape)}")
    if not dtype.is_floating_point:
        raise ValueError(f"activations are floating point numbers, not {dtype}")
    bias_O = None if bias_O is None else _own(bias_O, dtype)
    if weights is WeightFormat.INT8:
        return _Int8Linear(weight_OI, bias_O)
    stored = torch.bfloat16 if weights is WeightFormat.BF16 else torch.float32
    return _FloatLinear(_own(weight_OI, stored), bias_O, dtype)


def _own(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    # Always a copy: a view would keep a whole memory-mapped checkpoint shard alive.
    return tensor.detach().to(dtype, copy=True, memory_format=torch.contiguous_format)


def _count(weight_OI: Tensor, bias_O: Tensor | None) -> int:
    return weight_OI.numel() + (0 if bias_O is None else bias_O.numel())


def _count_bytes(*tensors: Tensor | None) -> int:
    return sum(t.nbytes for t in tensors if t is not None)


class _FloatLinear(Linear):
    """Weights in a float format; the path makes no difference."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None, dtype: torch.dtype) -> None:
        self.out_features, self.in_features = weight_OI.shape
        self.num_parameters = _count(weight_OI, bias_O)
        self.num_bytes = _count_bytes(weight_OI, bias_O)
        self._weight_OI = weight_OI
        self._bias_O = bias_O
        self._needs_conversion = weight_OI.dtype != dtype

    def __call__(self, hidden_NI: Tensor, path: RowPath) -> Tensor:
        if not self._needs_conversion:
            return F.linear(hidden_NI, self._weight_OI, self._bias_O)
        hidden_NO = F.linear(hidden_NI.to(self._weight_OI.dtype), self._weight_OI)
        hidden_NO = hidden_NO.to(hidden_NI.dtype)
        return hidden_NO if self._bias_O is None else hidden_NO + self._bias_O


_COLUMNS_PER_LOAD = 16
"""FEW's kernel reads rows in loads of 16 elements and past the end of a row that is no multiple."""

_ALIGNMENT = 32
"""FEW's kernel loads activations with aligned instructions; at other addresses the process dies."""


class _Int8Linear(Linear):
    """Weights as int8 with one scale per output, on the CPU, without gradients.

    Columns are padded with zeros to whole loads; activations follow when they come in.
    """

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        weight = quantize_int8(weight_OI)
        self.out_features, self.in_features = weight_OI.shape
        self._padding = -self.in_features % _COLUMNS_PER_LOAD
        # No padding, no copy: a second one per weight would leave holes in the heap as large.
        values_OI = weight.values_OI
        self._values_OI = F.pad(values_OI, (0, self._padding)) if self._padding else values_OI
        self._values_IO = self._values_OI.t()
        self._scales_O = weight.scales_O
        # The kernel of FEW wants scales in the activations' bfloat16, which would put a fixed
        # error of up to 0.2 % on a channel. It gets ones; the true scales follow in float32.
        self._ones_O = torch.ones(self.out_features, dtype=torch.bfloat16)
        self._bias_O = bias_O
        self.num_parameters = _count(weight_OI, bias_O)
        self.num_bytes = _count_bytes(self._values_OI, self._scales_O, self._ones_O, bias_O)

    def __call__(self, hidden_NI: Tensor, path: RowPath) -> Tensor:
        if hidden_NI.requires_grad and torch.is_grad_enabled():
            # Rounding has no gradient: autograd would return a plausible, wrong one.
            raise ValueError("an int8 linear has no backward; call it under torch.no_grad()")
        dtype = hidden_NI.dtype
        if self._padding:
            hidden_NI = F.pad(hidden_NI, (0, self._padding))
        multiply = self._multiply_few if path is RowPath.FEW else self._multiply_many
        sums_NO = multiply(hidden_NI)
        if self._bias_O is not None:
            sums_NO += self._bias_O
        return sums_NO.to(dtype)

    def _multiply_few(self, hidden_NI: Tensor) -> Tensor:
        # The kernel is vectorized for bfloat16 alone: its float32 form takes 13 times as long,
        # more than a plain float32 product. Sums are float32 inside and rounded to bfloat16 once.
        hidden_NI = hidden_NI.to(torch.bfloat16).contiguous()
        if hidden_NI.data_ptr() % _ALIGNMENT:
            hidden_NI = hidden_NI.clone()
        sums_NO = torch._weight_int8pack_mm(  # pyright: ignore[reportPrivateImportUsage]
            hidden_NI, self._values_OI, self._ones_O
        )
        return sums_NO * self._scales_O

    def _multiply_many(self, hidden_NI: Tensor) -> Tensor:
        hidden_NI = hidden_NI.to(torch.float32)
        steps_N1 = hidden_NI.abs().amax(dim=1, keepdim=True).div_(INT8_MAX)
        # A row of zeros would divide 0 by 0, and casting NaN to int8 is undefined.
        steps_N1.clamp_min_(torch.finfo(torch.float32).tiny)
        rounded_NI = (hidden_NI / steps_N1).round_().to(torch.int8)
        sums_NO = torch._int_mm(  # pyright: ignore[reportPrivateImportUsage]
            rounded_NI, self._values_IO
        )
        return (sums_NO * steps_N1).mul_(self._scales_O)
