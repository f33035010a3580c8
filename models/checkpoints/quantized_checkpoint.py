"""Checkpoints that come quantized: which kinds can be read, and what their linears stand for.

Each kind has a file: `gptq.py`, `awq.py`, `compressed_tensors.py`. They read one linear at a time;
what they cannot read is a CheckpointError that calls it by its name.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from typing import Protocol, cast

import torch
from torch import Tensor

from ...kernels.linear.quantize import Int8Weight
from .checkpoint import CheckpointError

FLOATS = (torch.float16, torch.bfloat16, torch.float32)


class Tensors(Protocol):
    """What is needed of a `Checkpoint`."""

    def has(self, name: str) -> bool:
        """Return whether a tensor of this name is stored."""
        ...

    def load(self, name: str) -> Tensor:
        """Return one tensor in its stored dtype."""
        ...


class QuantizedLinears(ABC):
    """How a checkpoint stores the weights of linears; what is not quantized is stored as usual.

    `stem` is the usual name of a weight without its last word, "weight".
    """

    @abstractmethod
    def stores(self, tensors: Tensors, stem: str) -> bool:
        """Return whether this linear is stored quantized."""

    @abstractmethod
    def load(self, tensors: Tensors, stem: str, shape: tuple[int, int]) -> Tensor | Int8Weight:
        """Return the matrix [out, in] of this shape, in memory of its own.

        In int8 if that is what is stored, else in float32. Raises CheckpointError when a part is
        missing or is not what the configuration makes it.
        """


class Settings:
    """Checked access to the `quantization_config` of a `config.json`, or an object in it."""

    def __init__(self, values: Mapping[str, object], method: str) -> None:
        self._values = values
        self._method = method

    def get(self, *names: str, default: object = None) -> object:
        """Return the first of these values that is there and not null."""
        found = (self._values[name] for name in names if self._values.get(name) is not None)
        return next(found, default)

    def choose(self, *names: str, among: Collection[object], default: object = None) -> object:
        """Return a value that must be one of a few; it may have several names."""
        value = self.get(*names, default=default)
        # True would pass for 1, and an unhashable value for an error.
        if not any(value == allowed and type(value) is type(allowed) for allowed in among):
            known = ", ".join(map(str, among))
            raise CheckpointError(
                f"config.json: {self._method} with {names[0]} {value!r:.60} is not supported, only "
                f"{known}; use another checkpoint of this model"
            )
        return value

    def read_group_size(self) -> int | None:
        """Return how many inputs share a scale, None for all of them."""
        value = self.get("group_size", default=-1)
        if not isinstance(value, int) or isinstance(value, bool) or value == 0 or value < -1:
            raise CheckpointError(
                f"config.json: {self._method} with group_size {value!r:.60} makes no sense; "
                "download the model again"
            )
        return None if value == -1 else value

    def read_object(self, name: str) -> "Settings":
        """Return a JSON object in these settings, empty if there is none."""
        return Settings(as_mapping(self.get(name, default={}), name), self._method)


def as_mapping(value: object, name: str) -> Mapping[str, object]:
    """Return a JSON object, or raise CheckpointError."""
    if not isinstance(value, Mapping):
        raise CheckpointError(f"config.json: {name} must be an object, got {value!r:.60}")
    return cast(Mapping[str, object], value)


def load_part(
    tensors: Tensors, name: str, shape: tuple[int, ...], dtypes: Collection[torch.dtype]
) -> Tensor:
    """Return a tensor that must have this shape and one of these dtypes, and be finite."""
    tensor = tensors.load(name)
    if tuple(tensor.shape) != shape:
        raise CheckpointError(
            f"tensor {name} has shape {tuple(tensor.shape)}, config.json makes it {shape}"
        )
    if tensor.dtype not in dtypes:
        expected = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise CheckpointError(f"tensor {name} is stored as {tensor.dtype} in place of {expected}")
    if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
        raise CheckpointError(f"tensor {name} holds NaN or infinity")
    return tensor


def load_groups(tensors: Tensors, name: str, num_inputs: int, num_groups: int) -> Tensor:
    """Return the stored group of each input."""
    groups_I = load_part(tensors, name, (num_inputs,), (torch.int32, torch.int64)).long()
    if bool(((groups_I < 0) | (groups_I >= num_groups)).any()):
        raise CheckpointError(f"tensor {name} names groups beyond the {num_groups} that there are")
    return groups_I
