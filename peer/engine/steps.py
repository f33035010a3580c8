"""Steps of sessions on their way through the blocks of an engine, and how they travel together.

Deep prompts of a session are added to the inputs of blocks wherever their positions are computed:
in a first step, in a replay and after a rollback.

Tensor suffixes: B rows and T tokens of one step, N tokens of all steps (rows times tokens),
L blocks, P positions with prompts, H hidden.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch

from ...kernels.attention.rotary import RotaryTable
from ...kernels.linear.linear import Linear, RowPrecision
from ...kernels.pauses import COST_BETWEEN_PAUSES, NO_PAUSES, GiveWay, Pauses
from ...protocol.errors import ErrorCode, RefusedError, ShoalError
from ...protocol.spans import Span
from .adapters.adapter import Adapter
from .blocks.batch import (
    AdaptedTokens,
    BatchedStep,
    StepBatch,
    TokenRange,
    count_part_tokens,
    cut_adapted,
)
from .cache.kv_cache import SessionCache


@dataclass(frozen=True)
class StepWork:
    """One step of one session, or a part of one, as the engine takes it.

    `hidden_BTH` has the rows of the cache and the model's width, in any float dtype. `row_map`
    reorders the rows of the cache first. `decoded` says that these tokens were computed one by one,
    or are a replay of such tokens: they get the numerics of single tokens, however many arrive at
    once. The `adapter`, if there is one, is applied to all rows.

    A part is made by `cut`; `num_behind` tokens of the step follow it.
    """

    cache: SessionCache
    position: int
    hidden_BTH: torch.Tensor
    row_map: tuple[int, ...] | None = None
    last_token_only: bool = False
    decoded: bool = False
    num_behind: int = 0
    adapter: Adapter | None = None

    @property
    def span(self) -> Span:
        """The hosted blocks that the session uses."""
        return self.cache.span

    @property
    def num_rows(self) -> int:
        """Sequences, B."""
        return self.hidden_BTH.shape[0]

    @property
    def num_tokens(self) -> int:
        """Tokens of each row, T."""
        return self.hidden_BTH.shape[1]

    def cut(self, first: int, num_tokens: int) -> StepWork:
        """Return a part of the step: `num_tokens` tokens from `first` on.

        Parts are to be executed in order. The result of the step is that of its parts joined: with
        int8 weights to the bit, if each but the last has a multiple of the tokens that
        `count_part_tokens` returns for `Engine.part_tokens`, which the scheduler ensures. Float
        linears round the last digit by how many rows they multiply.
        """
        if num_tokens == self.num_tokens:
            return self
        stop = first + num_tokens
        return replace(
            self,
            position=self.position + first,
            hidden_BTH=self.hidden_BTH[:, first:stop],
            row_map=None if first else self.row_map,
            num_behind=self.num_tokens - stop,
        )


@dataclass(frozen=True, slots=True)
class ComputedStep:
    """The hidden states of a computed step, and how long it waited and computed."""

    hidden_BTH: torch.Tensor
    queue_seconds: float
    compute_seconds: float


@dataclass(slots=True)
class AcceptedStep:
    """A step that was accepted, with the hidden states that go into it.

    Linears take `piece_tokens` tokens of one row at a time where that makes a difference to the
    result; None: all of them, together with those of other steps.
    """

    index: int
    work: StepWork
    precision: RowPrecision
    hidden_NH: torch.Tensor
    piece_tokens: int | None = None

    @classmethod
    def accept(
        cls,
        index: int,
        work: StepWork,
        hidden_NH: torch.Tensor,
        is_finite: bool,
        rotary: Sequence[RotaryTable],
        exact_part_tokens: int | None,
    ) -> AcceptedStep:
        """Check a step and prepare its cache; a RefusedError leaves the cache as it was.

        Float32 linears round the last digit by how many rows they multiply. In a cache of integers
        that may tip one, and then a session's tokens would depend on what is computed beside it:
        so with `exact_part_tokens`, the size of parts of prompts, such a step gets pieces.
        """
        if not is_finite:
            raise RefusedError(ErrorCode.BAD_VALUES, "the hidden states are not finite")
        work.cache.prepare(work.position, work.num_tokens, work.row_map, work.num_behind)
        # Not by the number of rows: that depends on how a prompt was cut into steps.
        precision = RowPrecision.TWO_DIGITS if work.decoded else RowPrecision.ONE_DIGIT
        for table in rotary:
            table.reserve(work.position, work.position + work.num_tokens)
        step = cls(index, work, precision, hidden_NH)
        if exact_part_tokens is not None and work.cache.keeps_integers:
            part_tokens = count_part_tokens(work.num_rows, exact_part_tokens)
            step.piece_tokens = 1 if work.decoded else part_tokens
        return step

    def sort_key(self) -> tuple[bool, bool]:
        """Return a key that brings steps of one precision together."""
        return self.piece_tokens is not None, self.precision is RowPrecision.ONE_DIGIT

    def finish(self, output_NH: torch.Tensor, is_finite: bool) -> torch.Tensor | ShoalError:
        """Commit the step if its output is finite, and return it in the shape of the result."""
        num_rows, num_tokens, hidden_size = self.work.hidden_BTH.shape
        if not is_finite:
            self.work.cache.abandon()
            return RefusedError(
                ErrorCode.BAD_VALUES, "these hidden states make the blocks overflow"
            )
        self.work.cache.commit(num_tokens)
        hidden_BTH = output_NH.view(num_rows, num_tokens, hidden_size)
        return hidden_BTH[:, -1:].contiguous() if self.work.last_token_only else hidden_BTH


class StepGroup:
    """Steps that go through the blocks of a span together.

    `places` are theirs among the tokens of all steps; None if they are all of these.
    """

    def __init__(
        self,
        span: Span,
        steps: Sequence[AcceptedStep],
        places: Sequence[slice] | None,
        rotary: Sequence[RotaryTable],
    ) -> None:
        self.span = span
        self._steps = steps
        self._places = places
        batched, self._ranges = _lay_out(steps, rotary)
        self.batch = StepBatch(batched, rotary)
        self._has_adapters = any(step.work.adapter is not None for step in steps)
        self._prompts = [
            prompted
            for step, place in zip(steps, batched, strict=True)
            if (prompted := _find_prompts(step, place, span)) is not None
        ]

    @property
    def is_plain(self) -> bool:
        """Whether nothing but the blocks' weights and the batch decides what is computed."""
        has_pieces = any(step.piece_tokens is not None for step in self._steps)
        return not (self._has_adapters or self._prompts or has_pieces)

    def pick(self, all_NH: torch.Tensor) -> torch.Tensor:
        """Return the hidden states of these steps, [N, H], of those of all."""
        return all_NH if self._places is None else join([all_NH[place] for place in self._places])

    def put(self, hidden_NH: torch.Tensor, all_NH: torch.Tensor) -> torch.Tensor:
        """Return the hidden states of all steps after these have moved on."""
        if self._places is None:
            return hidden_NH
        all_NH = all_NH.clone()
        for ours, place in zip(self.batch.steps, self._places, strict=True):
            all_NH[place] = hidden_NH[ours.start : ours.stop]
        return all_NH

    def add_prompts(self, hidden_NH: torch.Tensor, block: int) -> torch.Tensor:
        """Return the inputs of a block with their deep prompts; those given stay as they are."""
        if not self._prompts:
            return hidden_NH
        hidden_NH = hidden_NH.clone()
        for place, prompts_LBPH in self._prompts:
            prompts_BPH = prompts_LBPH[block - self.span.start]
            hidden_BTH = hidden_NH[place.start : place.stop].unflatten(0, (place.num_rows, -1))
            hidden_BTH[:, : prompts_BPH.shape[1]] += prompts_BPH
        return hidden_NH

    def find_ranges(
        self, block: int, linears: Mapping[str, Linear], give_way: GiveWay | None
    ) -> Sequence[TokenRange]:
        """Return the ranges for a block's linears, with the steps' adapters for these.

        While these are applied, `give_way` is called every few milliseconds.

        The tokens of two steps never share a product with an adapter, even if they share it.
        """
        if not self._has_adapters:
            return self._ranges
        adapted = [
            AdaptedTokens(slice(place.start, place.stop), step.work.adapter.bind(block, linears))
            for step, place in zip(self._steps, self.batch.steps, strict=True)
            if step.work.adapter is not None
        ]
        pauses = NO_PAUSES if give_way is None else Pauses(give_way, COST_BETWEEN_PAUSES)
        return [
            replace(part, adapters=cut_adapted(adapted, part.start, part.stop), pauses=pauses)
            for part in self._ranges
        ]


def group_steps(
    steps: Sequence[AcceptedStep], rotary: Sequence[RotaryTable]
) -> Iterator[StepGroup]:
    """Yield the maximal spans through which the same steps go, in order, with these steps.

    ::

        step A   [0 ............... 6)
        step B             [3 ........... 8)
        yields   0:3 A     3:6 A B   6:8 B
    """
    stops = list(accumulate(len(step.hidden_NH) for step in steps))
    places = [
        slice(stop - len(step.hidden_NH), stop) for step, stop in zip(steps, stops, strict=True)
    ]
    edges = {step.work.span.start for step in steps} | {step.work.span.stop for step in steps}
    for start, stop in pairwise(sorted(edges)):
        span = Span(start, stop)
        active = [n for n, step in enumerate(steps) if step.work.span.covers(span)]
        if len(active) == len(steps):
            yield StepGroup(span, steps, None, rotary)
        elif active:
            yield StepGroup(span, [steps[n] for n in active], [places[n] for n in active], rotary)


def join(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return hidden states of several steps, [N, H] each, one below the other."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _lay_out(
    steps: Sequence[AcceptedStep], rotary: Sequence[RotaryTable]
) -> tuple[list[BatchedStep], list[TokenRange]]:
    """Place the steps' tokens one after the other; ranges of one precision are merged.

    Not those of steps that have pieces: each of these is a range.
    """
    batched: list[BatchedStep] = []
    ranges: list[TokenRange] = []
    may_grow = False
    start = 0
    for step in steps:
        num_rows, num_tokens = step.work.num_rows, step.work.num_tokens
        stop = start + num_rows * num_tokens
        batched.append(
            BatchedStep(
                start=start,
                stop=stop,
                num_rows=num_rows,
                num_tokens=num_tokens,
                position=step.work.position,
                is_decoded=step.work.decoded,
                memory=step.work.cache.memory,
                rotary=rotary,
            )
        )
        if step.piece_tokens is not None:
            ranges += [
                TokenRange(
                    row + first, row + min(first + step.piece_tokens, num_tokens), step.precision
                )
                for row in range(start, stop, num_tokens)
                for first in range(0, num_tokens, step.piece_tokens)
            ]
            may_grow = False
        elif may_grow and ranges[-1].precision is step.precision:
            ranges[-1] = replace(ranges[-1], stop=stop)
        else:
            ranges.append(TokenRange(start, stop, step.precision))
            may_grow = True
        start = stop
    return batched, ranges


def _find_prompts(
    step: AcceptedStep, place: BatchedStep, span: Span
) -> tuple[BatchedStep, torch.Tensor] | None:
    """Return the deep prompts for a step's positions in the blocks of a span, if there are any."""
    prompts_LBPH = step.work.cache.prompts_LBPH
    if prompts_LBPH is None or place.position >= prompts_LBPH.shape[2]:
        return None
    first_block = step.work.span.start
    blocks = slice(span.start - first_block, span.stop - first_block)
    positions = slice(place.position, place.position + place.num_tokens)
    return place, prompts_LBPH[blocks, :, positions]
