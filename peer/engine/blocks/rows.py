"""Whose rows lie where in a batch of several sessions, and how linears treat them.

Tensor suffixes: N rows of all segments (batch times tokens), I input and O output features.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from ....kernels.attention.native_attention import TokenBatch, TokenSegment
from ....kernels.attention.rotary import RotaryTable
from ....kernels.linear.linear import GradientLinears, Linear, RowPrecision
from ..adapters.adapters import AdapterPart
from ..cache.kv_cache import SessionCache
from ..cache.lazy_memory import LazyMemory
from .paged_rows import PagedRows, lay_out_in_pages

Rotation = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines (cos_TD, sin_TD) of positions."""


@dataclass(frozen=True, slots=True)
class Segment:
    """The rows `[start, stop)` of N that belong to one session's step.

    `stop - start == num_rows * num_tokens`; the tokens of a row are consecutive. Tokens with
    `is_decoded` attend one by one, as they were or would be computed. `rotations` are those of
    their positions, in the order of the model's ropes.
    """

    start: int
    stop: int
    num_rows: int
    num_tokens: int
    position: int
    is_decoded: bool
    cache: SessionCache
    rotations: tuple[Rotation, ...]


class Segments:
    """The segments of a batch, in order of their rows, and the tables of the model's ropes.

    Kernels take them in other forms, each of which is made when it is first asked for.
    """

    def __init__(self, segments: Sequence[Segment], rotary: Sequence[RotaryTable]) -> None:
        self.all = segments
        self._rotary = rotary

    @cached_property
    def prompts(self) -> list[Segment]:
        """Those whose tokens attend together."""
        return [segment for segment in self.all if not segment.is_decoded]

    @cached_property
    def decoded(self) -> list[Segment]:
        """The others."""
        return [segment for segment in self.all if segment.is_decoded]

    @cached_property
    def prompt_batches(self) -> list[TokenBatch]:
        """Prompts, laid out for the kernel that takes them at once: one for each rope."""
        return _lay_out(self.prompts)

    @cached_property
    def token_batches(self) -> list[TokenBatch]:
        """The others, laid out for theirs."""
        return _lay_out(self.decoded)

    @cached_property
    def paged_rows(self) -> list[PagedRows]:
        """The others again, where caches lie in pages: one for each format of these."""
        return lay_out_in_pages(self.decoded, self._rotary)


def _lay_out(segments: Sequence[Segment]) -> list[TokenBatch]:
    return [
        TokenBatch([_address(segment, rope) for segment in segments])
        for rope in range(len(segments[0].rotations))
    ]


def _address(segment: Segment, rope: int) -> TokenSegment:
    memory, rotation = segment.cache.memory, segment.rotations[rope]
    assert isinstance(memory, LazyMemory)
    return TokenSegment(
        memory.states_LCBGSD, segment.cache.span.start, segment.start, segment.position, *rotation
    )


@dataclass(frozen=True, slots=True)
class AdaptedRows:
    """Some rows of a range, and what an adapter adds to linears for them."""

    rows: slice
    parts: Mapping[Linear, Sequence[AdapterPart]]


@dataclass(frozen=True, slots=True)
class RowRange:
    """The rows `[start, stop)` of N that linears take in one precision.

    Those of a pass are computed by its `linears`, and changed by its `adapters`.
    """

    start: int
    stop: int
    precision: RowPrecision
    linears: GradientLinears | None = None
    adapters: tuple[AdaptedRows, ...] = ()

    def apply(self, linear: Linear, rows_NI: torch.Tensor) -> torch.Tensor:
        """Return what a linear makes of these rows."""
        if self.linears is None:
            return self._change(linear, rows_NI, linear(rows_NI, self.precision))
        rows_NO = self.linears(linear, rows_NI, self.precision)
        changes = [
            (adapted.rows, part)
            for adapted in self.adapters
            for part in adapted.parts.get(linear, ())
        ]
        if not changes:
            return rows_NO
        added_NO = torch.zeros_like(rows_NO)
        for rows, part in changes:
            added_NO[rows, part.outputs] += part.compute(rows_NI[rows])
        return rows_NO + added_NO

    def _change(self, linear: Linear, rows_NI: torch.Tensor, rows_NO: torch.Tensor) -> torch.Tensor:
        """Add what adapters change in steps, in place."""
        for adapted in self.adapters:
            for part in adapted.parts.get(linear, ()):
                rows_NO[adapted.rows, part.outputs] += part.compute_apart(rows_NI[adapted.rows])
        return rows_NO


def apply_linear(
    linear: Linear, hidden_NI: torch.Tensor, ranges: Sequence[RowRange]
) -> torch.Tensor:
    """Return the linear's `hidden_NO`, each range of rows in its precision."""
    if len(ranges) == 1:
        return ranges[0].apply(linear, hidden_NI)
    return torch.cat([part.apply(linear, hidden_NI[part.start : part.stop]) for part in ranges])
