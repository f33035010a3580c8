"""Rows of which a few numbers are far larger than the others keep the precision of those."""

import kernel_reference as reference
import pytest
import torch
from torch import Tensor

from shoal.kernels.linear.linear import MAX_ROUNDING_ERROR, RowPrecision
from shoal.kernels.linear.quantize import Int8Kernel, WeightFormat, quantize_int8
from shoal.kernels.linear.select import list_int8_kernels, make_linear

KERNELS = list_int8_kernels()
SIZE, NUM_OUTPUTS = 1024, 96


def draw(seed: int, num_rows: int, num_columns: int = SIZE) -> Tensor:
    return torch.randn(num_rows, num_columns, generator=torch.Generator().manual_seed(seed))


def plant_outliers(hidden_NI: Tensor, factor: float, num_columns: int = 2) -> Tensor:
    """Return rows with a few columns that are larger in all of them, as real models have."""
    hidden_NI = hidden_NI.clone()
    hidden_NI[:, 5 : 5 + num_columns] = factor
    return hidden_NI


def compute_error(result_NO: Tensor, expected_NO: Tensor, without_outliers_NO: Tensor) -> float:
    """Return the error against what the ordinary columns contribute."""
    return float((result_NO.double() - expected_NO).norm() / without_outliers_NO.norm())


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("num_columns", [1, 7, 64, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_roughness_is_that_of_the_reference(
    num_columns: int, dtype: torch.dtype, kernel: Int8Kernel
) -> None:
    hidden_NI = plant_outliers(draw(1, 9, num_columns), 50.0).to(dtype)
    hidden_NI[3] = 0
    product = kernel.pack(quantize_int8(draw(2, 40, num_columns)), None)

    result_NO, squares_N = product.multiply_roughly(hidden_NI)

    expected_N = [int(reference.round_row(row, 1)[0].square().sum()) for row in hidden_NI]
    assert squares_N.tolist() == expected_N
    assert torch.equal(result_NO, product.multiply(hidden_NI, 1))


@pytest.mark.parametrize("factor", [30.0, 300.0])
def test_planted_outliers_do_not_drown_the_other_columns(factor: float) -> None:
    ordinary_NI, weight_OI = draw(1, 64), draw(2, NUM_OUTPUTS) * 0.05
    hidden_NI = plant_outliers(ordinary_NI, factor)
    quantized = quantize_int8(weight_OI)
    expected_NO = reference.linear_unrounded(hidden_NI, quantized, None)
    rest_NO = reference.linear_unrounded(plant_outliers(ordinary_NI, 0.0), quantized, None)
    plain_NO = reference.linear_int8(hidden_NI, quantized, None, num_digits=1)

    linear = make_linear(weight_OI, None, WeightFormat.INT8, torch.float32)
    result_NO = linear(hidden_NI, RowPrecision.ONE_DIGIT)

    assert compute_error(plain_NO, expected_NO, rest_NO) > 0.06, "plain int8 fails its bound"
    assert compute_error(result_NO, expected_NO, rest_NO) < 0.01


def test_ordinary_rows_keep_one_digit_beside_rough_ones() -> None:
    rows = [draw(seed, 1) for seed in range(6)]
    rows[2], rows[5] = plant_outliers(rows[2], 100.0), plant_outliers(rows[5], 300.0)
    weight_OI = draw(9, NUM_OUTPUTS)
    linear = make_linear(weight_OI, None, WeightFormat.INT8, torch.float32)

    result_NO = linear(torch.cat(rows), RowPrecision.ONE_DIGIT)

    for index, row in enumerate(rows):
        num_digits = 2 if index in (2, 5) else 1
        expected_NO = reference.linear_int8(row, quantize_int8(weight_OI), None, num_digits)
        assert torch.equal(result_NO[index : index + 1], expected_NO)
        assert torch.equal(linear(row, RowPrecision.ONE_DIGIT), expected_NO), "alone"


@pytest.mark.parametrize("gate", [False, True], ids=["normal", "gated"])
def test_ordinary_rows_are_not_rough(gate: bool) -> None:
    """Or prompts would cost twice as much."""
    hidden_NI = draw(1, 256, 2816)
    if gate:
        hidden_NI = torch.nn.functional.silu(hidden_NI) * draw(2, 256, 2816)

    numbers_NI = torch.stack([reference.round_row(row, 1)[0] for row in hidden_NI]).double()
    error_N = (1 / 12 / numbers_NI.square().mean(dim=1)).sqrt()

    assert (error_N > MAX_ROUNDING_ERROR).double().mean() < 0.01
