"""An adapter that is trained at the peer: its optimizer's moments and accumulated gradients.

All numbers are float32. Everything here changes on the compute thread only. An update makes a new
adapter and leaves the old one as it was, so an update that fails or is cancelled changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ....kernels.pauses import GiveWay
from ....protocol.errors import ErrorCode, RefusedError
from ....protocol.limits import MAX_GRADIENT_PARTS
from ....protocol.messages.adapters import GradientSum, OptimizerKind, OptimizerSettings
from ....protocol.messages.passes import AccumulationOrder
from .adapter import Adapter, AdapterPart
from .adapter_file import name_matrices

_NUMBERS_AT_ONCE = 2**18
"""An update goes through six tensors: so many numbers of each take about a millisecond."""


class AccumulatedGradients:
    """The sum of an adapter's gradients; each backward pass adds its own as one part."""

    def __init__(self) -> None:
        self._number = 0
        self._parts: set[int] = set()
        self._sums: dict[str, Tensor] = {}
        self._num_being_added = 0

    def add(
        self, order: AccumulationOrder, gradients: Mapping[str, Tensor], give_way: GiveWay
    ) -> None:
        """Add the gradients of one pass, unless they are in the sum already.

        Raises RefusedError, and adds nothing, if they are not finite or belong to a sum before.
        """
        if order.number < self._number:
            raise _refuse_sum()
        _check_finite(gradients, give_way)
        if order.number > self._number:
            self._number, self._parts, self._sums = order.number, set(), {}
            self._num_being_added = 0
        parts, sums = self._parts, self._sums
        if order.part in parts:
            return
        if len(parts) + self._num_being_added >= MAX_GRADIENT_PARTS:
            detail = f"gradients of {MAX_GRADIENT_PARTS} passes are the most that one update has"
            raise RefusedError(ErrorCode.BAD_VALUES, detail)
        # A pass that nobody waits for any more may end between two matrices: such a sum is neither
        # with this part nor without, which `take` finds out.
        self._num_being_added += 1
        for name, gradient in gradients.items():
            give_way()
            known = sums.get(name)
            if known is None:
                sums[name] = gradient * order.scale
            else:
                known.add_(gradient, alpha=order.scale)
        if parts is self._parts:
            parts.add(order.part)
            self._num_being_added -= 1

    def take(self, asked: GradientSum) -> Mapping[str, Tensor]:
        """Return the sum of exactly these parts.

        Raises RefusedError with UNKNOWN_ADAPTER if there is another sum: they have to be computed
        again.
        """
        if not asked.parts and asked.number >= self._number:
            return {}
        is_same = asked.number == self._number and self._parts == set(asked.parts)
        if not is_same or self._num_being_added:
            raise _refuse_sum()
        return self._sums

    def sum_squares(self, asked: GradientSum, give_way: GiveWay) -> float:
        """Return the sum of the squares of all gradients; raises what `take` does.

        Raises RefusedError with BAD_VALUES if that is more than a float32 can be.
        """
        total = 0.0
        for gradient in self.take(asked).values():
            for piece in gradient.view(-1).split(_NUMBERS_AT_ONCE):
                give_way()
                total += float(piece.double().square().sum())
        if not total <= torch.finfo(torch.float32).max:
            raise RefusedError(ErrorCode.BAD_VALUES, "the sum of these gradients is not finite")
        return total


@dataclass(eq=False)
class TrainedAdapter:
    """An adapter, and what its optimizer remembers: moments in the form of adapters."""

    adapter: Adapter
    kind: OptimizerKind
    moments: tuple[Adapter, ...]
    num_updates: int
    accumulated: AccumulatedGradients

    @classmethod
    def begin(
        cls, files: Sequence[Adapter], kind: OptimizerKind, num_updates: int
    ) -> TrainedAdapter:
        """Return one of which the optimizer remembers nothing, or what the later files say.

        Raises RefusedError for numbers that no update can have left there.
        """
        adapter, *moments = files
        if any(matrix.dtype is not torch.float32 for file in files for matrix in _list(file)):
            raise RefusedError(ErrorCode.BAD_VALUES, "an adapter is trained in float32")
        if not moments:
            moments = [_map(adapter, torch.zeros_like) for _ in range(kind.num_moments)]
        if any(one.parts.keys() != adapter.parts.keys() for one in moments):
            raise RefusedError(ErrorCode.BAD_VALUES, "the moments belong to another adapter")
        has_squares = kind is OptimizerKind.ADAMW
        if has_squares and any(bool((matrix < 0).any()) for matrix in _list(moments[1])):
            raise RefusedError(ErrorCode.BAD_VALUES, "second moments are below zero")
        return cls(adapter, kind, tuple(moments), num_updates, AccumulatedGradients())

    def move_to(self, torch_device: torch.device) -> TrainedAdapter:
        """Return it on a device."""
        moments = tuple(one.move_to(torch_device) for one in self.moments)
        return replace(self, adapter=self.adapter.move_to(torch_device), moments=moments)

    def update(
        self,
        asked: GradientSum,
        settings: OptimizerSettings,
        factor: float,
        give_way: GiveWay,
    ) -> TrainedAdapter:
        """Return what an update with its accumulated gradients, times `factor`, makes of it.

        Matrices of which there are none have gradients of zero. Raises RefusedError if they are
        others than asked for, if it has another optimizer, or if the result is not finite.
        """
        if settings.kind is not self.kind:
            raise RefusedError(ErrorCode.BAD_VALUES, f"the adapter is trained by {self.kind.name}")
        sums = self.accumulated.take(asked)
        number = self.num_updates + 1
        made = [_map(one, torch.empty_like) for one in (self.adapter, *self.moments)]
        befores = zip(*(_name(one) for one in (self.adapter, *self.moments)), strict=True)
        afters = zip(*(_name(one) for one in made), strict=True)
        for before, after in zip(befores, afters, strict=True):
            name = before[0][0]
            flats = [matrix.reshape(-1) for _, matrix in before]
            targets = [matrix.view(-1) for _, matrix in after]
            gradient = sums.get(name)
            flat_gradient = None if gradient is None else gradient.reshape(-1)
            for part in _cut(len(flats[0])):
                give_way()
                numbers = [flat[part] for flat in flats]
                if flat_gradient is None:
                    part_gradient = torch.zeros_like(numbers[0])
                else:
                    part_gradient = flat_gradient[part] * factor
                results = _RULES[self.kind](numbers, part_gradient, settings, number)
                for target, result in zip(targets, results, strict=True):
                    if not bool(result.isfinite().all()):
                        raise RefusedError(
                            ErrorCode.BAD_VALUES,
                            f"{name:.200} would no longer be finite; lower the learning rate",
                        )
                    target[part] = result
        return TrainedAdapter(made[0], self.kind, tuple(made[1:]), number, AccumulatedGradients())

    def copy_matrices(self, give_way: GiveWay) -> list[dict[str, Tensor]]:
        """Return its matrices and then each of its moments by PEFT's names, on the CPU.

        Those that are there already are not copied: nothing writes to them any more.

        Before the first update there are no moments.
        """
        files: list[dict[str, Tensor]] = []
        for one in (self.adapter, *(self.moments if self.num_updates else ())):
            copies: dict[str, Tensor] = {}
            for name, matrix in _name(one):
                give_way()
                copies[name] = matrix.cpu().contiguous()
            files.append(copies)
        return files


def _update_adamw(
    numbers: Sequence[Tensor], gradient: Tensor, settings: OptimizerSettings, number: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Loshchilov and Hutter 2019, algorithm 2, as torch computes it."""
    weight, mean, square = numbers
    beta1, beta2 = settings.beta1, settings.beta2
    mean = mean.lerp(gradient, 1 - beta1)
    square = (square * beta2).addcmul_(gradient, gradient, value=1 - beta2)
    root = square.sqrt().div_(math.sqrt(1 - beta2**number)).add_(settings.epsilon)
    weight = weight * (1 - settings.learning_rate * settings.weight_decay)
    weight.addcdiv_(mean, root, value=-settings.learning_rate / (1 - beta1**number))
    return weight, mean, square


def _update_sgd(
    numbers: Sequence[Tensor], gradient: Tensor, settings: OptimizerSettings, number: int
) -> tuple[Tensor, Tensor]:
    weight, momentum = numbers
    gradient = gradient.add(weight, alpha=settings.weight_decay)
    momentum = (momentum * settings.momentum).add_(gradient)
    return weight.add(momentum, alpha=-settings.learning_rate), momentum


_RULES: Mapping[OptimizerKind, Callable[..., tuple[Tensor, ...]]] = {
    OptimizerKind.ADAMW: _update_adamw,
    OptimizerKind.SGD: _update_sgd,
}
"""From numbers, their moments and gradients, the settings, and how many updates that makes."""


def _check_finite(gradients: Mapping[str, Tensor], give_way: GiveWay) -> None:
    for name, gradient in gradients.items():
        give_way()
        if not bool(gradient.isfinite().all()):
            raise RefusedError(
                ErrorCode.BAD_VALUES, f"the gradients of {name:.200} are not finite; none are added"
            )


def _refuse_sum() -> RefusedError:
    return RefusedError(
        ErrorCode.UNKNOWN_ADAPTER, "this peer has accumulated other gradients for the adapter"
    )


def _map(adapter: Adapter, make: Callable[[Tensor], Tensor]) -> Adapter:
    """Return an adapter of the same shape with other matrices."""

    def change(part: AdapterPart) -> AdapterPart:
        return replace(part, down_RI=make(part.down_RI), up_OR=make(part.up_OR))

    parts = {key: tuple(map(change, parts)) for key, parts in adapter.parts.items()}
    return Adapter(adapter.rank, parts)


def _name(adapter: Adapter) -> Iterator[tuple[str, Tensor]]:
    """Yield all matrices with their names, of adapters of one shape in the same order."""
    for _, parts in sorted(adapter.parts.items()):
        for part in sorted(parts, key=lambda part: part.module):
            yield from name_matrices(part)


def _list(adapter: Adapter) -> list[Tensor]:
    return [matrix for _, matrix in _name(adapter)]


def _cut(num_numbers: int) -> Iterator[slice]:
    for start in range(0, num_numbers, _NUMBERS_AT_ONCE):
        yield slice(start, min(start + _NUMBERS_AT_ONCE, num_numbers))
