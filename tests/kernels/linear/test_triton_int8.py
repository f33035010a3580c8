"""The int8 kernel in Triton: the bits of the reference, and so of every kernel on the CPU."""

import kernel_reference as reference
import pytest
import torch
from kernel_reference import assert_same_bits, make_int8_weight, make_rows
from torch import Tensor
from triton_devices import every_device, needs_device

from shoal.kernels.linear import triton_int8
from shoal.kernels.linear.linear import RowPrecision
from shoal.kernels.linear.quantize import (
    MAX_COLUMNS,
    Int8Product,
    Int8Weight,
    WeightFormat,
    quantize_int8,
)
from shoal.kernels.linear.select import choose_int8_kernel, make_linear

pytestmark = pytest.mark.slow  # the interpreter is

# One row, a row beside others, and more than one tile of them. Each row takes the interpreter 5 ms.
NUMBERS_OF_ROWS = [1, 2, 9, 37]
every_num_digits = pytest.mark.parametrize("num_digits", [1, 2])


def pack(weight: Int8Weight, bias_O: Tensor | None, device: str) -> Int8Product:
    moved = Int8Weight(weight.values_OI.to(device), weight.scales_O.to(device))
    return triton_int8.make_kernel().pack(moved, None if bias_O is None else bias_O.to(device))


@every_device
def test_transposed_weights_have_the_bits_of_the_reference(device: str) -> None:
    weight = make_int8_weight(70, 100)
    gradients = make_rows(5, 67)

    product = pack(weight, torch.ones(100), device).transpose(32, 99)

    values_IO = weight.values_OI[32:99].t().contiguous()
    expected = reference.linear_int8(gradients, Int8Weight(values_IO, torch.ones(70)), None, 2)
    assert_same_bits(product.multiply(gradients.to(device), 2), expected)


@every_device
@every_num_digits
@pytest.mark.parametrize(
    ("in_features", "out_features", "dtype", "num_rows"),
    [
        *((259, 70, torch.float32, num_rows) for num_rows in NUMBERS_OF_ROWS),
        (1, 1, torch.float32, 2),
        (1100, 40, torch.bfloat16, 9),
        (128, 33, torch.float16, 9),
    ],
)
def test_kernel_computes_the_bits_of_the_reference(
    in_features: int, out_features: int, dtype: torch.dtype, num_rows: int, num_digits: int,
    device: str,
) -> None:  # fmt: skip
    weight = make_int8_weight(in_features, out_features)
    bias = torch.linspace(-1, 1, out_features)
    hidden = make_rows(num_rows, in_features).to(dtype)

    result = pack(weight, bias, device).multiply(hidden.to(device), num_digits)

    assert_same_bits(result, reference.linear_int8(hidden, weight, bias, num_digits).to(dtype))


ONCE = [
    *(((1100, 70), num_rows, 1) for num_rows in (1, 8, 32, 33)),
    *(((300, 610), num_rows, 1) for num_rows in (1, 8, 32, 33)),
    ((1100, 70), 129, 2),
]
"""Of each tile the case with the least work: shape, rows, digits."""

ALL_TILES = [
    (shape, num_rows, num_digits)
    for shape in ((1100, 70), (300, 610))
    for num_rows in (1, 8, 16, 32, 33, 129)
    for num_digits in (1, 2)
]


@every_device
@pytest.mark.parametrize(
    ("shape", "num_rows", "num_digits"),
    [pytest.param(*case, marks=[pytest.mark.thorough] * (case not in ONCE)) for case in ALL_TILES],
)
def test_every_tile_computes_the_same_bits(
    shape: tuple[int, int], num_rows: int, num_digits: int, device: str
) -> None:
    weight = make_int8_weight(*shape)
    hidden = make_rows(num_rows, shape[0])

    result = pack(weight, None, device).multiply(hidden.to(device), num_digits)

    expected = choose_int8_kernel("cpu").pack(weight, None).multiply(hidden, num_digits)
    assert_same_bits(result, expected)


def test_numbers_of_rows_choose_among_all_tiles() -> None:
    chosen = {
        triton_int8.choose_tile(num_rows, num_digits, *shape)
        for shape, num_rows, num_digits in ONCE
    }

    few = [tile for tiles in triton_int8.FEW_ROWS_TILES.values() for tile in tiles]
    assert chosen == {*triton_int8.ROW_TILES, *few, triton_int8.MANY_ROWS_TILE}


@every_device
def test_row_has_the_same_bits_alone_and_in_every_batch(device: str) -> None:
    hidden = make_rows(70, 130).to(device)
    product = pack(make_int8_weight(130, 40), None, device)

    together = product.multiply(hidden, 2)

    for start, stop in [(0, 1), (69, 70), (3, 5), (10, 26), (50, 70)]:
        assert_same_bits(product.multiply(hidden[start:stop], 2), together[start:stop])


@every_device
@pytest.mark.parametrize("num_rows", [1, 3])
def test_largest_sums_are_exact(num_rows: int, device: str) -> None:
    # Every product has its largest magnitude, and one is a little less, which must not be lost.
    values = torch.full((2, MAX_COLUMNS), -128, dtype=torch.int8)
    values[1, -1] = -127
    weight = Int8Weight(values, torch.ones(2))
    hidden = torch.ones(num_rows, MAX_COLUMNS)

    result = pack(weight, None, device).multiply(hidden.to(device), 2)

    assert_same_bits(result, reference.linear_int8(hidden, weight, None, 2))


@every_device
def test_halves_are_rounded_to_even(device: str) -> None:
    identity = Int8Weight(torch.eye(6, dtype=torch.int8), torch.ones(6))
    hidden = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5]])

    result = pack(identity, None, device).multiply(hidden.to(device), 1)

    assert result.tolist() == [[127.0, 0.0, 2.0, 2.0, 0.0, -2.0]]


@every_device
@pytest.mark.parametrize("num_rows", NUMBERS_OF_ROWS)
def test_rough_product_says_how_rough_each_row_is(num_rows: int, device: str) -> None:
    weight = make_int8_weight(1100, 40)
    hidden = make_rows(num_rows, 1100)
    hidden[-1, 3] = 1e4

    result, squares = pack(weight, None, device).multiply_roughly(hidden.to(device))
    expected, expected_squares = (
        choose_int8_kernel("cpu").pack(weight, None).multiply_roughly(hidden)
    )

    assert_same_bits(result, expected)
    assert_same_bits(squares, expected_squares)


@every_device
@every_num_digits
@pytest.mark.parametrize("num_rows", [2, 5])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_numbers_that_are_not_finite_show_in_their_row_alone(
    value: float, num_rows: int, num_digits: int, device: str
) -> None:
    hidden = make_rows(num_rows, 130)
    product = pack(make_int8_weight(130, 40), None, device)
    clean = product.multiply(hidden.to(device), num_digits)
    hidden[1, 77] = value

    result = product.multiply(hidden.to(device), num_digits)

    assert result[1].isnan().all()
    others = torch.arange(num_rows) != 1
    assert_same_bits(result[others], clean[others])


@every_device
@every_num_digits
@pytest.mark.parametrize("smallest", [0.0, 1e-40])
def test_rows_of_next_to_nothing_become_the_bias(
    smallest: float, num_digits: int, device: str
) -> None:
    bias = torch.linspace(-1, 1, 40)
    product = pack(make_int8_weight(20, 40), bias, device)

    result = product.multiply(torch.full((3, 20), smallest, device=device), num_digits)

    assert_same_bits(result, bias.expand(3, 40))
    assert product.multiply(torch.zeros(0, 20, device=device), num_digits).shape == (0, 40)


@every_device
def test_rows_need_not_be_contiguous(device: str) -> None:
    hidden = make_rows(24, 6).to(device)
    product = pack(make_int8_weight(24, 40), None, device)

    assert_same_bits(product.multiply(hidden.t(), 2), product.multiply(hidden.t().contiguous(), 2))


@every_device
def test_rows_of_another_length_are_refused(device: str) -> None:
    product = pack(make_int8_weight(20, 40), None, device)

    with pytest.raises(ValueError, match="rows of 21 numbers for 20 columns"):
        product.multiply(torch.zeros(1, 21, device=device), 2)


@every_device
def test_product_counts_its_bytes(device: str) -> None:
    assert pack(make_int8_weight(20, 40), torch.zeros(40), device).num_bytes == 20 * 40 + 2 * 40 * 4


@pytest.mark.gpu
@needs_device
@pytest.mark.parametrize("precision", list(RowPrecision))
def test_linear_on_a_device_has_the_bits_of_the_cpu(precision: RowPrecision) -> None:
    weight = quantize_int8(torch.randn(96, 130, generator=torch.Generator().manual_seed(7)))
    moved = Int8Weight(weight.values_OI.cuda(), weight.scales_O.cuda())
    hidden = make_rows(9, 130)
    hidden[-1, 3] = 1e6  # too rough for one digit

    there = make_linear(moved, None, WeightFormat.INT8, torch.float32)(hidden.cuda(), precision)
    here = make_linear(weight, None, WeightFormat.INT8, torch.float32)(hidden, precision)

    assert_same_bits(there, here)
