"""Weights in four bits, where bitsandbytes is: its products run on CPUs as well, if slowly."""

import pytest
import torch
from torch import Tensor

from shoal.kernels.linear.linear import RowPrecision
from shoal.kernels.linear.nf4 import BYTES_PER_WEIGHT, Nf4Weight, has_bitsandbytes
from shoal.kernels.linear.quantize import WeightFormat
from shoal.kernels.linear.select import make_linear
from shoal.kernels.pauses import Pauses

pytestmark = pytest.mark.skipif(not has_bitsandbytes(), reason="needs bitsandbytes")

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_cuda])]


def draw(*shape: int, device: str, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).to(device, dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_rows", [1, 3, 40])
@pytest.mark.parametrize("has_bias", [False, True])
def test_product_is_that_of_what_four_bits_stand_for(
    num_rows: int, has_bias: bool, device: str
) -> None:
    weight_OI = draw(96, 128, device=device)
    bias_O = draw(96, device=device) if has_bias else None
    hidden_NI = draw(num_rows, 128, device=device, dtype=torch.bfloat16)

    linear = make_linear(weight_OI, bias_O, WeightFormat.NF4, torch.bfloat16)
    result_NO = linear(hidden_NI, RowPrecision.TWO_DIGITS)
    in_pieces_NO = linear.multiply_in_pieces(hidden_NI, RowPrecision.ONE_DIGIT, Pauses(bool, 2**16))

    rounded_OI = Nf4Weight(weight_OI).dequantize(torch.float32)
    error = (rounded_OI - weight_OI).norm() / weight_OI.norm()
    assert 0.05 < error < 0.12, "normally distributed weights lose about nine percent"
    expected_NO = hidden_NI.float() @ rounded_OI.T + (0 if bias_O is None else bias_O)
    assert result_NO.dtype is torch.bfloat16
    for product_NO in (result_NO, in_pieces_NO):
        torch.testing.assert_close(product_NO.float(), expected_NO, rtol=0.02, atol=0.15)


@pytest.mark.parametrize("device", DEVICES)
def test_gradient_is_that_of_what_four_bits_stand_for(device: str) -> None:
    weight_OI = draw(64, 128, device=device)
    grads_NO = draw(5, 64, device=device, dtype=torch.bfloat16)

    linear = make_linear(weight_OI, None, WeightFormat.NF4, torch.bfloat16)
    grads_NI = linear.open_gradient()(grads_NO, Pauses(bool, 2**16))

    expected_NI = grads_NO.float() @ Nf4Weight(weight_OI).dequantize(torch.float32)
    torch.testing.assert_close(grads_NI.float(), expected_NI, rtol=0.02, atol=0.15)


@pytest.mark.parametrize("device", DEVICES)
def test_bytes_are_counted(device: str) -> None:
    linear = make_linear(draw(128, 256, device=device), None, WeightFormat.NF4, torch.bfloat16)

    assert linear.num_bytes == 128 * 256 * BYTES_PER_WEIGHT


def test_weight_that_is_not_finite_is_refused() -> None:
    weight_OI = draw(4, 64, device="cpu")
    weight_OI[1, 2] = torch.inf

    with pytest.raises(ValueError, match="NaN or infinity"):
        make_linear(weight_OI, None, WeightFormat.NF4, torch.bfloat16)
