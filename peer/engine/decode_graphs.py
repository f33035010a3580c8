"""Steps of generated tokens, captured once for each size and run again.

A device computes a block faster than the processor can ask for it, operation by operation. So a
step through all blocks is captured, on tensors that stay, and asked for as a whole.

Tensor suffixes: N rows of the step, padded; H hidden; M pages of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from .blocks.capturer import Capturer
from .blocks.paged_rows import PagedRows
from .blocks.rows import Rotation, Segments

MAX_ROWS = 64
"""Steps of more rows keep a device busy for long enough."""

LEAST_TABLE_PAGES = 64
"""Tables are as wide as the longest text needs, of widths that are four times as large each: few
to capture, and what is too wide costs little, since nothing is read behind the end of a text."""

ROW_COUNTS = tuple(2**power for power in range(MAX_ROWS.bit_length()))
"""How many rows there are after padding."""

Compute = Callable[[torch.Tensor, Segments], torch.Tensor]
"""All blocks: hidden states [N, H] in, and out, of decoded rows."""


class DecodeGraphs:
    """Takes steps of generated tokens through all blocks of an engine."""

    def __init__(self, compute: Compute, capturer: Capturer) -> None:
        self._compute = compute
        self._capturer = capturer
        self._steps: dict[tuple[int, int, torch.dtype], _CapturedStep] = {}

    def __repr__(self) -> str:
        sizes = [f"{rows} x {pages}" for rows, pages, _ in self._steps]
        return f"<DecodeGraphs of {', '.join(sizes) or 'nothing yet'}>"

    @staticmethod
    def can_run(segments: Segments) -> bool:
        """Return whether these are few rows, all of generated tokens, in caches of one format."""
        is_small = segments.all[-1].stop <= MAX_ROWS
        return is_small and not segments.prompts and len(segments.paged_rows) == 1

    def run(self, hidden_NH: torch.Tensor, rows: PagedRows) -> torch.Tensor:
        """Return the hidden states behind the blocks; writes into the rows' caches."""
        num_rows, num_pages = rows.tables_NM.shape
        size = choose_size(num_rows, num_pages)
        key = (*size, rows.layout.dtype)
        step = self._steps.get(key)
        if step is None:
            step = _CapturedStep.make(hidden_NH, rows, size)
            step.fill(hidden_NH, rows)
            step.run_again = self._capturer.capture(lambda: step.compute(self._compute))
            self._steps[key] = step
        step.fill(hidden_NH, rows)
        step.run_again()
        return step.output_NH[:num_rows].clone()


def choose_size(num_rows: int, num_pages: int) -> tuple[int, int]:
    """Return the rows and the pages of a row that a step is padded to.

    >>> choose_size(1, 3), choose_size(5, 65)
    ((1, 64), (8, 256))
    """
    width = LEAST_TABLE_PAGES
    while width < num_pages:
        width *= 4
    return 1 << (num_rows - 1).bit_length(), width


@dataclass
class _CapturedStep:
    """Tensors that stay, and what computes on them. Rows that nobody fills see no keys."""

    hidden_NH: torch.Tensor
    rows: PagedRows
    output_NH: torch.Tensor
    run_again: Callable[[], None]

    @classmethod
    def make(cls, hidden_NH: torch.Tensor, rows: PagedRows, size: tuple[int, int]) -> _CapturedStep:
        """Return a step of a size, with nothing in it."""
        num_rows, num_pages = size
        padded_NH = hidden_NH.new_zeros(num_rows, hidden_NH.shape[1])
        padded = replace(
            rows,
            places=slice(0, num_rows),
            positions_N=rows.positions_N.new_zeros(num_rows),
            tables_NM=rows.tables_NM.new_full((num_rows, num_pages), rows.store.nobodys_page),
            lengths_N=rows.lengths_N.new_zeros(num_rows),
            rotations=tuple(_pad(rotation, num_rows) for rotation in rows.rotations),
        )
        return cls(padded_NH, padded, torch.zeros_like(padded_NH), lambda: None)

    def fill(self, hidden_NH: torch.Tensor, rows: PagedRows) -> None:
        """Take a step in; what is left of the one before is nobody's."""
        num_rows, num_pages = rows.tables_NM.shape
        self.hidden_NH[:num_rows].copy_(hidden_NH)
        self.hidden_NH[num_rows:].zero_()
        self.rows.positions_N[:num_rows].copy_(rows.positions_N)
        self.rows.positions_N[num_rows:].zero_()
        self.rows.lengths_N[:num_rows].copy_(rows.lengths_N)
        self.rows.lengths_N[num_rows:].zero_()
        self.rows.tables_NM.fill_(rows.store.nobodys_page)
        self.rows.tables_NM[:num_rows, :num_pages].copy_(rows.tables_NM)
        for ours, theirs in zip(self.rows.rotations, rows.rotations, strict=True):
            for padded_ND, states_ND in zip(ours, theirs, strict=True):
                padded_ND[:num_rows].copy_(states_ND)

    def compute(self, compute: Compute) -> None:
        """Compute what was filled in."""
        self.output_NH.copy_(compute(self.hidden_NH, _FilledRows(self.rows)))


class _FilledRows(Segments):
    """Rows whose sessions differ from step to step: no segments, but the layout of them."""

    def __init__(self, rows: PagedRows) -> None:
        super().__init__((), ())
        self._rows = rows

    @cached_property
    def paged_rows(self) -> list[PagedRows]:
        return [self._rows]


def _pad(rotation: Rotation, num_rows: int) -> Rotation:
    cos_ND, sin_ND = rotation
    shape = (num_rows, cos_ND.shape[1])
    return cos_ND.new_zeros(shape), sin_ND.new_zeros(shape)
