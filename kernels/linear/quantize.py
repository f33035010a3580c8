"""Weight formats, weights in int8, and the rules of a product with them.

Weights become small integers: one scale per output channel, symmetric, nothing learned. All int8
kernels compute the same numbers, bit by bit:

1.  A row of activations becomes whole numbers, `round(x / step)`, of at most 127 in magnitude for
    one digit and 32639 for two (`256 * high + low`), where `step` is the row's absmax over that
    limit. Magnitudes count as 2**-100 at least; a row with NaN or infinity has the step NaN.
2.  They are multiplied with the int8 weights and summed: an integer, exact in any order.
3.  The sum is rounded to float32 once. Then it is multiplied by the row's step and by the
    output's scale, and the bias is added, each rounded as float32.

So a row's result depends on nothing but the row: not on its batch, the threads, the processor.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor


class WeightFormat(StrEnum):
    """How the weights of a linear layer are held in memory."""

    INT8 = "int8"
    BF16 = "bf16"
    FP32 = "fp32"
    NF4 = "nf4"


ON_CPUS = (WeightFormat.INT8, WeightFormat.BF16, WeightFormat.FP32)
"""The formats with which a CPU computes; a CUDA device does with all."""


INT8_MAX = 127
"""Largest magnitude that `quantize_int8` makes, so that the range is symmetric. Weights that were
quantized elsewhere may hold -128."""

INT8_VERSION = 1
"""To be raised when `quantize_int8` makes other numbers, so that none are taken from disk."""


@dataclass(frozen=True)
class Int8Weight:
    """A quantized weight matrix: row `o` stands for `values_OI[o] * scales_O[o]`.

    `values_OI` is contiguous int8 `[out, in]`, `scales_O` float32 `[out]`, all scales above zero.
    """

    values_OI: Tensor
    scales_O: Tensor

    def to(self, device: torch.device) -> "Int8Weight":
        """Return the same weight on a device."""
        return Int8Weight(self.values_OI.to(device), self.scales_O.to(device))

    @property
    def shape(self) -> torch.Size:
        """The shape of the matrix that it stands for."""
        return self.values_OI.shape


def quantize_int8(weight_OI: Tensor) -> Int8Weight:
    """Return the weight with each row rounded to 255 steps of `absmax / 127`.

    Every element is off by at most half its row's scale. A row of zeros stays zero. Raises
    ValueError for a weight that is not a matrix or holds NaN or infinity.

    >>> quantized = quantize_int8(torch.tensor([[1.0, -2.0], [0.0, 0.0]]))
    >>> quantized.values_OI.tolist()
    [[64, -127], [0, 0]]
    """
    if weight_OI.dim() != 2 or weight_OI.numel() == 0:
        raise ValueError(f"a weight is a matrix [out, in], got shape {tuple(weight_OI.shape)}")
    weight_OI = weight_OI.detach()
    # Two passes without a copy; torch's one-pass forms along a dimension are far slower.
    absmax_O = torch.maximum(weight_OI.amax(dim=1), -weight_OI.amin(dim=1)).to(torch.float32)
    if not bool(absmax_O.isfinite().all()):
        raise ValueError("the weight holds NaN or infinity and cannot be quantized")
    # The floor keeps the division finite for rows of zeros or of subnormal numbers.
    scales_O = (absmax_O / INT8_MAX).clamp_min_(torch.finfo(torch.float32).tiny)
    # In place on the one float32 copy: loading a block peaks at that copy plus the result.
    scaled_OI = weight_OI.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    scaled_OI.div_(scales_O[:, None]).round_().clamp_(-INT8_MAX, INT8_MAX)
    return Int8Weight(scaled_OI.to(torch.int8), scales_O)


def dequantize_int8(weight: Int8Weight) -> Tensor:
    """Return the float32 matrix `[out, in]` that the quantized weight stands for."""
    return weight.values_OI.to(torch.float32) * weight.scales_O[:, None]


def check_int8(weight: Int8Weight) -> None:
    """Raise ValueError unless dtypes, shapes and scales are those of an Int8Weight."""
    values_OI, scales_O = weight.values_OI, weight.scales_O
    if values_OI.dtype is not torch.int8 or scales_O.dtype is not torch.float32:
        raise ValueError(f"int8 weights are not {values_OI.dtype} and {scales_O.dtype}")
    if values_OI.dim() != 2 or values_OI.numel() == 0 or scales_O.shape != values_OI.shape[:1]:
        raise ValueError(
            f"int8 weights cannot have shape {tuple(values_OI.shape)} "
            f"and scales {tuple(scales_O.shape)}"
        )
    if not bool((scales_O.isfinite() & (scales_O > 0)).all()):
        raise ValueError("the scales of int8 weights must be finite and above zero")


def stack_int8(weights: Sequence[Int8Weight]) -> Int8Weight:
    """Return the outputs of several weights below each other; one alone is returned as it is."""
    if len(weights) == 1:
        return weights[0]
    return Int8Weight(
        torch.cat([weight.values_OI for weight in weights]),
        torch.cat([weight.scales_O for weight in weights]),
    )


DIGIT_LIMITS = {1: INT8_MAX, 2: 256 * INT8_MAX + INT8_MAX}
"""Largest magnitude of an activation by the number of its int8 digits."""

SMALLEST_ABSMAX = 2.0**-100
"""Keeps the division by a row's absmax finite for zeros and subnormal numbers."""

MAX_COLUMNS = 2**16
"""Most columns whose products of bytes surely fit into 32 bits."""

OUTPUT_MULTIPLE = 32
"""Layouts may keep so many outputs together."""


@dataclass(frozen=True, slots=True)
class RoundedRows:
    """Rows, and what an int8 product with two digits makes of them first; C digits of a row."""

    values_NI: Tensor
    digits_NCI: Tensor
    steps_N: Tensor

    def __getitem__(self, rows: slice) -> "RoundedRows":
        return RoundedRows(self.values_NI[rows], self.digits_NCI[rows], self.steps_N[rows])


Rows = Tensor | RoundedRows
"""Inputs of linears, one row per token: on a device, norms and gates may round them as well."""


class Int8Product(Protocol):
    """One weight in a kernel's own layout, ready to multiply."""

    num_bytes: int
    """Memory held: weights, scales and bias."""
    scales_O: Tensor
    """One for each output, float32."""

    def multiply(self, hidden_NI: Tensor, num_digits: int) -> Tensor:
        """Return the product in the dtype of `hidden_NI`, a matrix of any float dtype."""
        ...

    def multiply_roughly(self, hidden_NI: Tensor) -> tuple[Tensor, Tensor]:
        """Return the product with one digit, and for each row how rough that is.

        That is the sum of the squares of the row's whole numbers, [N] int32: rounding changes
        each by 0.29 on average, so the row as a whole by 0.29 over their root mean square. An
        integer, and so the same on every processor.
        """
        ...

    def transpose(self, first_output: int, last_output: int) -> "Int8Product":
        """Return the product with the transposed whole numbers of some outputs, in new memory.

        Takes rows of `last_output - first_output` numbers to rows of `in_features`; all its
        scales are one, and it has no bias. `first_output` is a multiple of `OUTPUT_MULTIPLE`,
        and there are at most `MAX_COLUMNS` outputs.
        """
        ...


@runtime_checkable
class AddingProduct(Int8Product, Protocol):
    """One that takes rows which are rounded already, and adds its result in the same go."""

    def multiply_and_add(self, rows: Rows, added_NO: Tensor | None) -> Tensor:
        """Return the product with two digits, added to `added_NO`; its bits are those of both."""
        ...


@dataclass(frozen=True)
class Int8Kernel:
    """A way to multiply with int8 weights on this machine."""

    name: str
    """The name that a peer announces and prints, such as "int8: avx512-vnni"."""
    pack: Callable[[Int8Weight, Tensor | None], Int8Product]
    """Copy a weight [out, in] and a bias [out] into the kernel's layout."""
