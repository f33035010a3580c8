"""The inputs of blocks in recent forward passes, kept for their backward passes."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterable, Sequence

import torch
from torch import Tensor

from ....protocol.spans import Span


class ActivationCache:
    """Keeps the newest inputs that fit, until they are taken. Nothing may rely on them.

    A pass is found by its contents, so its inputs are those that computing would give again.
    """

    def __init__(self) -> None:
        self._kept: dict[Hashable, list[Tensor]] = {}
        self._budget_bytes = 0
        self._num_bytes = 0

    def __repr__(self) -> str:
        return f"<ActivationCache of {len(self._kept)} passes, {self._num_bytes:,} bytes>"

    @property
    def num_bytes(self) -> int:
        """Memory of everything kept."""
        return self._num_bytes

    def limit(self, budget_bytes: int) -> None:
        """Keep at most so many bytes from now on."""
        self._budget_bytes = budget_bytes
        self.make_room(0)

    def make_room(self, num_bytes: int) -> bool:
        """Forget the oldest until there is room for so much; False where there never is."""
        if num_bytes > self._budget_bytes:
            return False
        while self._num_bytes + num_bytes > self._budget_bytes:
            self.take(next(iter(self._kept)))
        return True

    def keep(self, key: Hashable, inputs: list[Tensor]) -> None:
        """Keep the inputs of all blocks of a pass, if there is room."""
        self.take(key)
        num_bytes = _count_bytes(inputs)
        if self.make_room(num_bytes):
            self._kept[key] = inputs
            self._num_bytes += num_bytes

    def take(self, key: Hashable) -> list[Tensor] | None:
        """Return the inputs of a pass and forget them; None where they are not kept."""
        inputs = self._kept.pop(key, None)
        if inputs is not None:
            self._num_bytes -= _count_bytes(inputs)
        return inputs


def make_pass_key(
    span: Span, tensors: Iterable[Tensor | None], others: Sequence[Hashable]
) -> Hashable:
    """Return a key of a pass: its blocks, a digest of its tensors on the CPU, and others."""
    digest = hashlib.blake2b(digest_size=32)
    shapes: list[Hashable] = []
    for tensor in tensors:
        if tensor is not None:
            digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
        shapes.append(None if tensor is None else (tensor.dtype, tensor.shape))
    return span, tuple(shapes), tuple(others), digest.digest()


def _count_bytes(inputs: Sequence[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in inputs)
