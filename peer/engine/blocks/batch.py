"""The input of a block: the tokens of a batch, and how linears treat them.

A block computes either a `StepBatch`, steps of sessions over their KV caches, or a `PassBatch`,
rows that are computed from their beginning and leave nothing behind. Both are one tensor of tokens
to linears, which take it in ranges::

    tokens    0 ............ 34 .. 36 ........... 100
    steps     [ prompt of A )[ B  )[ prompt of C   )
    ranges    [ one digit   )[two )[ one digit     )     with the adapters of A, B and C

Tensor suffixes: N tokens of all rows in the batch, I input and O output features.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar, cast

import torch

from ....kernels.attention.rotary import RotaryTable, Rotation
from ....kernels.linear.linear import GradientLinears, Linear, RowPrecision, get_values
from ....kernels.linear.quantize import Rows
from ....kernels.pauses import NO_PAUSES, Pauses
from ..adapters.adapter import AdapterPart
from ..cache.kv_memory import SessionMemory

PASS_PRECISION = RowPrecision.ONE_DIGIT
"""To int8 weights the tokens of a pass are those of a prompt."""

PART_TOKENS = 64
"""Rows times tokens of one part of a prompt where its size makes a difference: large enough for
torch's attention to be quick."""

SHORT_PART_TOKENS = 16
"""The same where a prompt may be cut anywhere: the least that is worth reading the weights for."""

Form = TypeVar("Form")


def count_part_tokens(num_rows: int, part_tokens: int = PART_TOKENS) -> int:
    """Return how many tokens per row make one part of a prompt: a power of two.

    >>> [count_part_tokens(num_rows) for num_rows in (1, 2, 3, 100)]
    [64, 32, 16, 1]
    """
    return 2 ** (max(1, part_tokens // num_rows).bit_length() - 1)


@dataclass(frozen=True, slots=True)
class AdaptedTokens:
    """Some tokens, and the adapter matrices for each linear that are applied to them."""

    tokens: slice
    parts: Mapping[Linear, Sequence[AdapterPart]]


def cut_adapted(
    adapted: Iterable[AdaptedTokens], start: int, stop: int
) -> tuple[AdaptedTokens, ...]:
    """Return what lies in a range of tokens, counted from its start."""
    return tuple(
        AdaptedTokens(
            slice(max(one.tokens.start, start) - start, min(one.tokens.stop, stop) - start),
            one.parts,
        )
        for one in adapted
        if one.tokens.start < stop and start < one.tokens.stop
    )


@dataclass(frozen=True, slots=True)
class TokenRange:
    """The tokens `[start, stop)` of N, which linears take in one precision.

    Those of a pass are computed by its `linears`. Slices of `adapters` count from `start`; steps
    apply them with `pauses`.
    """

    start: int
    stop: int
    precision: RowPrecision
    linears: GradientLinears | None = None
    adapters: tuple[AdaptedTokens, ...] = ()
    pauses: Pauses = NO_PAUSES

    def apply(
        self, linear: Linear, tokens: Rows, added_NO: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the linear's output for these tokens, added to `added_NO` if that is given."""
        if self.linears is None and not self.adapters:
            return linear.multiply_and_add(tokens, self.precision, added_NO)
        tokens_NI = get_values(tokens)
        if self.linears is None:
            tokens_NO = self._adapt_in_place(linear, tokens_NI, linear(tokens_NI, self.precision))
        else:
            tokens_NO = self._run(self.linears, linear, tokens_NI)
        return tokens_NO if added_NO is None else added_NO + tokens_NO

    def _run(
        self, linears: GradientLinears, linear: Linear, tokens_NI: torch.Tensor
    ) -> torch.Tensor:
        tokens_NO = linears(linear, tokens_NI, self.precision)
        changes = [
            (adapted.tokens, part)
            for adapted in self.adapters
            for part in adapted.parts.get(linear, ())
        ]
        if not changes:
            return tokens_NO
        added_NO = torch.zeros_like(tokens_NO)
        for tokens, part in changes:
            added_NO[tokens, part.outputs] += part.compute(tokens_NI[tokens])
        return tokens_NO + added_NO

    def _adapt_in_place(
        self, linear: Linear, tokens_NI: torch.Tensor, tokens_NO: torch.Tensor
    ) -> torch.Tensor:
        for adapted in self.adapters:
            for part in adapted.parts.get(linear, ()):
                rows_NI, target_NO = (
                    tokens_NI[adapted.tokens],
                    tokens_NO[adapted.tokens, part.outputs],
                )
                for rows in self.pauses.cut(len(rows_NI), part.row_cost):
                    part.add_to(rows_NI[rows], target_NO[rows])
        return tokens_NO


def apply_linear(
    linear: Linear,
    rows: Rows,
    ranges: Sequence[TokenRange],
    added_NO: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the linear's output, each range of tokens in its precision.

    It is added to `added_NO` if that is given.
    """
    if len(ranges) == 1:
        return ranges[0].apply(linear, rows, added_NO)
    places = [slice(part.start, part.stop) for part in ranges]
    return torch.cat(
        [
            part.apply(linear, rows[place], None if added_NO is None else added_NO[place])
            for part, place in zip(ranges, places, strict=True)
        ]
    )


@dataclass(frozen=True)
class BatchedStep:
    """One session's step in a batch: the tokens `[start, stop)` of N.

    `stop - start == num_rows * num_tokens`; the tokens of a row are consecutive. Tokens with
    `is_decoded` attend one by one, as they were or would be computed. `rotary` are the tables of
    the model's ropes, which have all positions of the step.
    """

    start: int
    stop: int
    num_rows: int
    num_tokens: int
    position: int
    is_decoded: bool
    memory: SessionMemory
    rotary: Sequence[RotaryTable]

    @cached_property
    def rotations(self) -> tuple[Rotation, ...]:
        """Those of the step's positions, in the order of the model's ropes."""
        return tuple(table.rows(self.position, self.num_tokens) for table in self.rotary)


class StepBatch:
    """Steps of several sessions in the order of their tokens, and the tables of the model's ropes.

    Kernels take them in other forms, each of which is made once for all blocks.
    """

    def __init__(
        self,
        steps: Sequence[BatchedStep],
        rotary: Sequence[RotaryTable],
        forms: Mapping[Callable[[StepBatch], object], object] | None = None,
    ) -> None:
        self.steps = steps
        self.rotary = rotary
        self._forms: dict[Callable[[StepBatch], object], object] = dict(forms or {})

    @cached_property
    def prompts(self) -> list[BatchedStep]:
        """Those whose tokens attend together."""
        return [step for step in self.steps if not step.is_decoded]

    @cached_property
    def decoded(self) -> list[BatchedStep]:
        """The others."""
        return [step for step in self.steps if step.is_decoded]

    def in_form(self, make: Callable[[StepBatch], Form]) -> Form:
        """Return the form that `make` gives the batch, made at the first call."""
        if make not in self._forms:
            self._forms[make] = make(self)
        return cast(Form, self._forms[make])


@dataclass(frozen=True)
class PassBatch:
    """Rows that all have `num_tokens` tokens, which attend to those before them in their row.

    `rotations` are those of the tokens' positions, in the order of the model's ropes. The parts of
    a block that treat each token alone take `tokens_at_once` of them, which saves memory.
    """

    num_rows: int
    num_tokens: int
    rotations: tuple[Rotation, ...]
    pauses: Pauses
    tokens_at_once: int
    adapters: tuple[AdaptedTokens, ...] = ()
    """Those of the block that computes the batch."""

    def cut(
        self, *, is_whole: bool = False, unread: Linear | None = None
    ) -> list[tuple[slice, list[TokenRange]]]:
        """Return pieces of N with their range for linears; or one piece of all N.

        The output of a linear that is `unread` need not be computed.
        """
        linears = GradientLinears(self.pauses, is_keeping=not is_whole, unread=unread)
        num_all = self.num_rows * self.num_tokens
        step = num_all if is_whole else self.tokens_at_once
        pieces = [slice(start, min(start + step, num_all)) for start in range(0, num_all, step)]
        return [
            (
                piece,
                [
                    TokenRange(
                        0,
                        piece.stop - piece.start,
                        PASS_PRECISION,
                        linears,
                        cut_adapted(self.adapters, piece.start, piece.stop),
                    )
                ],
            )
            for piece in pieces
        ]


class HostedBlock(ABC):
    """One decoder block with its weights on the device.

    `is_cut_anywhere`: its attention gives the same wherever a prompt is cut into parts.
    `has_fixed_shapes`: its work for generated tokens follows from their number alone.
    `attention_kernels` name what attends, for people. `linears` are those that adapters may change,
    by our names for them.
    """

    num_bytes: int
    is_cut_anywhere: bool
    has_fixed_shapes: bool
    attention_kernels: Sequence[str]
    linears: Mapping[str, Linear]

    @abstractmethod
    def __call__(
        self, hidden_NH: torch.Tensor, batch: StepBatch, ranges: Sequence[TokenRange]
    ) -> torch.Tensor:
        """Return the block's output; writes new keys and values into the sessions' memory."""

    @abstractmethod
    def run_pass(self, hidden_NH: torch.Tensor, batch: PassBatch) -> torch.Tensor:
        """Return the block's output for a batch without KV caches."""

    @abstractmethod
    def run_pass_back(
        self, hidden_NH: torch.Tensor, grads_NH: torch.Tensor, batch: PassBatch
    ) -> torch.Tensor:
        """Return the gradients of the block's input, given those of its output."""


def differentiate(
    function: Callable[..., torch.Tensor], inputs: Sequence[torch.Tensor], grads: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Return the gradients of a function's inputs, given those of its output.

    Those of adapters accumulate in their matrices.
    """
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    with torch.enable_grad():
        output = function(*leaves)
    torch.autograd.backward(output, grads)
    return tuple(leaf.grad for leaf in leaves if leaf.grad is not None)
