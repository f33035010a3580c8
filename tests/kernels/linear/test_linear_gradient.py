"""Gradients of linears with respect to their input, for every format of the weights."""

import pytest
import torch
from torch import Tensor

from shoal.kernels.linear import linear as linear_module
from shoal.kernels.linear.linear import GradientLinears, Linear, RowPrecision
from shoal.kernels.linear.quantize import WeightFormat, dequantize_int8, quantize_int8
from shoal.kernels.linear.select import make_linear
from shoal.kernels.pauses import NO_PAUSES, Pauses

FORMATS = [
    (WeightFormat.FP32, torch.float32, 1e-6),
    (WeightFormat.BF16, torch.bfloat16, 5e-3),
    (WeightFormat.BF16, torch.float32, 5e-3),
    (WeightFormat.INT8, torch.float32, 5e-5),
]
"""Weights, activations, and how far a gradient may be from the exact one, by length."""


def draw(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def differentiate(
    run: GradientLinears, linear: Linear, hidden: Tensor, grads: Tensor
) -> tuple[Tensor, Tensor]:
    hidden = hidden.clone().requires_grad_()
    output = run(linear, hidden, RowPrecision.ONE_DIGIT)
    return output.detach(), torch.autograd.grad(output, hidden, grads)[0]


def make_stored(weights: WeightFormat, weight: Tensor) -> Tensor:
    """Return the weights that a linear of this format multiplies with."""
    if weights is WeightFormat.INT8:
        return dequantize_int8(quantize_int8(weight))
    return weight.to(torch.bfloat16).float() if weights is WeightFormat.BF16 else weight


@pytest.mark.parametrize(("weights", "dtype", "tolerance"), FORMATS)
@pytest.mark.parametrize("max_cost", [1, 10**6, 2**62])
@pytest.mark.parametrize(("in_features", "out_features"), [(70, 33), (64, 300), (1, 1)])
def test_gradient_is_that_of_the_stored_weights(
    in_features: int,
    out_features: int,
    max_cost: int,
    weights: WeightFormat,
    dtype: torch.dtype,
    tolerance: float,
) -> None:
    weight, bias = 0.1 * draw(out_features, in_features), draw(out_features, seed=2)
    linear = make_linear(weight, bias, weights, dtype)
    hidden, grads = draw(67, in_features).to(dtype), draw(67, out_features, seed=3).to(dtype)
    run = GradientLinears(Pauses(lambda: None, max_cost), is_keeping=True)

    output, found = differentiate(run, linear, hidden, grads)

    expected = grads.double() @ make_stored(weights, weight).double()
    assert found.dtype is output.dtype is dtype
    assert float((found.double() - expected).norm() / expected.norm()) < tolerance
    whole = linear(hidden, RowPrecision.ONE_DIGIT)
    torch.testing.assert_close(output, whole, rtol=2 * tolerance, atol=tolerance)
    if weights is WeightFormat.INT8:
        assert torch.equal(output, whole)


def test_int8_gradient_of_a_row_does_not_depend_on_its_company() -> None:
    linear = make_linear(draw(96, 72), None, WeightFormat.INT8, torch.float32)
    grads = draw(40, 96, seed=4) * torch.logspace(-8, 2, 40)[:, None]
    gradient = linear.open_gradient()

    together = gradient(grads, Pauses(lambda: None, 1))
    alone = torch.cat([gradient(row[None], NO_PAUSES) for row in grads])

    assert torch.equal(together, alone)


def test_weights_with_more_outputs_than_int8_sums_hold_are_taken_in_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    linear = make_linear(draw(100, 40), None, WeightFormat.INT8, torch.float32)
    grads = draw(5, 100, seed=4)
    expected = linear.open_gradient()(grads, NO_PAUSES)
    monkeypatch.setattr(linear_module, "MAX_COLUMNS", 70)  # parts of 64 and 36

    result = linear.open_gradient()(grads, NO_PAUSES)

    assert float((result - expected).norm() / expected.norm()) < 1e-4


@pytest.mark.parametrize(("weights", "dtype", "tolerance"), FORMATS)
def test_others_get_their_turn_between_pieces_in_both_directions(
    weights: WeightFormat, dtype: torch.dtype, tolerance: float
) -> None:
    turns: list[int] = []
    linear = make_linear(draw(300, 64), None, weights, dtype)
    run = GradientLinears(Pauses(lambda: turns.append(1), 300 * 64 * 32), is_keeping=False)
    hidden = draw(128, 64).to(dtype).requires_grad_()

    output = run(linear, hidden, RowPrecision.ONE_DIGIT)
    forth = len(turns)
    output.backward(torch.ones_like(output))

    assert forth >= 4
    assert len(turns) - forth >= 4


def test_what_a_gradient_needs_is_made_once_where_it_is_kept() -> None:
    linear = make_linear(draw(40, 24), None, WeightFormat.INT8, torch.float32)

    keeping = GradientLinears(NO_PAUSES, is_keeping=True)
    fleeting = GradientLinears(NO_PAUSES, is_keeping=False)

    assert keeping.open_gradient(linear) is keeping.open_gradient(linear)
    assert fleeting.open_gradient(linear) is not fleeting.open_gradient(linear)
