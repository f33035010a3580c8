"""Reads LoRA adapters in the format of PEFT, which come from strangers.

Only `adapter_config.json` and safetensors are read; anything that does not fit the model is refused
by name. The header of the safetensors file is checked before a tensor is made. Dropout is not
applied.

Tensor suffixes: R rank, I input and O output features of the linear that PEFT knows.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor

from ....models.specs.model_spec import FusedOrder, MlpKind, ModelShape, ModelSpec
from ....protocol.errors import ErrorCode, RefusedError
from ....protocol.messages.adapters import DOWN, PREFIX, UP, check_rank, parse_lora_config
from ....protocol.spans import Span
from .adapter import Adapter, AdapterPart, LinearKey

_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}

_LENGTH_BYTES = 8

_ENTRY_BYTES = 512
"""For a matrix in the header: the longest names of PEFT and its numbers need half of it."""

_METADATA_BYTES = 2**16


@dataclass(frozen=True)
class _Matrix:
    """A matrix, and where it is in the file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, int]
    start: int
    stop: int

    def check_shape(self, expected: tuple[int, int]) -> None:
        if self.shape != expected:
            found = str(self.shape)
            raise _refuse(f"{self.name:.200} has shape {found:.99}, this model needs {expected}")
        if self.stop - self.start != math.prod(expected) * self.dtype.itemsize:
            raise _make_format_error()

    def read(self, data: memoryview) -> Tensor:
        """Return the matrix. It lies in the file where that may be written to, as leaves that are
        held for others may; else it has memory of its own.
        """
        part = data[self.start : self.stop]
        flat = torch.frombuffer(bytearray(part) if part.readonly else part, dtype=self.dtype)
        if flat.data_ptr() % self.dtype.itemsize:
            flat = flat.clone()
        if not bool(flat.isfinite().all()):
            raise _refuse(f"{self.name:.200} does not hold finite floats")
        return flat.view(self.shape)


@dataclass(frozen=True)
class _Target:
    """A linear as the checkpoint knows it, and where it is in ours."""

    key: LinearKey
    outputs: slice
    num_inputs: int
    order_O: Tensor | None

    @property
    def sizes(self) -> tuple[int, int]:
        """How many inputs and outputs it has."""
        return self.num_inputs, self.outputs.stop - self.outputs.start


def read_adapter(config: bytes, tensors: bytes, spec: ModelShape, span: Span) -> Adapter:
    """Return what an adapter has for a span; raises RefusedError that says what does not fit.

    Both are bounded by `AdapterHead`. Reading takes a while, and any thread may do it; the engine
    needs the adapter on its device.
    """
    spec = _check_family(spec)
    rank, scale = _read_config(config)
    parts = _read_parts(tensors, rank, scale, _list_targets(spec))
    return Adapter(rank, {key: found for key, found in parts.items() if key[0] in span})


def read_leaves(config: bytes, files: Mapping[int, bytearray], spec: ModelShape) -> Adapter:
    """Return what a published adapter has for some blocks, each of which has a file of its own.

    Raises RefusedError as `read_adapter` does. The matrices lie in the files.
    """
    spec = _check_family(spec)
    rank, scale = _read_config(config)
    known = _list_targets(spec)
    parts: dict[LinearKey, tuple[AdapterPart, ...]] = {}
    for block, file in files.items():
        own = {name: target for name, target in known.items() if target.key[0] == block}
        parts.update(_read_parts(file, rank, scale, own))
    return Adapter(rank, parts)


def _read_parts(
    file: bytes | bytearray, rank: int, scale: float, known: Mapping[str, _Target]
) -> dict[LinearKey, tuple[AdapterPart, ...]]:
    """Return all matrices of a file, which may change the `known` linears only.

    Raises RefusedError that says what does not fit.
    """
    most_bytes = _METADATA_BYTES + 2 * len(known) * _ENTRY_BYTES
    header, data = _split(file, most_bytes)
    modules = _group(header)
    # Making a tensor takes microseconds and a kilobyte, however small it is: so none is made for a
    # matrix that does not belong to the model.
    for module, (down, up) in modules.items():
        if module not in known:
            raise _refuse(f"this model has no linear {module:.200} that an adapter could change")
        num_inputs, num_outputs = known[module].sizes
        try:
            check_rank(rank, module, num_inputs, num_outputs)
        except ValueError as error:
            raise _refuse(str(error)) from None
        down.check_shape((rank, num_inputs))
        up.check_shape((num_outputs, rank))
    ranges = sorted((entry.start, entry.stop) for pair in modules.values() for entry in pair)
    is_whole = ranges[0][0] == 0 and ranges[-1][1] == len(data)
    if not is_whole or any(one[1] != other[0] for one, other in pairwise(ranges)):
        raise _make_format_error()
    parts: dict[LinearKey, list[AdapterPart]] = {}
    for module, (down, up) in modules.items():
        target = known[module]
        part = AdapterPart(
            module, target.outputs, down.read(data), up.read(data), scale, target.order_O
        )
        parts.setdefault(target.key, []).append(part)
    return {key: tuple(found) for key, found in parts.items()}


def _check_family(spec: ModelShape) -> ModelSpec:
    if not isinstance(spec, ModelSpec):
        raise RefusedError(
            ErrorCode.BAD_VALUES,
            f"models of type {spec.family!r} run through transformers here, where "
            "adapters are not applied",
        )
    return spec


def _refuse(detail: str) -> RefusedError:
    return RefusedError(ErrorCode.BAD_VALUES, f"the adapter cannot be used: {detail}")


def _split(file: bytes | bytearray, most_bytes: int) -> tuple[dict[str, Any], memoryview]:
    num_bytes = int.from_bytes(file[:_LENGTH_BYTES], "little")
    end = _LENGTH_BYTES + num_bytes
    if not num_bytes or end > len(file):
        raise _make_format_error()
    if num_bytes > most_bytes:
        raise _refuse(
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


def _group(header: Mapping[str, Any]) -> dict[str, tuple[_Matrix, _Matrix]]:
    """Return both matrices of each linear by the linear's name in the checkpoint."""
    modules: dict[str, dict[str, _Matrix]] = {}
    for name, fields in header.items():
        if name == "__metadata__":
            continue
        ending = next((end for end in (DOWN, UP) if name.endswith(end)), None)
        if ending is None or not name.startswith(PREFIX):
            raise _refuse(f"{name:.200} is not a name that PEFT gives to LoRA matrices")
        module = name[len(PREFIX) : -len(ending)]
        modules.setdefault(module, {})[ending] = _read_entry(name, fields)
    for module, found in modules.items():
        if len(found) != 2:
            raise _refuse(f"{module:.200} has only one of lora_A and lora_B")
    if not modules:
        raise _refuse("it has no matrices")
    return {module: (found[DOWN], found[UP]) for module, found in modules.items()}


def _read_entry(name: str, fields: Any) -> _Matrix:
    match fields:
        case {
            "dtype": str(dtype),
            "shape": [int(rows), int(columns)],
            "data_offsets": [int(start), int(stop)],
        }:
            if dtype not in _DTYPES:
                raise _refuse(f"{name:.200} does not hold finite floats")
            # JSON's `true` is a number to Python, but no size to torch.
            return _Matrix(name, _DTYPES[dtype], (int(rows), int(columns)), start, stop)
        case _:
            raise _make_format_error()


def _make_format_error() -> RefusedError:
    return _refuse("its weights are not a safetensors file")


def _read_config(config: bytes) -> tuple[int, float]:
    """Return the rank and what the product of both matrices is multiplied by."""
    try:
        known, _ = parse_lora_config(config)
    except ValueError as error:
        raise _refuse(str(error)) from None
    return known.rank, known.scale


def _list_targets(spec: ModelSpec) -> dict[str, _Target]:
    """Return every linear of the model's blocks by what its checkpoint may call it."""
    targets: dict[str, _Target] = {}
    for block in range(spec.num_blocks):
        shapes = spec.tensor_shapes(block)
        for slot, members in _list_slots(spec).items():
            if not all(member in shapes for member in members):
                continue  # experts
            start, num_shared_inputs = 0, shapes[members[0]][1]
            is_fused = len(members) > 1 and slot in spec.tensors.names
            for member in members:
                num_outputs, num_inputs = shapes[member]
                stop = start + num_outputs
                if not is_fused:
                    target = _Target((block, slot), slice(start, stop), num_inputs, None)
                    _add(targets, spec, block, member, target)
                start = stop
            if is_fused:
                order_O = _find_order(spec) if slot == "query_key_value" else None
                target = _Target((block, slot), slice(0, start), num_shared_inputs, order_O)
                _add(targets, spec, block, slot, target)
    return targets


def _add(
    targets: dict[str, _Target], spec: ModelSpec, block: int, name: str, target: _Target
) -> None:
    for stored in spec.tensors.list_stored(block, name):
        targets[stored.removesuffix(".weight")] = target


def _list_slots(spec: ModelSpec) -> dict[str, tuple[str, ...]]:
    """Return our linears with the block-local names of what is stacked in each."""
    slots: dict[str, tuple[str, ...]] = {
        "query_key_value": ("query", "key", "value"),
        "output": ("output",),
        "down": ("down",),
    }
    if spec.mlp is MlpKind.GATED:
        return slots | {"gate_up": ("gate", "up")}
    return slots | {"up": ("up",)}


def _find_order(spec: ModelSpec) -> Tensor | None:
    """Return where each of our outputs is among those that are stored head by head."""
    if spec.tensors.fused_order is not FusedOrder.BY_GROUP:
        return None
    group_size = spec.num_heads // spec.num_kv_heads + 2
    indexes_GXD = torch.arange(spec.query_size + 2 * spec.kv_size).view(
        spec.num_kv_heads, group_size, spec.head_dim
    )
    parts = indexes_GXD[:, :-2], indexes_GXD[:, -2], indexes_GXD[:, -1]
    return torch.cat([part.reshape(-1) for part in parts])


def name_matrices(part: AdapterPart) -> tuple[tuple[str, Tensor], tuple[str, Tensor]]:
    """Return both matrices with their names in PEFT."""
    name = PREFIX + part.module
    return (name + DOWN, part.down_RI), (name + UP, part.up_OR)
