"""Kernels that compute what goes into int8 linears, and round it in the same go; for devices."""

from typing import Protocol

from torch import Tensor

from ..linear.quantize import Rows
from ..linear.select import check_triton
from .activations import Activation
from .norm import Norm


class RowKernels(Protocol):
    """Norms and gates; each row's result depends on that row alone."""

    def norm(self, norm: Norm, hidden_NI: Tensor) -> Rows:
        """Return what the norm does, up to rounding."""
        ...

    def gate(self, activation: Activation, gate_up_NX: Tensor) -> Rows:
        """Return what `gated_mlp.gate` does, up to rounding."""
        ...


def choose_row_kernels(device_type: str) -> RowKernels:
    """Return the kernels for such a device; raises ValueError where there are none."""
    check_triton(device_type)
    from . import triton_rows

    return triton_rows.TritonRows()
