"""Devices that compute an engine. All that differs between the CPU and others is chosen here.

Tensor suffixes: N tokens of a step, H hidden.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from ....kernels.layers.row_kernels import RowKernels
from ....kernels.linear.quantize import WeightFormat
from ....protocol.spans import Span
from ....protocol.tensors import KVFormat
from ..cache.kv_memory import LAYOUTS, KVStore, Layout
from ..cache.lazy_memory import LazyStore
from ..cache.paged_memory import PagedAttention, PagedStore, make_paged_layouts

COMPUTE_DTYPES = {
    WeightFormat.FP32: torch.float32,
    WeightFormat.BF16: torch.bfloat16,
    WeightFormat.NF4: torch.bfloat16,
    # Precision is spent on the weights, where it buys speed. Exact activations let a replay
    # after a failure reproduce the same tokens.
    WeightFormat.INT8: torch.float32,
}
"""The dtype of activations and KV cache."""


class Capturer(ABC):
    """Captures the work of a function on a device, to repeat it without calling the function.

    The function reads and writes the same tensors each time, and its work follows from their
    shapes, not from their contents.
    """

    @abstractmethod
    def capture(self, function: Callable[[], None]) -> Callable[[], None]:
        """Return what repeats the work on the present contents. May call the function."""


class CallingCapturer(Capturer):
    """Calls the function again. It stands in for a device where there is none."""

    def capture(self, function: Callable[[], None]) -> Callable[[], None]:
        return function


class Device(ABC):
    """A processor with memory of its own: `torch_device` is its name in torch.

    `paged_attention` attends over caches in pages, on devices that keep them so. `capturer`
    captures steps of generated tokens; it is None where that brings nothing. `row_kernels` compute
    the inputs of int8 linears, where torch would take more launches.
    """

    def __init__(
        self,
        torch_device: torch.device,
        paged_attention: PagedAttention | None,
        capturer: Capturer | None,
        row_kernels: RowKernels | None = None,
    ) -> None:
        self.torch_device = torch_device
        self.paged_attention = paged_attention
        self.capturer = capturer
        self.row_kernels = row_kernels

    @property
    def name(self) -> str:
        """The device for people."""
        return str(self.torch_device)

    @abstractmethod
    def make_layouts(
        self, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> Mapping[KVFormat, Layout]:
        """Return how caches lie in the memory of this device, for each of their formats."""

    @abstractmethod
    def open_store(
        self, budget_bytes: int, span: Span, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> KVStore:
        """Return memory for the caches of sessions that use blocks of a span."""

    @abstractmethod
    def bring(self, hidden_NH: torch.Tensor) -> torch.Tensor:
        """Return hidden states, on the CPU, on this device."""

    @abstractmethod
    def fetch(self, hidden_NH: torch.Tensor) -> torch.Tensor:
        """Return them on the CPU; waits until they are computed."""

    def read_free_bytes(self) -> int | None:
        """Return the memory left for weights and caches; None if it is the machine's."""
        return None

    def running(self) -> AbstractContextManager[object]:
        """Return the context that a thread needs while it computes here."""
        return nullcontext()


class CpuDevice(Device):
    """The processor of the machine, with kernels in C if they could be compiled."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"), None, None)

    @property
    def name(self) -> str:
        """The device, and how many of its threads compute."""
        num_threads = torch.get_num_threads()
        return f"cpu, {num_threads} thread{'s' * (num_threads != 1)}"

    def make_layouts(
        self, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> Mapping[KVFormat, Layout]:
        return {name: layout(num_kv_heads, head_dim, dtype) for name, layout in LAYOUTS.items()}

    def open_store(
        self, budget_bytes: int, span: Span, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> KVStore:
        return LazyStore(len(span), num_kv_heads, head_dim, dtype)

    def bring(self, hidden_NH: torch.Tensor) -> torch.Tensor:
        return hidden_NH

    def fetch(self, hidden_NH: torch.Tensor) -> torch.Tensor:
        return hidden_NH


CPU = CpuDevice()


class PagedDevice(Device):
    """A device whose caches lie in pages, which its attention reads through tables.

    Tests make one of the CPU, so that everything but the device itself is tested without one.
    """

    def make_layouts(
        self, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> Mapping[KVFormat, Layout]:
        return make_paged_layouts(num_kv_heads, head_dim, dtype)

    def open_store(
        self, budget_bytes: int, span: Span, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> KVStore:
        return PagedStore(budget_bytes, span, num_kv_heads, head_dim, dtype, self.torch_device)

    def bring(self, hidden_NH: torch.Tensor) -> torch.Tensor:
        return hidden_NH.to(self.torch_device)

    def fetch(self, hidden_NH: torch.Tensor) -> torch.Tensor:
        return hidden_NH.cpu()


@dataclass(frozen=True)
class Numerics:
    """The format of weights, and the device and the dtype in which they are multiplied."""

    weights: WeightFormat
    device: Device = CPU

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of activations and KV cache."""
        return COMPUTE_DTYPES[self.weights]

    @property
    def row_kernels(self) -> RowKernels | None:
        """The kernels that compute the inputs of int8 linears where the device has some."""
        return self.device.row_kernels if self.weights is WeightFormat.INT8 else None

    @property
    def has_float32_weights(self) -> bool:
        """Whether linears round the last digit by how many tokens they multiply, in float32."""
        return self.weights is WeightFormat.FP32
