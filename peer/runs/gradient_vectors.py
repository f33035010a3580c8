"""Sums of gradients as members of a run send them: exact, or as 8-bit integers.

Sums of gradients are cut into slices, one for each member that sums them (`reduction.py`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from ...kernels.exact_sums import ExactSum, check_units
from ...kernels.wire_tensors import INT8_GROUP, has_only_finite
from ..engine.training.numerics import sum_squares
from ..engine.training.part_tensors import count_bytes, decode, encode

Sums = Mapping[str, ExactSum]
"""The sums of a span, by the names of its weights."""

_SUM, _FINISHED = np.dtype("<f8"), np.dtype("<f4")
"""How whole numbers are sent, in exact mode: to the member that sums them, and from there."""

_NUM_ENDS = 2
"""Tied weights have gradients of each part at two stages."""


def find_slice(members: Sequence[str], member: str, size: int) -> tuple[int, int]:
    """Return which of so many numbers a member sums. Slices begin with a group of int8.

    >>> find_slice("ab", "a", 200), find_slice("ab", "b", 200)
    ((0, 128), (128, 200))
    """
    index, count, num_groups = members.index(member), len(members), -(-size // INT8_GROUP)
    start, stop = (-(-i * num_groups // count) * INT8_GROUP for i in (index, index + 1))
    return min(start, size), min(stop, size)


class GradientVector(ABC):
    """The gradients of some weights, one behind the other: a member's own, then the reduced ones.

    First the member adds the same slice of its mates to its own slice and finishes that, then it
    takes the other slices from the mates that have finished them. It refuses a larger norm than
    parts of an update can have.
    """

    def __init__(
        self, numbers: list[Tensor], sums: Sums, names: Sequence[str], most_norm: float
    ) -> None:
        self.numbers = torch.cat([one.flatten() for one in numbers])
        self.residual: Tensor | None = None
        """Rounding error, which is added to the gradient of the next update (error feedback)."""
        self._sums = sums
        self._names = names
        self._most_norm = most_norm

    def add(self, start: int, stop: int, data: bytes | memoryview) -> None:
        """Add a mate's numbers to our slice. Raises ValueError for what are no gradients."""
        self.numbers[start:stop] += self._decode(start, stop, data, is_reduced=False)

    def load(self, start: int, stop: int, data: bytes | memoryview) -> None:
        """Take a finished slice. Raises ValueError for what are no gradients."""
        self.numbers[start:stop] = self._decode(start, stop, data, is_reduced=True)

    @abstractmethod
    def finish(self, start: int, stop: int) -> None:
        """Make our slice what all members take."""

    @abstractmethod
    def read(self, start: int, stop: int, is_reduced: bool) -> bytes | memoryview:
        """Return a slice for a mate: of our own gradients, or ours that is finished.

        Raises ValueError for another slice.
        """

    @abstractmethod
    def count_bytes(self, num_numbers: int, is_reduced: bool) -> int:
        """Return how many bytes a slice of so many numbers takes."""

    @abstractmethod
    def _decode(
        self, start: int, stop: int, data: bytes | memoryview, *, is_reduced: bool
    ) -> Tensor:
        """Return the numbers of a slice. Raises ValueError for what are no gradients."""

    def read_gradients(self) -> dict[str, Tensor]:
        """Return the reduced gradients by the names of the weights, maybe in our memory."""
        shapes = [self._sums[name].units.shape for name in self._names]
        pieces = self.numbers.split([shape.numel() for shape in shapes])
        views = (piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True))
        return dict(zip(self._names, views, strict=True))

    def _check_norm(self, pieces: Iterable[Tensor], is_reduced: bool) -> None:
        """Raise ValueError for gradients that no parts of an update have."""
        norm = math.sqrt(math.fsum(map(sum_squares, pieces)))
        most_norm = (_NUM_ENDS if is_reduced else 1) * self._most_norm
        if norm > most_norm:
            raise ValueError(f"their norm is {norm:.3g}, and {most_norm:.3g} is the most")


class ExactVector(GradientVector):
    """Gradients as whole numbers, which are summed without any rounding.

    A finished slice is rounded to float32, as the weights take it: it is half as long then.
    """

    def __init__(self, sums: Sums, names: Sequence[str], most_norm: float) -> None:
        super().__init__([sums[name].units for name in names], sums, names, most_norm)
        self._room = sums[names[0]].room

    def finish(self, start: int, stop: int) -> None:
        # Their unit is a power of two, so that they are rounded as the gradients would be.
        self.numbers[start:stop] = self.numbers[start:stop].float()

    def read(self, start: int, stop: int, is_reduced: bool) -> memoryview:
        # A mate's slice is its own numbers here until it has finished it, as it has them then.
        if stop > self.numbers.numel():
            raise ValueError(f"there are no numbers {start}:{stop}")
        numbers = self.numbers[start:stop].numpy()
        return numbers.astype(_FINISHED if is_reduced else _SUM, copy=False).data.cast("B")

    def count_bytes(self, num_numbers: int, is_reduced: bool) -> int:
        return num_numbers * (_FINISHED if is_reduced else _SUM).itemsize

    def read_gradients(self) -> dict[str, Tensor]:
        pieces = super().read_gradients()
        return {name: self._sums[name].convert(piece) for name, piece in pieces.items()}

    def _decode(
        self, start: int, stop: int, data: bytes | memoryview, *, is_reduced: bool
    ) -> Tensor:
        dtype = _FINISHED if is_reduced else _SUM
        numbers = torch.from_numpy(np.frombuffer(data, dtype).astype(np.float64))
        check_units(numbers, self._room, self._room)
        self._check_norm(self._list_pieces(start, numbers), is_reduced)
        return numbers

    def _list_pieces(self, start: int, numbers: Tensor) -> Iterator[Tensor]:
        """Yield the gradients of each weight in a slice."""
        stop, first = start + numbers.numel(), 0
        for name in self._names:
            total = self._sums[name]
            last = first + total.units.numel()
            piece = numbers[max(first, start) - start : max(min(last, stop), start) - start]
            yield total.convert(piece)
            first = last


class Int8Vector(GradientVector):
    """Gradients that are rounded to 8 bits, once by each sender and once by the reducer.

    What rounding leaves out is added to the gradient of the next update (error feedback: Seide et
    al., 2014): the member that rounded keeps it, be it for a slice that it sends or sums. So slices
    may move between updates, and only what a member that dies had left out is lost.
    """

    def __init__(
        self,
        sums: Sums,
        names: Sequence[str],
        residual: Tensor | None,
        slices: Sequence[tuple[int, int]],
        most_norm: float,
    ) -> None:
        """`slices` are those of the mates."""
        super().__init__([sums[name].read() for name in names], sums, names, most_norm)
        if residual is not None:
            self.numbers += residual
        self.residual = self._left_out = torch.zeros_like(self.numbers)
        self._has_mates = bool(slices)
        self._own = {each: self._round(*each) for each in slices}
        self._finished: dict[tuple[int, int], bytes] = {}

    def _round(self, start: int, stop: int) -> bytes:
        """Round a slice, and keep what that leaves out; return its bytes."""
        numbers = self.numbers[start:stop]
        data = encode("int8", numbers)
        rounded = decode("int8", data, numbers.shape)
        self._left_out[start:stop] = numbers - rounded
        numbers.copy_(rounded)
        return data

    def finish(self, start: int, stop: int) -> None:
        if self._has_mates:
            self._finished[start, stop] = self._round(start, stop)

    def read(self, start: int, stop: int, is_reduced: bool) -> bytes:
        data = (self._finished if is_reduced else self._own).get((start, stop))
        if data is None:
            raise ValueError(f"numbers {start}:{stop} are no slice here")
        return data

    def count_bytes(self, num_numbers: int, is_reduced: bool) -> int:
        return count_bytes("int8", (1, 1, num_numbers))

    def _decode(
        self, start: int, stop: int, data: bytes | memoryview, *, is_reduced: bool
    ) -> Tensor:
        numbers = decode("int8", data, (stop - start,))
        if not has_only_finite(numbers):
            raise ValueError("gradients must be finite")
        self._check_norm([numbers], is_reduced)
        return numbers
