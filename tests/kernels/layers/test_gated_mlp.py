"""silu(gate) * up in C, against its definition and bit by bit among itself."""

import pytest
import torch
from torch import Tensor

from shoal.kernels.layers.gated_mlp import gate_silu
from shoal.kernels.native.library import list_instruction_sets

needs_library = pytest.mark.skipif(
    not list_instruction_sets("gate"), reason="the native library was not built"
)


def draw_gate_up(num_rows: int, num_columns: int) -> Tensor:
    draw = torch.Generator().manual_seed(1)
    return torch.randn(num_rows, 2 * num_columns, generator=draw) * 8


def gate_by_definition(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.double().chunk(2, dim=-1)
    return gate / (1 + torch.exp(-gate)) * up


@pytest.mark.parametrize("num_columns", [1, 7, 16, 100, 2816])
@pytest.mark.parametrize("num_rows", [0, 1, 3, 20])
def test_result_is_that_of_the_definition(num_rows: int, num_columns: int) -> None:
    gate_up = draw_gate_up(num_rows, num_columns)

    result = gate_silu(gate_up)

    torch.testing.assert_close(result.double(), gate_by_definition(gate_up), rtol=1e-6, atol=1e-30)


def test_every_gate_within_reach_is_exact_to_the_seventh_digit() -> None:
    gates = torch.linspace(-86, 90, 200_001)
    gate_up = torch.stack([gates, torch.ones_like(gates)], dim=1)

    result = gate_silu(gate_up).double()

    torch.testing.assert_close(result, gate_by_definition(gate_up), rtol=5e-7, atol=0)


@needs_library
@pytest.mark.parametrize("num_columns", [1, 7, 33, 2816])
def test_every_instruction_set_and_batch_computes_the_same_bits(num_columns: int) -> None:
    gate_up = draw_gate_up(20, num_columns)
    expected = gate_silu(gate_up)

    for number in list_instruction_sets("gate").values():
        assert torch.equal(gate_silu(gate_up, number), expected)
    assert torch.equal(torch.cat([gate_silu(row) for row in gate_up.split(1)]), expected)


def test_numbers_that_are_not_finite_stay_visible() -> None:
    gates = torch.tensor([torch.nan, torch.inf, -torch.inf, 1.0, 1.0, -1000.0, 1000.0])
    ups = torch.tensor([1.0, 1.0, 1.0, torch.nan, torch.inf, 1.0, 1.0])

    result = gate_silu(torch.stack([gates, ups], dim=1))[:, 0]

    assert result[[0, 2, 3]].isnan().all()
    assert result[[1, 4]].isposinf().all()
    assert result[[5, 6]].tolist() == [0, 1000]


def test_other_dtypes_are_left_to_torch() -> None:
    assert gate_silu(draw_gate_up(2, 8).bfloat16()).dtype is torch.bfloat16


def turn_back(gate_up: Tensor, grads: Tensor, instruction_set: int | None = None) -> Tensor:
    leaf = gate_up.detach().requires_grad_()
    gate_silu(leaf, instruction_set).backward(grads)
    assert leaf.grad is not None
    return leaf.grad


def turn_back_by_definition(gate_up: Tensor, grads: Tensor) -> Tensor:
    leaf = gate_up.detach().double().requires_grad_()
    gate_by_definition(leaf).backward(grads.double())
    assert leaf.grad is not None
    return leaf.grad


@pytest.mark.parametrize("num_columns", [1, 7, 16, 100, 2816])
@pytest.mark.parametrize("num_rows", [0, 1, 3, 20])
def test_gradients_are_those_of_the_definition(num_rows: int, num_columns: int) -> None:
    gate_up, grads = draw_gate_up(num_rows, num_columns), draw_gate_up(num_rows, num_columns)
    grads = grads[:, num_columns:]

    result = turn_back(gate_up, grads)

    # Where the slope changes its sign, at a gate of -1.28, digits of large factors cancel.
    expected = turn_back_by_definition(gate_up, grads)
    torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=2e-5)


def test_gradients_of_every_gate_within_reach_are_exact_to_the_sixth_digit() -> None:
    gates = torch.linspace(-86, 90, 200_001)
    gate_up, grads = torch.stack([gates, torch.ones_like(gates)], dim=1), torch.ones(len(gates), 1)

    result = turn_back(gate_up, grads).double()

    expected = turn_back_by_definition(gate_up, grads)
    torch.testing.assert_close(result, expected, rtol=2e-6, atol=2e-8)


@needs_library
@pytest.mark.parametrize("num_columns", [1, 7, 33, 2816])
def test_every_instruction_set_and_batch_computes_the_same_gradients(num_columns: int) -> None:
    gate_up, grads = draw_gate_up(20, num_columns), draw_gate_up(20, num_columns)[:, :num_columns]
    expected = turn_back(gate_up, grads)

    for number in list_instruction_sets("gate").values():
        assert torch.equal(turn_back(gate_up, grads, number), expected)
    rows = zip(gate_up.split(1), grads.split(1), strict=True)
    assert torch.equal(torch.cat([turn_back(*row) for row in rows]), expected)
