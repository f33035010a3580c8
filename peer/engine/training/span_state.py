"""The state of a span as it is sent: its bytes, and the digests that show what they are."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

WEIGHTS_PREFIX = "weights/"
"""Of the names of weights in a state."""

MOST_STATE_COPIES, MOST_WEIGHT_COPIES = 1, 2
"""How many copies of a state, and of its weights alone, are sent to others at the same time. With
two, one that reads slowly does not keep others from a later update.
"""

_ALIGNMENT = 8


def digest_tensors(tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of named tensors in the order of their names."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


@dataclass(frozen=True)
class StateDigest:
    """Digests of the weights in a state, and of the rest: who gets the weights only checks both."""

    weights: bytes
    rest: bytes

    @classmethod
    def of(cls, state: Mapping[str, Tensor]) -> StateDigest:
        """Return the digests of a state."""
        weights = pick_weights(state)
        rest = {name: one for name, one in state.items() if not name.startswith(WEIGHTS_PREFIX)}
        return cls(bytes.fromhex(digest_tensors(weights)), bytes.fromhex(digest_tensors(rest)))

    @property
    def whole(self) -> bytes:
        """The digest of the state."""
        return hashlib.sha256(self.weights + self.rest).digest()


def pick_weights(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of a state by their names in a checkpoint."""
    named = [name for name in state if name.startswith(WEIGHTS_PREFIX)]
    return {name.removeprefix(WEIGHTS_PREFIX): state[name] for name in named}


class StateLayout:
    """Where tensors lie in their bytes: one behind the other, in the order of their names.

    Whoever gets the bytes knows names, shapes and dtypes from the run, and takes nothing else.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        """Tensors on the meta device do as well."""
        self._tensors = {
            name: torch.empty_like(tensors[name], device="meta") for name in sorted(tensors)
        }
        self._starts: dict[str, int] = {}
        self.num_bytes = 0
        for name, tensor in self._tensors.items():
            self._starts[name] = self.num_bytes
            self.num_bytes += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT

    def pack(self, tensors: Mapping[str, Tensor]) -> memoryview:
        """Return a copy of tensors of this layout, as bytes."""
        data = bytearray(self.num_bytes)
        for name, place in self._list_places(data).items():
            place.copy_(tensors[name])
        return memoryview(data)

    def unpack(self, data: memoryview | bytearray) -> dict[str, Tensor]:
        """Return the tensors in these bytes, which they share. Raises ValueError."""
        if len(data) != self.num_bytes:
            raise ValueError(f"{len(data)} bytes came, and {self.num_bytes} were expected")
        return self._list_places(data)

    def _list_places(self, data: memoryview | bytearray) -> dict[str, Tensor]:
        return {
            name: torch.frombuffer(
                data, dtype=tensor.dtype, count=tensor.numel(), offset=self._starts[name]
            ).view(tensor.shape)
            for name, tensor in self._tensors.items()
        }
