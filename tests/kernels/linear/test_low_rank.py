"""What adapters add, in C and in torch, against its definition and bit by bit among itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.kernels.linear.low_rank import add_low_rank, add_low_rank_in_torch
from shoal.kernels.native.library import list_instruction_sets

SHAPES = [(1, 64, 8, 32), (3, 7, 3, 5), (4, 200, 256, 131), (70, 33, 17, 40)]
"""Rows, inputs, rank and outputs."""

needs_library = pytest.mark.skipif(
    not list_instruction_sets("low_rank"), reason="the native library was not built"
)


def draw(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def compute_by_definition(hidden: Tensor, down: Tensor, up: Tensor, order: Tensor | None) -> Tensor:
    up = up if order is None else up[order]
    return hidden.double() @ down.double().t() @ up.double().t() * 0.5


@pytest.mark.parametrize("add", [add_low_rank, add_low_rank_in_torch])
@pytest.mark.parametrize("is_ordered", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_result_is_that_of_the_definition(
    shape: tuple[int, int, int, int], dtype: torch.dtype, is_ordered: bool, add: Callable[..., None]
) -> None:
    num_rows, num_inputs, rank, num_outputs = shape
    hidden = draw(num_rows, num_inputs)
    down, up = draw(rank, num_inputs, seed=2).to(dtype), draw(num_outputs, rank, seed=3).to(dtype)
    order = torch.arange(num_outputs).flip(0) if is_ordered else None
    before = draw(num_rows, num_outputs + 5, seed=4)
    target = before.clone()

    add(hidden, down, up, 0.5, target[:, 2:-3], order)

    expected = before.double()
    expected[:, 2:-3] += compute_by_definition(hidden, down, up, order)
    torch.testing.assert_close(target.double(), expected, rtol=1e-4, atol=1e-3)
    assert torch.equal(target[:, :2], before[:, :2])
    assert torch.equal(target[:, -3:], before[:, -3:])


@needs_library
@pytest.mark.parametrize("shape", SHAPES)
def test_every_instruction_set_and_batch_computes_the_same_bits(
    shape: tuple[int, int, int, int],
) -> None:
    num_rows, num_inputs, rank, num_outputs = shape
    hidden, down, up = (
        draw(num_rows, num_inputs),
        draw(rank, num_inputs, seed=2),
        draw(num_outputs, rank, seed=3),
    )

    def compute(rows: Tensor, number: int | None = None) -> Tensor:
        target = torch.zeros(len(rows), num_outputs)
        add_low_rank(rows, down, up, 0.5, target, instruction_set=number)
        return target

    expected = compute(hidden)
    for number in list_instruction_sets("low_rank").values():
        assert torch.equal(compute(hidden, number), expected)
    for size in (1, 2, 3):
        assert torch.equal(torch.cat([compute(rows) for rows in hidden.split(size)]), expected)


@needs_library
def test_matrices_that_do_not_fit_are_not_touched() -> None:
    """Addresses are all that C gets to see."""
    fitting: dict[str, Any] = {
        "hidden_NI": draw(2, 8),
        "down_RI": draw(4, 8),
        "up_OR": draw(6, 4),
        "target_NO": draw(2, 6),
        "scale": 1.0,
    }

    add_low_rank(**fitting)
    for wrong in (
        {"down_RI": draw(4, 7)},
        {"down_RI": draw(8, 4).t()},
        {"up_OR": draw(5, 4)},
        {"target_NO": draw(3, 6)},
        {"target_NO": draw(6, 2).t()},
        {"order_O": torch.arange(5)},
    ):
        with pytest.raises(ValueError, match="do not fit"):
            add_low_rank(**{**fitting, **wrong})
