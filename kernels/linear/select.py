"""Makes linear layers, with the kernels that are the fastest on this processor."""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from . import native_int8, torch_int8
from .linear import FloatLinear, Int8Linear, Linear, Nf4Linear
from .quantize import (
    Int8Kernel,
    Int8Product,
    Int8Weight,
    WeightFormat,
    dequantize_int8,
    quantize_int8,
)

_WEIGHT_SHAPE = (1024, 512)
_FEW_ROWS, _MANY_ROWS = (1, 2), (64, 1)
"""Rows and digits of a token that is generated, and of a part of a prompt."""
_MOST_TIMES_SLOWER = 4.0
"""With few rows: what a slower kernel gains with many does not make up for it."""
_NUM_TRIALS = 5


def make_linear(
    weight_OI: Tensor | Int8Weight, bias_O: Tensor | None, weights: WeightFormat, dtype: torch.dtype
) -> Linear:
    """Return a linear layer with its own copy of the weights in the given format.

    A weight that is quantized already stays as it is in int8, without a copy where the kernel
    needs none. `dtype` is that of the activations in and out, and of the bias. Raises ValueError
    for shapes that contradict each other, a `dtype` without fractions, or weights that cannot be
    quantized.
    """
    if len(weight_OI.shape) != 2:
        raise ValueError(f"a weight is a matrix [out, in], got shape {tuple(weight_OI.shape)}")
    if bias_O is not None and bias_O.shape != weight_OI.shape[:1]:
        raise ValueError(f"bias {tuple(bias_O.shape)} for weight {tuple(weight_OI.shape)}")
    if not dtype.is_floating_point:
        raise ValueError(f"activations are floating point numbers, not {dtype}")
    bias_O = None if bias_O is None else _own(bias_O, dtype)
    if weights is WeightFormat.INT8:
        is_quantized = isinstance(weight_OI, Int8Weight)
        weight = weight_OI if is_quantized else quantize_int8(weight_OI)
        return Int8Linear(weight, bias_O, choose_int8_kernel(weight.values_OI.device.type))
    if isinstance(weight_OI, Int8Weight):
        weight_OI = dequantize_int8(weight_OI)
    if weights is WeightFormat.NF4:
        return Nf4Linear(weight_OI, bias_O)
    stored = torch.bfloat16 if weights is WeightFormat.BF16 else torch.float32
    return FloatLinear(_own(weight_OI, stored), bias_O, dtype)


def _own(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    # Always a copy: a view would keep a whole memory-mapped checkpoint shard alive.
    return tensor.detach().to(dtype, copy=True, memory_format=torch.contiguous_format)


def list_int8_kernels() -> list[Int8Kernel]:
    """Return every int8 kernel of the CPU, likely fastest first. All compute the same bits."""
    return [*native_int8.list_kernels(), torch_int8.make_kernel()]


@cache
def choose_int8_kernel(device_type: str) -> Int8Kernel:
    """Return the kernel of every int8 linear on such a device: on the CPU the fastest, as measured.

    The first call takes some hundredths of a second. Raises ValueError where there is none.
    """
    if device_type == "cpu":
        return choose_fastest(list_int8_kernels(), time.perf_counter)
    check_triton(device_type)
    from . import triton_int8

    return triton_int8.make_kernel()


def choose_paged_attention(
    device_type: str,
) -> tuple[Callable[..., Tensor], Callable[..., Tensor], Callable[..., Tensor]]:
    """Return attention over pages, of generated tokens and of prompts, and what writes into pages.

    They are those of `triton_attention` and `triton_states`. Raises ValueError where there is none.
    """
    check_triton(device_type)
    from ..attention import triton_attention, triton_states

    return (
        triton_attention.paged_attention,
        triton_attention.paged_prompt_attention,
        triton_states.write_states,
    )


def check_triton(device_type: str) -> None:
    """Raise ValueError where there are no kernels in Triton."""
    if device_type != "cuda":
        raise ValueError(f"there are no kernels for tensors on the device {device_type}")
    if find_spec("triton") is None:
        raise ValueError("kernels for CUDA devices need Triton: pip install 'shoal[cuda]'")


def choose_fastest(kernels: Sequence[Int8Kernel], read_clock: Callable[[], float]) -> Int8Kernel:
    """Return the kernel with the smallest product of its times for few rows and for many.

    Of each it is the shortest of some trials: other programs only ever make them longer. Kernels
    that are much slower with few rows are not tried with many, which takes them long.
    """
    generator = torch.Generator().manual_seed(0)
    values_OI = torch.randint(-127, 128, _WEIGHT_SHAPE, generator=generator).to(torch.int8)
    weight = Int8Weight(values_OI, torch.ones(len(values_OI)))
    products = [kernel.pack(weight, None) for kernel in kernels]

    def measure(product: Int8Product, num_rows: int, num_digits: int) -> float:
        hidden_NI = torch.randn(num_rows, values_OI.shape[1], generator=generator)
        seconds: list[float] = []
        for _ in range(_NUM_TRIALS):
            started_at = read_clock()
            product.multiply(hidden_NI, num_digits)
            seconds.append(read_clock() - started_at)
        return min(seconds)

    with_few = [measure(product, *_FEW_ROWS) for product in products]
    most = _MOST_TIMES_SLOWER * min(with_few)
    costs = [
        few * measure(product, *_MANY_ROWS) if few <= most else math.inf
        for few, product in zip(with_few, products, strict=True)
    ]
    return kernels[costs.index(min(costs))]


def describe_kernels(
    weights: WeightFormat, attention: Iterable[str], device_type: str = "cpu"
) -> str:
    """Return the names of the kernels for blocks with such weights, for people to read.

    Before the first int8 weights are there, this measures.

    >>> describe_kernels(WeightFormat.FP32, ["torch", "avx512", "torch"])
    'fp32: torch, attention: avx512 and torch'
    """
    is_int8 = weights is WeightFormat.INT8
    library = "bitsandbytes" if weights is WeightFormat.NF4 else "torch"
    linear = choose_int8_kernel(device_type).name if is_int8 else f"{weights.value}: {library}"
    return f"{linear}, attention: {' and '.join(sorted(set(attention)))}"
