"""The int8 kernels in C, for the instruction sets of this processor, called through native/.

If the library was not built, `list_kernels` is empty.
"""

import ctypes
from functools import partial

import torch
from torch import Tensor

from ..native.library import load_library
from .quantize import Int8Kernel, Int8Product, Int8Weight

_INSTRUCTION_SETS = {
    5: "neon-dotprod",
    4: "neon",
    3: "avx512-vnni",
    2: "avx-vnni",
    1: "avx2",
    0: "portable",
}
"""The numbers that native/int8.c gives them, fastest first."""

_PANEL, _GROUP = 32, 4
"""Outputs and columns that lie together: the layout in native/int8.h."""

_DTYPES = {torch.float32: 0, torch.bfloat16: 1}


class _Layer(ctypes.Structure):
    """`Layer` of native/int8.h."""

    _fields_ = (
        ("packed", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("num_groups", ctypes.c_size_t),
        ("num_panels", ctypes.c_size_t),
        ("in_features", ctypes.c_size_t),
        ("out_features", ctypes.c_size_t),
    )


def list_kernels() -> list[Int8Kernel]:
    """Return a kernel for each instruction set that the processor has, fastest first."""
    library = load_library()
    if library is None:
        return []
    return [
        Int8Kernel(f"int8: {name}", partial(_pack, library, number))
        for number, name in _INSTRUCTION_SETS.items()
        if library.shoal_int8_has(number)
    ]


def _pack(
    library: ctypes.CDLL, instruction_set: int, weight: Int8Weight, bias_O: Tensor | None
) -> Int8Product:
    num_outputs, num_columns = weight.shape
    packed = _make_room(num_outputs, num_columns)
    values_OI = weight.values_OI.contiguous()
    library.shoal_int8_pack(values_OI.data_ptr(), num_outputs, num_columns, packed.data_ptr())
    bias_O = None if bias_O is None else bias_O.to(torch.float32, copy=True)
    scales_O = weight.scales_O.clone()
    return _NativeProduct(library, instruction_set, packed, num_columns, scales_O, bias_O)


def _make_room(num_outputs: int, num_columns: int) -> Tensor:
    num_panels, num_groups = -(-num_outputs // _PANEL), -(-num_columns // _GROUP)
    return torch.empty(num_panels, num_groups * _PANEL * _GROUP, dtype=torch.uint8)


class _NativeProduct:
    """A weight packed for native/int8.c, panel by panel, and the calls."""

    def __init__(
        self,
        library: ctypes.CDLL,
        instruction_set: int,
        packed: Tensor,
        num_columns: int,
        scales_O: Tensor,
        bias_O: Tensor | None,
    ) -> None:
        self.scales_O = scales_O
        self._packed = packed
        self._bias_O = bias_O
        tensors = (packed, scales_O, bias_O)
        self.num_bytes = sum(tensor.nbytes for tensor in tensors if tensor is not None)
        addresses = (None if tensor is None else tensor.data_ptr() for tensor in tensors)
        num_panels, num_groups = len(packed), -(-num_columns // _GROUP)
        self._layer = _Layer(*addresses, num_groups, num_panels, num_columns, len(scales_O))
        self._layer_address = ctypes.addressof(self._layer)
        self._num_columns, self._num_outputs = num_columns, len(scales_O)
        self._library = library
        self._instruction_set = instruction_set

    def multiply(self, hidden_NI: Tensor, num_digits: int) -> Tensor:
        return self._run(hidden_NI, num_digits, None)

    def multiply_roughly(self, hidden_NI: Tensor) -> tuple[Tensor, Tensor]:
        squares_N = torch.empty(len(hidden_NI), dtype=torch.int32)
        return self._run(hidden_NI, 1, squares_N), squares_N

    def transpose(self, first_output: int, last_output: int) -> Int8Product:
        num_outputs = last_output - first_output
        transposed = _make_room(self._num_columns, num_outputs)
        self._library.shoal_int8_transpose(
            self._packed[first_output // _PANEL :].data_ptr(),
            num_outputs,
            self._num_columns,
            transposed.data_ptr(),
        )
        ones_I = torch.ones(self._num_columns)
        return _NativeProduct(
            self._library, self._instruction_set, transposed, num_outputs, ones_I, None
        )

    def _run(self, hidden_NI: Tensor, num_digits: int, squares_N: Tensor | None) -> Tensor:
        dtype = hidden_NI.dtype
        if dtype not in _DTYPES:
            return self._run(hidden_NI.float(), num_digits, squares_N).to(dtype)
        num_rows, num_columns = hidden_NI.shape
        if num_columns != self._num_columns:
            raise ValueError(f"rows of {num_columns} numbers for {self._num_columns} columns")
        hidden_NI = hidden_NI.contiguous()
        result_NO = torch.empty(num_rows, self._num_outputs, dtype=dtype)
        status = self._library.shoal_int8_multiply(
            self._layer_address,
            hidden_NI.data_ptr(),
            result_NO.data_ptr(),
            None if squares_N is None else squares_N.data_ptr(),
            num_rows,
            _DTYPES[dtype],
            num_digits,
            self._instruction_set,
            torch.get_num_threads(),
        )
        if status:
            raise MemoryError(f"no memory to multiply {num_rows} rows")
        return result_NO
