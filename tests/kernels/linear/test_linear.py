"""Linear layers against the reference: formats, paths, odd shapes and independent rows."""

import kernel_reference as reference
import pytest
import torch
from torch import Tensor

from shoal.kernels.linear.linear import RowPrecision
from shoal.kernels.linear.quantize import WeightFormat, quantize_int8
from shoal.kernels.linear.select import make_linear

SHAPES = [(33, 7), (1, 1), (256, 96)]  # (in, out)
ROWS = [1, 5, 40]
DTYPES = [torch.float32, torch.bfloat16]


def make_case(
    num_rows: int, in_features: int, out_features: int, dtype: torch.dtype, seed: int = 3
) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    hidden = torch.randn(num_rows, in_features, generator=draw).to(dtype)
    weight = torch.randn(out_features, in_features, generator=draw) * 0.05
    bias = torch.randn(out_features, generator=draw).to(dtype)
    return hidden, weight, bias


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("precision", list(RowPrecision))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize(("in_features", "out_features"), SHAPES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_int8_matches_the_reference(
    in_features: int,
    out_features: int,
    num_rows: int,
    dtype: torch.dtype,
    with_bias: bool,
    precision: RowPrecision,
) -> None:
    hidden, weight, bias = make_case(num_rows, in_features, out_features, dtype)
    linear = make_linear(weight, bias if with_bias else None, WeightFormat.INT8, dtype)

    result = linear(hidden, precision)

    quantized = quantize_int8(weight)
    expected = reference.linear_int8(
        hidden, quantized, bias if with_bias else None, precision.value
    )
    assert result.shape == (num_rows, out_features)
    assert result.dtype is dtype
    assert torch.equal(result, expected.to(dtype))


@pytest.mark.parametrize("precision", list(RowPrecision))
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_int8_keeps_a_non_finite_row_visible_and_apart(
    value: float, precision: RowPrecision
) -> None:
    hidden, weight, _ = make_case(3, 24, 40, torch.float32)
    linear = make_linear(weight, None, WeightFormat.INT8, torch.float32)
    clean = linear(hidden, precision)
    hidden[1, 5] = value

    result = linear(hidden, precision)

    assert not bool(result[1].isfinite().any())
    assert torch.equal(result[[0, 2]], clean[[0, 2]])


@pytest.mark.parametrize("precision", list(RowPrecision))
@pytest.mark.parametrize("dtype", DTYPES)
def test_int8_maps_zero_rows_to_the_bias(dtype: torch.dtype, precision: RowPrecision) -> None:
    _, weight, bias = make_case(1, 24, 40, dtype)
    linear = make_linear(weight, bias, WeightFormat.INT8, dtype)

    assert torch.equal(linear(torch.zeros(2, 24, dtype=dtype), precision), bias.expand(2, 40))
    assert linear(torch.zeros(0, 24, dtype=dtype), precision).shape == (0, 40)


@pytest.mark.parametrize("precision", list(RowPrecision))
def test_int8_refuses_to_pretend_a_gradient(precision: RowPrecision) -> None:
    hidden, weight, _ = make_case(2, 24, 40, torch.float32)
    linear = make_linear(weight, None, WeightFormat.INT8, torch.float32)
    hidden.requires_grad_()

    with pytest.raises(ValueError, match="no backward"):
        linear(hidden, precision)
    with torch.no_grad():
        assert linear(hidden, precision).shape == (2, 40)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
@pytest.mark.parametrize("weights", [WeightFormat.BF16, WeightFormat.FP32])
@pytest.mark.parametrize("precision", list(RowPrecision))
def test_float_formats_match_the_plain_product(
    weights: WeightFormat, dtype: torch.dtype, precision: RowPrecision
) -> None:
    hidden, weight, bias = make_case(5, 33, 40, dtype)
    linear = make_linear(weight, bias, weights, dtype)

    result = linear(hidden, precision)

    expected = hidden.double() @ weight.double().t() + bias.double()
    exact = weights is WeightFormat.FP32 and dtype is torch.float32
    assert result.dtype is dtype
    assert relative_error(result, expected) < (1e-6 if exact else 0.01)


def test_float_linear_does_not_share_the_callers_memory() -> None:
    hidden, weight, bias = make_case(2, 8, 8, torch.float32)
    linear = make_linear(weight, bias, WeightFormat.FP32, torch.float32)
    before = linear(hidden, RowPrecision.TWO_DIGITS)

    weight.zero_()
    bias.zero_()

    assert torch.equal(linear(hidden, RowPrecision.TWO_DIGITS), before)


@pytest.mark.parametrize(
    ("weights", "low", "high"),
    [(WeightFormat.INT8, 1.0, 1.05), (WeightFormat.BF16, 2.0, 2.0), (WeightFormat.FP32, 4.0, 4.0)],
)
def test_linear_counts_its_bytes(weights: WeightFormat, low: float, high: float) -> None:
    linear = make_linear(torch.ones(1024, 1024), None, weights, torch.float32)

    assert (linear.in_features, linear.out_features) == (1024, 1024)
    assert low <= linear.num_bytes / (1024 * 1024) <= high


def test_linear_counts_its_bias() -> None:
    linear = make_linear(torch.ones(40, 24), torch.ones(40), WeightFormat.FP32, torch.bfloat16)

    assert linear.num_bytes == 40 * 24 * 4 + 40 * 2


def test_make_linear_refuses_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="matrix"):
        make_linear(torch.ones(4), None, WeightFormat.FP32, torch.float32)
    with pytest.raises(ValueError, match="bias"):
        make_linear(torch.ones(4, 3), torch.ones(3), WeightFormat.INT8, torch.float32)
    with pytest.raises(ValueError, match="floating point"):
        make_linear(torch.ones(4, 3), None, WeightFormat.INT8, torch.int8)
    with pytest.raises(ValueError, match="columns"):
        make_linear(torch.ones(1, 2**16 + 1), None, WeightFormat.INT8, torch.float32)
    with pytest.raises(ValueError, match="NaN"):
        make_linear(torch.full((4, 3), float("nan")), None, WeightFormat.INT8, torch.float32)
