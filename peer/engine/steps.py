"""Steps of sessions on their way through the blocks of an engine, and how they travel together.

Tensor suffixes: B rows and T tokens of one step, N rows of all steps (batch times tokens),
H hidden.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from ...kernels.linear.linear import Linear, RowPrecision
from ...protocol.spans import Span
from .adapters.adapters import Adapter
from .blocks.rows import AdaptedRows, Rotation, RowRange, Segment
from .cache.kv_cache import SessionCache


@dataclass(frozen=True)
class StepWork:
    """One step of one session, or a part of one, as the engine takes it.

    `span` is the range of hosted blocks that the session uses here, the one its cache was opened
    for. `hidden_BTH` may be of any float dtype. `row_map` reorders the rows of the cache first.
    `decoded` says that these tokens were computed one by one, or are a replay of such tokens:
    they get the numerics of single tokens, however many arrive at once.

    All rows are changed by the `adapter`, if there is one.

    A part is made by `cut`; `num_behind` tokens of the step follow it.
    """

    cache: SessionCache
    span: Span
    position: int
    hidden_BTH: torch.Tensor
    row_map: tuple[int, ...] | None = None
    last_token_only: bool = False
    decoded: bool = False
    num_behind: int = 0
    adapter: Adapter | None = None

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
        `scheduler.count_part_tokens` returns for `Engine.part_tokens`, which the scheduler sees to.
        Float linears round the last digit by how many rows they multiply.
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


@dataclass(slots=True)
class AcceptedStep:
    """A step that was accepted, with its hidden states as they move through the blocks.

    Linears take `piece_tokens` tokens of one row at a time, where that makes a difference to the
    result; None: all of them, together with those of others.
    """

    index: int
    work: StepWork
    precision: RowPrecision
    rotations: tuple[Rotation, ...]
    hidden_NH: torch.Tensor
    piece_tokens: int | None = None


def cut_stretches(steps: Sequence[AcceptedStep]) -> Iterator[tuple[Span, list[AcceptedStep]]]:
    """Yield the maximal spans through which the same steps go, in order, with these steps.

    ::

        step A   [0 ............... 6)
        step B             [3 ........... 8)
        yields   0:3 A     3:6 A B   6:8 B
    """
    edges = {step.work.span.start for step in steps} | {step.work.span.stop for step in steps}
    for start, stop in pairwise(sorted(edges)):
        stretch = Span(start, stop)
        active = [step for step in steps if step.work.span.covers(stretch)]
        if active:
            yield stretch, active


def lay_out(steps: Sequence[AcceptedStep]) -> tuple[list[Segment], list[RowRange]]:
    """Place the steps' rows one after the other; ranges of one precision are merged.

    Not those of steps that have pieces: each of these is a range.
    """
    segments: list[Segment] = []
    ranges: list[RowRange] = []
    may_grow = False
    start = 0
    for step in steps:
        num_rows, num_tokens, _ = step.work.hidden_BTH.shape
        stop = start + num_rows * num_tokens
        segments.append(
            Segment(
                start=start,
                stop=stop,
                num_rows=num_rows,
                num_tokens=num_tokens,
                position=step.work.position,
                is_decoded=step.work.decoded,
                cache=step.work.cache,
                rotations=step.rotations,
            )
        )
        if step.piece_tokens is not None:
            ranges += [
                RowRange(
                    row + first, row + min(first + step.piece_tokens, num_tokens), step.precision
                )
                for row in range(start, stop, num_tokens)
                for first in range(0, num_tokens, step.piece_tokens)
            ]
            may_grow = False
        elif may_grow and ranges[-1].precision is step.precision:
            ranges[-1] = replace(ranges[-1], stop=stop)
        else:
            ranges.append(RowRange(start, stop, step.precision))
            may_grow = True
        start = stop
    return segments, ranges


def adapt(
    ranges: Sequence[RowRange],
    steps: Sequence[AcceptedStep],
    placed: Sequence[Segment],
    block: int,
    linears: Mapping[str, Linear],
) -> Sequence[RowRange]:
    """Return the ranges with what the steps' adapters change in a block: each its own rows.

    The rows of two steps never share a product, even if they share the adapter.
    """
    adapted = [
        (segment, step.work.adapter.bind(block, linears))
        for step, segment in zip(steps, placed, strict=True)
        if step.work.adapter is not None
    ]
    return [
        replace(
            part,
            adapters=tuple(
                AdaptedRows(
                    slice(
                        max(segment.start, part.start) - part.start,
                        min(segment.stop, part.stop) - part.start,
                    ),
                    parts,
                )
                for segment, parts in adapted
                if segment.start < part.stop and part.start < segment.stop
            ),
        )
        for part in ranges
    ]
