"""Norms and gates in Triton: torch's numbers, and the digits that an int8 product makes of them."""

import pytest
import torch
import torch.nn.functional as F
from kernel_reference import assert_same_bits, make_int8_weight, round_row
from torch import Tensor
from triton_devices import every_device

from shoal.kernels.layers.activations import gelu_tanh
from shoal.kernels.layers.gated_mlp import gate
from shoal.kernels.layers.norm import Norm, NormKind
from shoal.kernels.layers.triton_rows import TritonRows
from shoal.kernels.linear import triton_int8
from shoal.kernels.linear.linear import Int8Linear, RowPrecision, get_values
from shoal.kernels.linear.quantize import Int8Weight, RoundedRows, Rows

every_width = pytest.mark.parametrize("width", [1, 33, 130, 4100])


def draw(*shape: int, seed: int = 4) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3


def make_norm(width: int, kind: NormKind, has_bias: bool, device: str) -> Norm:
    bias = draw(width, seed=6) if has_bias else None
    return Norm(kind, draw(width, seed=5), bias, 1e-5).to(torch.device(device))


def check_digits(rows: Rows) -> None:
    """The digits are those of the values."""
    assert isinstance(rows, RoundedRows)
    for values, (high, low), step in zip(
        rows.values_NI.cpu(), rows.digits_NCI.cpu().long(), rows.steps_N.cpu(), strict=True
    ):
        whole, expected = round_row(values, 2)
        assert torch.equal(high * 256 + low, whole)
        assert step == expected


@every_device
@every_width
@pytest.mark.parametrize(
    ("kind", "has_bias"), [(NormKind.RMS, False), (NormKind.LAYER, False), (NormKind.LAYER, True)]
)
def test_norm_is_that_of_torch_and_is_rounded(
    width: int, kind: NormKind, has_bias: bool, device: str
) -> None:
    hidden = draw(3, width).to(device)
    norm = make_norm(width, kind, has_bias, device)

    rows = TritonRows().norm(norm, hidden)

    torch.testing.assert_close(get_values(rows), norm(hidden), rtol=2e-6, atol=2e-6)
    check_digits(rows)


@every_device
@every_width
@pytest.mark.parametrize("activation", [F.silu, gelu_tanh])
def test_gate_is_that_of_torch_and_is_rounded(width: int, activation: object, device: str) -> None:
    gate_up = draw(3, 2 * width).to(device)
    gate_up[1, :width] *= 40  # where powers would overflow

    rows = TritonRows().gate(activation, gate_up)  # type: ignore[arg-type]

    expected = gate(activation, gate_up)  # type: ignore[arg-type]
    torch.testing.assert_close(get_values(rows), expected, rtol=1e-5, atol=1e-5)
    check_digits(rows)


@every_device
def test_activations_without_a_program_are_left_to_torch(device: str) -> None:
    gate_up = draw(3, 20).to(device)

    rows = TritonRows().gate(F.gelu, gate_up)

    assert isinstance(rows, Tensor)
    assert torch.equal(rows, gate(F.gelu, gate_up))


@every_device
def test_rows_that_need_a_gradient_are_left_to_torch(device: str) -> None:
    hidden = draw(3, 20).to(device).requires_grad_()

    rows = TritonRows().norm(make_norm(20, NormKind.RMS, False, device), hidden)

    assert isinstance(rows, Tensor)
    assert rows.requires_grad


@every_device
def test_row_has_the_same_bits_alone_and_in_every_batch(device: str) -> None:
    hidden = draw(9, 130).to(device)
    norm = make_norm(130, NormKind.RMS, False, device)

    together = TritonRows().norm(norm, hidden)

    assert isinstance(together, RoundedRows)
    for start, stop in [(0, 1), (3, 5), (8, 9)]:
        alone = TritonRows().norm(norm, hidden[start:stop])
        assert isinstance(alone, RoundedRows)
        assert torch.equal(alone.values_NI, together[start:stop].values_NI)
        assert torch.equal(alone.digits_NCI, together[start:stop].digits_NCI)


@every_device
def test_numbers_that_are_not_finite_show_in_their_row_alone(device: str) -> None:
    gate_up = draw(3, 40).to(device)
    gate_up[1, 5] = torch.nan
    linear = make_linear(20, 33, device)

    result = linear.multiply_and_add(
        TritonRows().gate(F.silu, gate_up), RowPrecision.TWO_DIGITS, None
    )

    assert result.isnan().all(dim=1).tolist() == [False, True, False]


@every_device
def test_no_rows_are_no_rows(device: str) -> None:
    rows = TritonRows().norm(make_norm(20, NormKind.RMS, False, device), draw(0, 20).to(device))

    assert get_values(rows).shape == (0, 20)


def make_linear(num_inputs: int, num_outputs: int, device: str) -> Int8Linear:
    weight = make_int8_weight(num_inputs, num_outputs)
    moved = Int8Weight(weight.values_OI.to(device), weight.scales_O.to(device))
    bias = torch.linspace(-1, 1, num_outputs).to(device)
    return Int8Linear(moved, bias, triton_int8.make_kernel())


@every_device
@pytest.mark.parametrize("precision", RowPrecision)
@pytest.mark.parametrize("is_rounded", [False, True])
@pytest.mark.parametrize("num_rows", [0, 1, 9])
def test_product_of_such_rows_is_added_to_others(
    num_rows: int, is_rounded: bool, precision: RowPrecision, device: str
) -> None:
    rows: Rows = draw(num_rows, 130).to(device)
    if is_rounded:
        rows = TritonRows().norm(make_norm(130, NormKind.RMS, False, device), rows)
    added = draw(num_rows, 40, seed=7).to(device)
    linear = make_linear(130, 40, device)

    result = linear.multiply_and_add(rows, precision, added)

    expected = linear(get_values(rows), precision)
    assert_same_bits(linear.multiply_and_add(rows, precision, None), expected)
    assert_same_bits(result, added + expected)
