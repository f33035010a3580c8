"""CUDA devices: which there are, and what computes on them."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from ...kernels.select import choose_paged_attention
from ...protocol.errors import UsageError
from .device import CPU, Device, PagedDevice
from .recorder import Recorder

_LEAST_CAPABILITY = (8, 0)
"""Ampere. Triton does not compile products of int8 for what came before."""


def choose_device(name: str) -> Device:
    """Return the device `cpu`, `cuda` or `cuda:N`; `auto` is the first of CUDA if it can be used.

    Raises UsageError that says why a device cannot be used.
    """
    if name == "auto":
        return CPU if _find_fault(0) is not None else CudaDevice(0)
    kind, _, number = name.partition(":")
    if name == "cpu":
        return CPU
    if kind != "cuda" or (number and not number.isdecimal()):
        raise UsageError(f"a device is cpu, cuda, cuda:N or auto, not {name!r}")
    index = int(number or 0)
    fault = _find_fault(index)
    if fault is not None:
        raise UsageError(f"{name} cannot be used: {fault}; use --device cpu")
    return CudaDevice(index)


def _find_fault(index: int) -> str | None:
    """Return why a CUDA device cannot be used, if it cannot."""
    if not torch.backends.cuda.is_built():
        return "this torch was built without CUDA"
    num_devices = torch.cuda.device_count()
    if index >= num_devices:
        return f"torch finds {num_devices} CUDA devices" if num_devices else "torch finds no device"
    capability = torch.cuda.get_device_capability(index)
    if capability < _LEAST_CAPABILITY:
        return f"it is {torch.cuda.get_device_name(index)}, older than Ampere"
    try:
        choose_paged_attention("cuda")
    except ValueError as error:
        return str(error)
    return None


class CudaDevice(PagedDevice):
    """A CUDA device that can be used; int8 linears and attention of tokens are in Triton."""

    def __init__(self, index: int) -> None:
        place = torch.device("cuda", index)
        super().__init__(place, choose_paged_attention("cuda"), _GraphRecorder(place))

    def running(self) -> AbstractContextManager[object]:
        # Triton launches on the current device, which every thread has one of.
        return torch.cuda.device(self.place)


class _GraphRecorder(Recorder):
    """Captures CUDA graphs, whose memory is shared: one runs at a time."""

    def __init__(self, place: torch.device) -> None:
        self._place = place
        self._pool: Any = None  # torch has no public name for what it is

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        # What is compiled with the first call cannot be captured.
        stream = torch.cuda.Stream(self._place)
        stream.wait_stream(torch.cuda.current_stream(self._place))
        with torch.cuda.stream(stream):
            function()
        torch.cuda.current_stream(self._place).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Another thread may load blocks of the next span meanwhile.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"
        ):
            function()
        self._pool = graph.pool()
        return graph.replay
