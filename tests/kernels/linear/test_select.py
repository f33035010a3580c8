"""Which kernel a process takes, with kernels whose times are only numbers."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch import Tensor

from shoal.kernels.linear.quantize import Int8Kernel, Int8Weight, WeightFormat
from shoal.kernels.linear.select import (
    choose_fastest,
    choose_int8_kernel,
    choose_paged_attention,
    describe_kernels,
    list_int8_kernels,
)


class Clock:
    """Stands still but for what products take."""

    seconds = 0.0

    def read(self) -> float:
        return self.seconds


class TimedProduct:
    """Takes so many seconds for few rows and for many; other programs disturb all but one trial."""

    num_bytes = 0
    scales_O = torch.ones(1)

    def __init__(
        self, clock: Clock, few: float, many: float, weight: Int8Weight, bias_O: Tensor | None
    ) -> None:
        self._clock = clock
        self._seconds = {1: few, 64: many}
        self._disturbances = self._disturb()

    def multiply(self, hidden_NI: Tensor, num_digits: int) -> Tensor:
        self._clock.seconds += self._seconds[len(hidden_NI)] + next(self._disturbances)
        return hidden_NI

    def multiply_roughly(self, hidden_NI: Tensor) -> tuple[Tensor, Tensor]:
        return hidden_NI, torch.zeros(len(hidden_NI), dtype=torch.int32)

    def transpose(self, first_output: int, last_output: int) -> TimedProduct:
        return self

    def _disturb(self) -> Iterator[float]:
        while True:
            yield from (9.0, 0.0, 7.0)


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ({"a": (1.0, 5.0), "b": (1.0, 4.0)}, "b"),
        ({"a": (1.0, 5.0), "b": (2.0, 5.0)}, "a"),
        ({"a": (0.5, 60.0), "b": (1.0, 40.0)}, "a"),
        ({"a": (1.0, 4.0), "b": (1.0, 4.0)}, "a"),
        ({"a": (1.0, 40.0), "b": (3.0, 10.0)}, "b"),
        ({"a": (1.0, 40.0), "b": (5.0, 0.1)}, "a"),
    ],
)
def test_fastest_for_few_rows_and_for_many_is_taken(
    times: dict[str, tuple[float, float]], expected: str
) -> None:
    clock = Clock()
    kernels = [
        Int8Kernel(name, partial(TimedProduct, clock, few, many))
        for name, (few, many) in times.items()
    ]

    assert choose_fastest(kernels, clock.read).name == expected


def test_choice_is_one_of_those_of_this_machine_and_stays() -> None:
    assert choose_int8_kernel("cpu").name in [kernel.name for kernel in list_int8_kernels()]
    assert choose_int8_kernel("cpu") is choose_int8_kernel("cpu")


@pytest.mark.parametrize(
    ("weights", "start"),
    [
        (WeightFormat.INT8, "int8: "),
        (WeightFormat.FP32, "fp32: torch, "),
        (WeightFormat.BF16, "bf16: "),
    ],
)
def test_kernels_are_described_in_one_short_line(weights: WeightFormat, start: str) -> None:
    text = describe_kernels(weights, ["torch", "avx512"])

    assert text.startswith(start)
    assert text.endswith(", attention: avx512 and torch")
    assert len(text) <= 64


@pytest.mark.parametrize("choose", [choose_int8_kernel, choose_paged_attention])
def test_device_without_kernels_is_named(choose: Callable[[str], object]) -> None:
    with pytest.raises(ValueError, match="no kernels for tensors on the device meta"):
        choose("meta")


@pytest.mark.slow
def test_triton_is_imported_for_devices_alone_and_missed_in_one_sentence() -> None:
    code = (
        "import sys, torch\n"
        "from shoal.kernels.linear import select\n"
        "weights = select.WeightFormat.INT8\n"
        "select.make_linear(torch.ones(4, 4), None, weights, torch.float32)\n"
        "assert 'triton' not in sys.modules\n"
        "sys.modules['triton'] = None\n"  # as if it were not installed
        "for choose in (select.choose_int8_kernel, select.choose_paged_attention):\n"
        "    try:\n"
        "        choose('cuda')\n"
        "    except ValueError as error:\n"
        "        print(error)\n"
    )

    process = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)

    assert process.returncode == 0, process.stderr
    advice = "kernels for CUDA devices need Triton: pip install 'shoal[cuda]'"
    assert process.stdout.splitlines() == [advice, advice]


def test_triton_computes_on_cuda_devices() -> None:
    pytest.importorskip("triton")

    assert choose_int8_kernel("cuda").name == "int8: triton"
    modules = [program.__module__ for program in choose_paged_attention("cuda")]
    folder = "shoal.kernels.attention"
    attention = f"{folder}.triton_attention"
    assert modules == [attention, attention, f"{folder}.triton_states"]
