"""CUDA devices: which of them can be used, and how steps are captured on them."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from ....kernels.layers.row_kernels import choose_row_kernels
from ....kernels.linear.select import choose_paged_attention
from ....protocol.errors import UsageError
from ..cache.paged_memory import PagedAttention
from .device import CPU, Capturer, Device, PagedDevice
from .device_names import parse_cuda_number

_LEAST_CAPABILITY = (8, 0)
"""Ampere. Triton does not compile products of int8 for what came before."""


def choose_device(name: str) -> Device:
    """Return the device `cpu`, `cuda` or `cuda:N`; `auto` is the first of CUDA if it can be used.

    Raises UsageError that says why a device cannot be used.
    """
    number = parse_cuda_number(name)
    if number is None:
        return CPU
    fault = _find_fault(number)
    if fault is None:
        return CudaDevice(number)
    if name == "auto":
        return CPU
    raise UsageError(f"{name} cannot be used: {fault}; use --device cpu")


def _find_fault(index: int) -> str | None:
    """Return why a CUDA device cannot be used, if it cannot."""
    if not torch.backends.cuda.is_built():
        return "this torch was built without CUDA"
    if index >= torch.cuda.device_count():
        return f"the number of CUDA devices that torch finds is {torch.cuda.device_count()}"
    if torch.cuda.get_device_capability(index) < _LEAST_CAPABILITY:
        return f"{torch.cuda.get_device_name(index)} is older than Ampere, the least that can do it"
    try:
        choose_paged_attention("cuda")
    except ValueError as error:
        return str(error)
    return None


class CudaDevice(PagedDevice):
    """A usable CUDA device; int8 linears, what goes into them, and attention are in Triton."""

    def __init__(self, index: int) -> None:
        torch_device = torch.device("cuda", index)
        super().__init__(
            torch_device,
            PagedAttention(*choose_paged_attention("cuda")),
            _GraphCapturer(torch_device),
            choose_row_kernels("cuda"),
        )

    @property
    def name(self) -> str:
        """The card, as its maker calls it."""
        return torch.cuda.get_device_name(self.torch_device)

    def read_free_bytes(self) -> int | None:
        # Memory that torch caches of an earlier span is free as well.
        reserved_bytes = torch.cuda.memory_reserved(self.torch_device)
        idle_bytes = reserved_bytes - torch.cuda.memory_allocated(self.torch_device)
        return torch.cuda.mem_get_info(self.torch_device)[0] + idle_bytes

    def running(self) -> AbstractContextManager[object]:
        # Triton launches on the current device, which every thread has one of.
        return torch.cuda.device(self.torch_device)


class _GraphCapturer(Capturer):
    """Captures CUDA graphs, whose memory is shared: one runs at a time."""

    def __init__(self, torch_device: torch.device) -> None:
        self._torch_device = torch_device
        self._pool: Any = None  # torch has no public name for what it is

    def capture(self, function: Callable[[], None]) -> Callable[[], None]:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        # The first call compiles kernels, which cannot be captured.
        stream = torch.cuda.Stream(self._torch_device)
        stream.wait_stream(torch.cuda.current_stream(self._torch_device))
        with torch.cuda.stream(stream):
            function()
        torch.cuda.current_stream(self._torch_device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Another thread may load blocks of the next span meanwhile.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"
        ):
            function()
        return graph.replay
