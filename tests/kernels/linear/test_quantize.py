"""Int8 weights: error bound, exact cases and refusals."""

import pytest
import torch

from shoal.kernels.linear.linear import RowPrecision
from shoal.kernels.linear.native_int8 import list_kernels
from shoal.kernels.linear.quantize import (
    ON_CPUS,
    Int8Kernel,
    Int8Weight,
    WeightFormat,
    dequantize_int8,
    quantize_int8,
    stack_int8,
)
from shoal.kernels.linear.select import make_linear
from shoal.kernels.linear.torch_int8 import make_kernel as make_torch_kernel


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1), (40, 24), (7, 33), (128, 256)])
def test_quantize_is_off_by_at_most_half_a_step(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)

    quantized = quantize_int8(weight)

    error = (dequantize_int8(quantized) - weight.float()).abs()
    assert bool((error <= quantized.scales_O[:, None] * 0.50001).all())
    assert torch.equal(quantized.scales_O, weight.float().abs().amax(dim=1) / 127)


def test_quantize_returns_contiguous_int8_and_float32() -> None:
    weight = torch.randn(6, 10, generator=torch.Generator().manual_seed(2)).t()

    quantized = quantize_int8(weight)

    assert quantized.values_OI.shape == (10, 6)
    assert quantized.values_OI.dtype is torch.int8
    assert quantized.values_OI.is_contiguous()
    assert quantized.scales_O.dtype is torch.float32
    assert int(quantized.values_OI.abs().max()) == 127


def test_quantize_keeps_multiples_of_the_step_exactly() -> None:
    weight = torch.tensor([[127.0, -3.0, 0.0], [-254.0, 2.0, 4.0]])

    assert torch.equal(dequantize_int8(quantize_int8(weight)), weight)


@pytest.mark.parametrize("value", [0.0, 1e-40, -1e-37])
def test_quantize_accepts_rows_of_nothing(value: float) -> None:
    weight = torch.tensor([[value, value], [1.0, 2.0]])

    quantized = quantize_int8(weight)

    assert bool(quantized.scales_O.isfinite().all())
    assert bool((quantized.scales_O > 0).all())
    assert (dequantize_int8(quantized)[0] - value).abs().max() <= quantized.scales_O[0] / 2


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantize_refuses_non_finite_weights(value: float, dtype: torch.dtype) -> None:
    weight = torch.ones(4, 5, dtype=dtype)
    weight[2, 3] = value

    with pytest.raises(ValueError, match="NaN or infinity"):
        quantize_int8(weight)


@pytest.mark.parametrize("shape", [(3,), (2, 2, 2), (0, 4), (4, 0)])
def test_quantize_refuses_what_is_no_matrix(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="matrix"):
        quantize_int8(torch.zeros(shape))


@pytest.mark.parametrize("kernel", [make_torch_kernel(), *list_kernels()], ids=lambda k: k.name)
def test_weights_quantized_elsewhere_may_hold_the_lowest_number(kernel: Int8Kernel) -> None:
    values_OI = torch.full((3, 64), -128, dtype=torch.int8)
    weight = Int8Weight(values_OI, torch.ones(3))
    hidden_NI = torch.full((5, 64), 127.0)

    for num_digits in (1, 2):
        results_NO = kernel.pack(weight, None).multiply(hidden_NI, num_digits)
        torch.testing.assert_close(results_NO, torch.full((5, 3), -128.0 * 127 * 64))


def test_stacked_weights_stand_below_each_other() -> None:
    weights = [quantize_int8(torch.eye(2) * scale) for scale in (1.0, 3.0)]

    stacked = dequantize_int8(stack_int8(weights))

    assert torch.equal(stacked, torch.cat([dequantize_int8(weight) for weight in weights]))
    assert stack_int8(weights[:1]) is weights[0]


@pytest.mark.parametrize("weights", ON_CPUS)
def test_linear_of_a_quantized_weight_is_that_of_what_it_stands_for(weights: WeightFormat) -> None:
    generator = torch.Generator().manual_seed(3)
    quantized = quantize_int8(torch.randn(7, 33, generator=generator))
    hidden_NI = torch.randn(4, 33, generator=generator)
    bias_O = torch.randn(7, generator=generator)

    linear = make_linear(quantized, bias_O, weights, torch.float32)
    plain = make_linear(dequantize_int8(quantized), bias_O, weights, torch.float32)

    expected_NO = plain(hidden_NI, RowPrecision.TWO_DIGITS)
    torch.testing.assert_close(
        linear(hidden_NI, RowPrecision.TWO_DIGITS), expected_NO, rtol=0, atol=1e-4
    )
