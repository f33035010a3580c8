"""The safetensors file of an adapter: what its header says is checked before tensors are made."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor

from ....protocol.errors import ErrorCode, RefusedError
from ....protocol.messages.lora_config import DOWN, PREFIX, UP

_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}

_LENGTH_BYTES = 8

_ENTRY_BYTES = 512
"""For a matrix in the header: the longest names of PEFT and its numbers need half of it."""

_METADATA_BYTES = 2**16

Sizes = tuple[int, int]
"""How many inputs and outputs a linear has."""


@dataclass(frozen=True)
class _Entry:
    """A matrix, and where it is in the file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, int]
    start: int
    stop: int

    def check_shape(self, expected: Sizes) -> None:
        if self.shape != expected:
            found = str(self.shape)
            raise refuse(f"{self.name:.200} has shape {found:.99}, this model needs {expected}")
        if self.stop - self.start != math.prod(expected) * self.dtype.itemsize:
            raise _make_format_error()

    def read(self, data: memoryview) -> Tensor:
        """Return the matrix; it has memory of its own, so that nothing keeps the whole file."""
        flat = torch.frombuffer(bytearray(data[self.start : self.stop]), dtype=self.dtype)
        if not bool(flat.isfinite().all()):
            raise refuse(f"{self.name:.200} does not hold finite floats")
        return flat.view(self.shape)


class AdapterFile:
    """A stranger's file, whose matrices all fit linears of the model.

    To make a tensor takes microseconds and a kilobyte, however small it is: so nothing is made of
    what does not belong to the model.
    """

    def __init__(self, file: bytes, rank: int, linears: Mapping[str, Sizes]) -> None:
        """Check the header; raises RefusedError that says what does not fit.

        `linears` are all that an adapter may change, by what their checkpoint calls them.
        """
        most_bytes = _METADATA_BYTES + 2 * len(linears) * _ENTRY_BYTES
        header, self._data = _split(file, most_bytes)
        self._modules = _group(header)
        for module, (down, up) in self._modules.items():
            if module not in linears:
                raise refuse(f"this model has no linear {module:.200} that an adapter could change")
            num_inputs, num_outputs = linears[module]
            down.check_shape((rank, num_inputs))
            up.check_shape((num_outputs, rank))
        entries = [entry for pair in self._modules.values() for entry in pair]
        places = sorted((entry.start, entry.stop) for entry in entries)
        is_whole = places[0][0] == 0 and places[-1][1] == len(self._data)
        if not is_whole or any(one[1] != other[0] for one, other in pairwise(places)):
            raise _make_format_error()

    def __iter__(self) -> Iterator[str]:
        """Yield the names of linears that it has matrices for."""
        return iter(self._modules)

    def read(self, module: str) -> tuple[Tensor, Tensor]:
        """Return both matrices of a linear; raises RefusedError if they are not finite."""
        down, up = self._modules[module]
        return down.read(self._data), up.read(self._data)


def refuse(detail: str) -> RefusedError:
    """Return the refusal of an adapter."""
    return RefusedError(ErrorCode.BAD_VALUES, f"the adapter cannot be used: {detail}")


def _split(file: bytes, most_bytes: int) -> tuple[dict[str, Any], memoryview]:
    """Return the header, and the rest."""
    num_bytes = int.from_bytes(file[:_LENGTH_BYTES], "little")
    end = _LENGTH_BYTES + num_bytes
    if not num_bytes or end > len(file):
        raise _make_format_error()
    if num_bytes > most_bytes:
        raise refuse(
            f"the header of its weights has {num_bytes} bytes, and {most_bytes} are enough for "
            "all linears of this model"
        )
    try:
        header = json.loads(file[_LENGTH_BYTES:end])
    except (ValueError, RecursionError):
        raise _make_format_error() from None
    if not isinstance(header, dict):
        raise _make_format_error()
    return cast("dict[str, Any]", header), memoryview(file)[end:]


def _group(header: Mapping[str, Any]) -> dict[str, tuple[_Entry, _Entry]]:
    """Return both matrices of each linear by the linear's name in the checkpoint."""
    modules: dict[str, dict[str, _Entry]] = {}
    for name, fields in header.items():
        if name == "__metadata__":
            continue
        ending = next((end for end in (DOWN, UP) if name.endswith(end)), None)
        if ending is None or not name.startswith(PREFIX):
            raise refuse(f"{name:.200} is not a name that PEFT gives to LoRA matrices")
        module = name[len(PREFIX) : -len(ending)]
        modules.setdefault(module, {})[ending] = _read_entry(name, fields)
    for module, found in modules.items():
        if len(found) != 2:
            raise refuse(f"{module:.200} has only one of lora_A and lora_B")
    if not modules:
        raise refuse("it has no matrices")
    return {module: (found[DOWN], found[UP]) for module, found in modules.items()}


def _read_entry(name: str, fields: Any) -> _Entry:
    match fields:
        case {
            "dtype": str(dtype),
            "shape": [int(rows), int(columns)],
            "data_offsets": [int(start), int(stop)],
        }:
            if dtype not in _DTYPES:
                raise refuse(f"{name:.200} does not hold finite floats")
            # JSON's `true` is a number to Python, but no size to torch.
            return _Entry(name, _DTYPES[dtype], (int(rows), int(columns)), start, stop)
        case _:
            raise _make_format_error()


def _make_format_error() -> RefusedError:
    return refuse("its weights are not a safetensors file")
