"""The int8 kernel in plain torch, for machines where the one in C was not built.

Torch multiplies integers exactly only where the processor has instructions for it; see `is_exact`.
"""

from functools import cache

import torch
from torch import Tensor

from .quantize import DIGIT_LIMITS, SMALLEST_ABSMAX, Int8Kernel, Int8Product, Int8Weight

_EXACT_COLUMNS = 2**24 // (128 * 128)
"""As many products of digits and weights sum to a whole number that float32 holds exactly."""


def make_kernel() -> Int8Kernel:
    """Return the kernel that runs everywhere."""
    return Int8Kernel("int8: torch", _TorchProduct)


class _TorchProduct:
    """A weight as it is, and the product in torch's operations."""

    def __init__(self, weight: Int8Weight, bias_O: Tensor | None) -> None:
        self._values_IO = weight.values_OI.t()
        self.scales_O = weight.scales_O
        self._bias_O = bias_O
        tensors = (self._values_IO, self.scales_O, self._bias_O)
        self.num_bytes = sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def multiply(self, hidden_NI: Tensor, num_digits: int) -> Tensor:
        if num_digits == 1:
            return self.multiply_roughly(hidden_NI)[0]
        numbers_NI, steps_N1 = _round_rows(hidden_NI.float(), num_digits)
        high_NI = (numbers_NI + 128) >> 8
        low_NI = numbers_NI - (high_NI << 8)
        # Both digits in one product: the weights are read once.
        digits_MI = torch.cat([high_NI, low_NI]).to(torch.int8)
        high_NO, low_NO = _multiply_exactly(digits_MI, self._values_IO).double().chunk(2)
        return self._finish(high_NO.mul_(256).add_(low_NO), steps_N1, hidden_NI.dtype)

    def multiply_roughly(self, hidden_NI: Tensor) -> tuple[Tensor, Tensor]:
        numbers_NI, steps_N1 = _round_rows(hidden_NI.float(), num_digits=1)
        sums_NO = _multiply_exactly(numbers_NI.to(torch.int8), self._values_IO)
        squares_N = numbers_NI.square().sum(dim=1, dtype=torch.int32)
        return self._finish(sums_NO, steps_N1, hidden_NI.dtype), squares_N

    def transpose(self, first_output: int, last_output: int) -> Int8Product:
        values_IO = self._values_IO[:, first_output:last_output]
        return _TorchProduct(Int8Weight(values_IO, torch.ones(len(values_IO))), None)

    def _finish(self, sums_NO: Tensor, steps_N1: Tensor, dtype: torch.dtype) -> Tensor:
        result_NO = sums_NO.float().mul_(steps_N1).mul_(self.scales_O)
        if self._bias_O is not None:
            result_NO += self._bias_O
        return result_NO.to(dtype)


def _round_rows(hidden_NI: Tensor, num_digits: int) -> tuple[Tensor, Tensor]:
    """Return whole numbers [N, I], and the step of each row, [N, 1]."""
    limit = DIGIT_LIMITS[num_digits]
    absmax_N1 = hidden_NI.abs().amax(dim=1, keepdim=True).clamp_min_(SMALLEST_ABSMAX)
    is_finite_N1 = absmax_N1.isfinite()
    inverse_N1 = torch.full_like(absmax_N1, limit).div_(absmax_N1)
    # Casting NaN to an integer is undefined; the NaN of a row's step is enough.
    numbers_NI = (hidden_NI * inverse_N1).round_().where(is_finite_N1, 0.0).to(torch.int32)
    return numbers_NI, (absmax_N1 / limit).where(is_finite_N1, torch.nan)


def _multiply_exactly(digits_NI: Tensor, values_IO: Tensor) -> Tensor:
    if is_exact():
        return _multiply_int8(digits_NI, values_IO)
    sums_NO = torch.zeros(len(digits_NI), values_IO.shape[1], dtype=torch.float64)
    for start in range(0, len(values_IO), _EXACT_COLUMNS):
        stop = start + _EXACT_COLUMNS
        sums_NO += digits_NI[:, start:stop].float() @ values_IO[start:stop].float()
    return sums_NO


def _multiply_int8(digits_NI: Tensor, values_IO: Tensor) -> Tensor:
    if len(values_IO) == 1:
        # Torch mistakes the strides of a transposed matrix with one row, and reads elsewhere.
        return digits_NI.int() * values_IO.int()
    return torch._int_mm(digits_NI, values_IO)  # pyright: ignore[reportPrivateImportUsage]


@cache
def is_exact() -> bool:
    """Whether torch's integer product is right on this processor.

    Without VNNI, oneDNN adds pairs of products in 16 bits, where large ones saturate.
    """
    digits_NI = torch.tensor([[127], [-128]], dtype=torch.int8).expand(2, 64).contiguous()
    values_OI = torch.tensor([[127], [-127]], dtype=torch.int8).expand(2, 64).contiguous()
    expected_NO = digits_NI.long() @ values_OI.t().long()
    return torch.equal(_multiply_int8(digits_NI, values_OI.t()).long(), expected_NO)
