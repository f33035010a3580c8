"""The int8 kernels: every one against the reference and so against each other, bit by bit.

Each test runs on every instruction set of this processor and in torch. Where the extension was
not built, the kernel in torch remains, and the tests of native code alone say that they skip.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import kernel_reference as reference
import pytest
import torch
import warm_python
from kernel_reference import assert_same_bits, make_int8_weight, make_rows

from shoal.kernels.linear import native_int8
from shoal.kernels.linear.quantize import MAX_COLUMNS, Int8Kernel, Int8Weight
from shoal.kernels.linear.select import choose_int8_kernel, list_int8_kernels

ROOT = Path(__file__).resolve().parents[3]
SHAPES = [(1, 1), (1, 31), (3, 33), (64, 32), (259, 70), (1100, 40)]  # (in, out)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]

every_kernel = pytest.mark.parametrize(
    "kernel", list_int8_kernels(), ids=lambda kernel: kernel.name.removeprefix("int8: ")
)
every_num_digits = pytest.mark.parametrize("num_digits", [1, 2])


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@every_kernel
@every_num_digits
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("in_features", "out_features"), SHAPES)
def test_kernel_computes_the_bits_of_the_reference(
    in_features: int, out_features: int, dtype: torch.dtype, num_digits: int, kernel: Int8Kernel
) -> None:
    weight = make_int8_weight(in_features, out_features)
    bias = torch.linspace(-1, 1, out_features)
    hidden = make_rows(7, in_features).to(dtype)

    result = kernel.pack(weight, bias).multiply(hidden, num_digits)

    assert_same_bits(result, reference.linear_int8(hidden, weight, bias, num_digits).to(dtype))


@every_kernel
@every_num_digits
def test_row_has_the_same_bits_alone_and_in_every_batch(
    num_digits: int, kernel: Int8Kernel
) -> None:
    hidden = make_rows(41, 130)
    product = kernel.pack(make_int8_weight(130, 70), None)
    alone = torch.cat([product.multiply(row[None], num_digits) for row in hidden])

    for num_rows in range(len(hidden) + 1):
        assert_same_bits(product.multiply(hidden[:num_rows], num_digits), alone[:num_rows])


@every_kernel
@every_num_digits
@pytest.mark.parametrize("num_rows", [1, 5, 40])
def test_threads_do_not_change_a_bit(
    num_rows: int, num_digits: int, kernel: Int8Kernel, two_threads: None
) -> None:
    product = kernel.pack(make_int8_weight(512, 700), None)
    hidden = make_rows(num_rows, 512)

    on_two = [product.multiply(hidden, num_digits) for _ in range(20)]
    torch.set_num_threads(1)

    expected = product.multiply(hidden, num_digits)
    for result in on_two:
        assert_same_bits(result, expected)


@every_kernel
def test_callers_on_several_threads_do_not_disturb_each_other(
    kernel: Int8Kernel, two_threads: None
) -> None:
    product = kernel.pack(make_int8_weight(256, 320), None)
    batches = [make_rows(num_rows, 256, seed=num_rows) for num_rows in range(1, 9)] * 8
    expected = [product.multiply(batch, 2) for batch in batches]

    with ThreadPoolExecutor(4) as executor:
        results = list(executor.map(lambda batch: product.multiply(batch, 2), batches))

    for result, wanted in zip(results, expected, strict=True):
        assert_same_bits(result, wanted)


@every_kernel
@every_num_digits
def test_extreme_rows_have_the_bits_of_the_reference(num_digits: int, kernel: Int8Kernel) -> None:
    largest = torch.finfo(torch.float32).max
    hidden = make_rows(10, 96)
    hidden[0] = 0.0
    hidden[1] = largest
    hidden[2] = -largest
    hidden[3] = 1e-42  # subnormal
    hidden[4] *= 1e-36
    hidden[5, ::2] = -hidden[5, 1::2]
    hidden[6, 3] = 3e38  # an outlier: the others round to zero
    hidden[7] = 0.0
    hidden[7, 95] = -1e-45
    weight = make_int8_weight(96, 40)
    weight.scales_O[0] = torch.finfo(torch.float32).tiny

    result = kernel.pack(weight, None).multiply(hidden, num_digits)

    assert_same_bits(result, reference.linear_int8(hidden, weight, None, num_digits))


@every_kernel
@every_num_digits
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", DTYPES)
def test_row_that_is_not_finite_becomes_nan_and_no_other(
    value: float, dtype: torch.dtype, num_digits: int, kernel: Int8Kernel
) -> None:
    hidden = make_rows(3, 40).to(dtype)
    product = kernel.pack(make_int8_weight(40, 24), None)
    clean = product.multiply(hidden, num_digits)
    hidden[1, 17] = value

    result = product.multiply(hidden, num_digits)

    assert bool(result[1].isnan().all())
    assert_same_bits(result[[0, 2]], clean[[0, 2]])


@every_kernel
@every_num_digits
def test_longest_sums_of_the_largest_numbers_are_exact(num_digits: int, kernel: Int8Kernel) -> None:
    # What adds pairs in 16 bits saturates here, and 32 bits are nearly full.
    values = torch.full((33, MAX_COLUMNS), 127, dtype=torch.int8)
    values[1] = -127
    values[2, ::2] = -127
    weight = Int8Weight(values, torch.ones(33))
    hidden = torch.ones(3, MAX_COLUMNS)
    hidden[1] = -1.0
    hidden[2, 1::2] = -1.0

    result = kernel.pack(weight, None).multiply(hidden, num_digits)

    assert_same_bits(result, reference.linear_int8(hidden, weight, None, num_digits))


@every_kernel
@every_num_digits
@pytest.mark.parametrize(
    ("in_features", "out_features", "first", "last"),
    [(1, 1, 0, 1), (31, 3, 0, 3), (70, 33, 0, 33), (257, 100, 32, 99), (64, 96, 64, 96)],
)
def test_transposed_weights_have_the_bits_of_the_reference(
    in_features: int, out_features: int, first: int, last: int, num_digits: int, kernel: Int8Kernel
) -> None:
    weight = make_int8_weight(in_features, out_features)
    gradients = make_rows(7, last - first)

    product = kernel.pack(weight, torch.ones(out_features)).transpose(first, last)

    values_IO = weight.values_OI[first:last].t().contiguous()
    transposed = Int8Weight(values_IO, torch.ones(in_features))
    result = product.multiply(gradients, num_digits)
    assert_same_bits(result, reference.linear_int8(gradients, transposed, None, num_digits))


@every_kernel
@pytest.mark.parametrize("offset", [1, 3, 8, 13])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_may_lie_at_any_address_and_in_any_order(
    offset: int, dtype: torch.dtype, kernel: Int8Kernel
) -> None:
    product = kernel.pack(make_int8_weight(50, 20), None)
    hidden = make_rows(4, 50).to(dtype)
    shifted = torch.zeros(offset + hidden.numel(), dtype=dtype)[offset:].view(4, 50)
    shifted.copy_(hidden)
    expected = product.multiply(hidden, 2)

    assert_same_bits(product.multiply(shifted, 2), expected)
    assert_same_bits(product.multiply(hidden.t().contiguous().t(), 2), expected)
    assert_same_bits(product.multiply(hidden.flip(0), 2), expected.flip(0))


@every_kernel
def test_weights_may_be_dropped_or_changed_after_packing(kernel: Int8Kernel) -> None:
    weight = make_int8_weight(64, 40)
    bias = torch.ones(40)
    hidden = make_rows(2, 64)
    expected = reference.linear_int8(hidden, weight, bias, 2)
    copy = Int8Weight(weight.values_OI.clone(), weight.scales_O.clone())
    product = kernel.pack(copy, bias.clone())

    del copy

    assert_same_bits(product.multiply(hidden, 2), expected)


@every_kernel
def test_rows_of_another_length_are_refused(kernel: Int8Kernel) -> None:
    product = kernel.pack(make_int8_weight(64, 40), None)

    with pytest.raises((ValueError, RuntimeError)):
        product.multiply(make_rows(2, 63), 2)


def test_two_digits_are_as_good_as_float_activations() -> None:
    hidden = make_rows(20, 512)
    hidden[:, 7] *= 300.0  # the outliers of large models
    weight = make_int8_weight(512, 96)

    result = choose_int8_kernel("cpu").pack(weight, None).multiply(hidden, 2)

    expected = reference.linear_unrounded(hidden, weight, None)
    assert float((result - expected).norm() / expected.norm()) < 1e-3


@pytest.mark.slow
def test_torch_is_exact_on_processors_whose_integer_products_saturate() -> None:
    code = (
        "import json, torch\n"
        "from shoal.kernels.linear import torch_int8\n"
        "from shoal.kernels.linear.quantize import Int8Weight\n"
        "weight = Int8Weight(torch.full((40, 2500), 127, dtype=torch.int8), torch.ones(40))\n"
        "hidden = torch.linspace(0.9, 1.0, 7500).view(3, 2500)\n"
        "result = torch_int8.make_kernel().pack(weight, None).multiply(hidden, 2)\n"
        "print(json.dumps(result.tolist()))\n"
    )

    # oneDNN, which torch multiplies with, then takes this processor for an older one.
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2"}
    process = subprocess.run(
        [sys.executable, "-P", "-c", code],
        capture_output=True, text=True, timeout=60, check=True, env=environment,
    )  # fmt: skip

    weight = Int8Weight(torch.full((40, 2500), 127, dtype=torch.int8), torch.ones(40))
    hidden = torch.linspace(0.9, 1.0, 7500).view(3, 2500)
    expected = reference.linear_int8(hidden, weight, None, 2)
    assert torch.equal(torch.tensor(json.loads(process.stdout)), expected)


@pytest.fixture
def native() -> list[Int8Kernel]:
    kernels = native_int8.list_kernels()
    if not kernels:
        pytest.skip("native/ was not built; `pip install -e .` builds it where a compiler is")
    return kernels


def test_native_kernels_come_first(native: list[Int8Kernel]) -> None:
    assert native[-1].name == "int8: portable"
    assert list_int8_kernels()[-1].name == "int8: torch"


@pytest.mark.slow
@pytest.mark.usefixtures("native")
def test_forked_child_multiplies_on_its_own_threads() -> None:
    code = (
        "import os, torch\n"
        "from shoal.kernels.linear.quantize import quantize_int8\n"
        "from shoal.kernels.linear.select import choose_int8_kernel\n"
        "torch.set_num_threads(2)\n"
        "weight = quantize_int8(torch.eye(400))\n"
        "product = choose_int8_kernel('cpu').pack(weight, None)\n"
        "hidden = torch.ones(1, 400)\n"
        "expected = product.multiply(hidden, 2)\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    same = all(torch.equal(product.multiply(hidden, 2), expected) for _ in range(50))\n"
        "    os._exit(0 if same else 1)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
        "print(torch.equal(product.multiply(hidden, 2), expected))\n"
    )

    process = warm_python.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60
    )

    assert process.stdout.split() == ["0", "True"], process.stderr
