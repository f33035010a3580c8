"""Exact sums: equal bits for every order and grouping, small errors, a clamp that is a function."""

import itertools
from collections.abc import Callable, Iterable

import pytest
import torch

from shoal.kernels.exact_sums import FIRST_EXPONENT, ExactSum, check_units, choose_exponent

SEED = 11


def make_gradients(count: int, size: float = 1e-4) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(SEED)
    scales = torch.logspace(-6, 0, count)
    return [size * scale * torch.randn(7, 13, generator=generator) for scale in scales]


def sum_up(gradients: list[torch.Tensor], exponent: int = FIRST_EXPONENT) -> ExactSum:
    total = ExactSum(gradients[0].shape, exponent, 16)
    for gradient in gradients:
        total.add(gradient)
    return total


def add_plainly(gradients: Iterable[torch.Tensor]) -> torch.Tensor:
    total, *others = gradients
    for other in others:
        total = total + other
    return total


def test_every_order_and_grouping_has_the_same_sum() -> None:
    gradients = make_gradients(5)
    whole = sum_up(gradients).read()

    for order in itertools.permutations(gradients):
        for cut in range(1, 5):
            left, right = sum_up(list(order[:cut])), sum_up(list(order[cut:]))
            left.merge(right.units, right.num_addends)
            assert torch.equal(left.read(), whole)


def test_plain_sums_depend_on_their_order() -> None:
    """Else the test before this one would show nothing."""
    gradients = make_gradients(5)

    sums = {add_plainly(order).numpy().tobytes() for order in itertools.permutations(gradients)}

    assert len(sums) > 1


def test_sum_is_that_of_float64_within_a_float32_rounding() -> None:
    gradients = make_gradients(16)
    expected = add_plainly([gradient.double() for gradient in gradients])
    exponent = choose_exponent(expected, FIRST_EXPONENT)

    error = (sum_up(gradients, exponent).read() - expected).norm() / expected.norm()

    assert error < 1e-7


def test_adding_leaves_the_gradient_as_it_was() -> None:
    (gradient,) = make_gradients(1)
    before = gradient.clone()

    sum_up([gradient])

    assert torch.equal(gradient, before)


@pytest.mark.parametrize("room", [1, 3, 6, 2**13])
def test_full_sum_of_huge_addends_is_within_the_bound_that_others_check(room: int) -> None:
    total = ExactSum(torch.Size([2]), FIRST_EXPONENT, room)
    for _ in range(room):
        total.add(torch.tensor([3e38, -3e38]))

    check_units(total.units, room, room)
    assert 2**51 <= total.units.abs().max() <= 2**52


def test_huge_addends_are_clamped_alike_in_every_order() -> None:
    huge = torch.tensor([3e38, -3e38, 1.0, 0.0])
    others = [torch.tensor([-1.0, 1.0, 1e-5, 1e-5])] * 15

    first, last = sum_up([huge, *others]), sum_up([*others, huge])

    assert torch.equal(first.units, last.units)
    assert first.units.abs().max() < 2**53
    assert first.read()[3] == pytest.approx(15e-5)


def test_subtracted_gradient_leaves_no_trace() -> None:
    one, huge, *others = make_gradients(5)
    huge = huge * 1e30
    expected = sum_up([one, *others])

    total = sum_up([huge, one, *others])
    total.subtract(huge)

    assert total.units.numpy().tobytes() == expected.units.numpy().tobytes()
    assert total.num_addends == 4


def test_reset_begins_another_sum_in_the_same_memory() -> None:
    gradients = make_gradients(3)
    total = sum_up(gradients)
    memory = total.units.data_ptr()

    total.reset(FIRST_EXPONENT - 3)
    total.add(gradients[0])

    assert total.units.data_ptr() == memory
    assert torch.equal(total.units, sum_up(gradients[:1], FIRST_EXPONENT - 3).units)
    assert (total.exponent, total.num_addends) == (FIRST_EXPONENT - 3, 1)


def test_loaded_sum_replaces_the_other_without_negative_zeros() -> None:
    total, other = sum_up(make_gradients(3)), sum_up(make_gradients(2))

    total.load(torch.where(other.units == 0, -0.0, other.units), 2)

    assert total.units.numpy().tobytes() == other.units.numpy().tobytes()
    assert total.num_addends == 2


@pytest.mark.parametrize(
    ("spoil", "num_addends", "complaint"),
    [
        (lambda units: units + 0.5, 1, "whole numbers"),
        (lambda units: units * float("inf"), 1, "at most"),
        (lambda units: units * float("nan"), 1, "at most"),
        (lambda units: units + 2.0**48 + 1, 1, "at most 281474976710656"),
        (lambda units: units[:-1], 1, r"must be float64 \[7, 13\], not torch.float64 \[6, 13\]"),
        (lambda units: units.long(), 1, "must be float64"),
        (lambda units: units, 15, "at most 16 gradients cannot have 17"),
        (lambda units: units, -1, "cannot have 1"),
        (lambda units: units, 0, "units of 0 gradients"),
    ],
)
def test_units_that_no_sum_has_are_refused(
    spoil: Callable[[torch.Tensor], torch.Tensor], num_addends: int, complaint: str
) -> None:
    total, (gradient,) = sum_up(make_gradients(2)), make_gradients(1)
    before = total.units.clone()

    with pytest.raises(ValueError, match=complaint):
        total.merge(spoil(sum_up([gradient]).units), num_addends)

    assert torch.equal(total.units, before)
    assert total.num_addends == 2


def test_pieces_of_sums_are_checked_alike() -> None:
    units = sum_up([torch.full((7, 13), 3e38)] * 16).units.flatten()

    check_units(units[3:9], 16, 16)
    with pytest.raises(ValueError, match="at most"):
        check_units(units[3:9], 15, 16)


@pytest.mark.parametrize(
    ("largest", "exponent"), [(1.0, 1), (0.75, 0), (0.5, 0), (2.0**-20, -19), (1e-38, -80)]
)
def test_exponent_covers_the_largest_number(largest: float, exponent: int) -> None:
    total = torch.tensor([largest / 3, -largest])

    assert choose_exponent(total, 5) == exponent


def test_exponent_stays_where_everything_is_zero() -> None:
    assert choose_exponent(torch.zeros(3), 5) == 5
