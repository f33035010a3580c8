"""Steps of generated tokens, captured once for each size and replayed: CUDA graphs.

A device computes a block faster than the processor can launch it, operation by operation. So a
step through all blocks is captured on tensors that stay, and launched as a whole.

Tensor suffixes: N tokens of the step, padded; H hidden; M pages of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from ...kernels.attention.rotary import RotaryTable
from ...kernels.linear.linear import RowPrecision
from .blocks.attention_kernels import (
    DecodedTokens,
    PagedTokenBatch,
    lay_out_in_pages,
    list_decoded,
)
from .blocks.batch import HostedBlock, StepBatch, TokenRange
from .devices.device import Capturer, Device

MAX_TOKENS = 64
"""Steps of more tokens keep a device busy for long enough."""

LEAST_TABLE_PAGES = 64
"""Tables are as wide as the longest row needs; each width is four times the one before. So few are
captured, and a table that is too wide costs little, since nothing behind a row's end is read."""

TOKEN_COUNTS = tuple(2**power for power in range(MAX_TOKENS.bit_length()))
"""The numbers of tokens after padding."""


class DecodeGraphs:
    """Takes steps of generated tokens through all blocks of an engine."""

    def __init__(self, blocks: Sequence[HostedBlock], capturer: Capturer) -> None:
        self._blocks = blocks
        self._capturer = capturer
        self._steps: dict[tuple[object, ...], _CapturedStep] = {}

    @classmethod
    def make(cls, blocks: Sequence[HostedBlock], device: Device) -> DecodeGraphs | None:
        """Return graphs where the device captures and the blocks allow it."""
        if device.capturer is None or not all(block.has_fixed_shapes for block in blocks):
            return None
        return cls(blocks, device.capturer)

    @staticmethod
    def can_run(batch: StepBatch) -> bool:
        """Return whether these are few tokens, all generated, in caches of one format."""
        is_small = batch.steps[-1].stop <= MAX_TOKENS
        return is_small and not batch.prompts and len(batch.in_form(list_decoded)) == 1

    def run(self, hidden_NH: torch.Tensor, batch: StepBatch) -> torch.Tensor:
        """Return the output of the last block; writes into the sessions' memory."""
        (decoded,) = batch.in_form(list_decoded)
        num_tokens, num_pages = decoded.tables_NM.shape
        size = choose_size(num_tokens, num_pages)
        # What is captured reads the tables of the ropes where they lie: longer ones lie elsewhere.
        key = (*size, decoded.layout.dtype, *(len(table.cos_TD) for table in batch.rotary))
        step = self._steps.get(key)
        if step is None:
            step = _CapturedStep.make(hidden_NH, decoded, size)
            rotary = batch.rotary
            step.replay = self._capturer.capture(lambda: self._compute(step, rotary))
            self._steps[key] = step
        step.fill(hidden_NH, decoded)
        step.replay()
        return step.output_NH[:num_tokens].clone()

    def _compute(self, step: _CapturedStep, rotary: Sequence[RotaryTable]) -> None:
        # Sessions differ from step to step: the batch has none, only their tokens over pages.
        batch = StepBatch((), (), {lay_out_in_pages: [step.paged.rotate(rotary)]})
        hidden_NH = step.hidden_NH
        ranges = [TokenRange(0, len(hidden_NH), RowPrecision.TWO_DIGITS)]
        for block in self._blocks:
            hidden_NH = block(hidden_NH, batch, ranges)
        step.output_NH.copy_(hidden_NH)


def choose_size(num_tokens: int, num_pages: int) -> tuple[int, int]:
    """Return the tokens, and the pages of a row, that a step is padded to.

    >>> choose_size(1, 3), choose_size(5, 65)
    ((1, 64), (8, 256))
    """
    width = LEAST_TABLE_PAGES
    while width < num_pages:
        width *= 4
    return 1 << (num_tokens - 1).bit_length(), width


@dataclass
class _CapturedStep:
    """Tensors that stay, and what computes on them. Padding sees no keys."""

    size: tuple[int, int]
    hidden_NH: torch.Tensor
    paged: PagedTokenBatch
    output_NH: torch.Tensor
    replay: Callable[[], None]

    @classmethod
    def make(
        cls, hidden_NH: torch.Tensor, decoded: DecodedTokens, size: tuple[int, int]
    ) -> _CapturedStep:
        """Return a step of a size, filled."""
        padded_NH = hidden_NH.new_zeros(size[0], hidden_NH.shape[1])
        paged = replace(PagedTokenBatch.of(decoded, *size), tokens=slice(0, size[0]))
        step = cls(size, padded_NH, paged, torch.zeros_like(padded_NH), lambda: None)
        step.fill(hidden_NH, decoded)
        return step

    def fill(self, hidden_NH: torch.Tensor, decoded: DecodedTokens) -> None:
        """Take a step in; what is left of the one before becomes padding."""
        self.hidden_NH[: len(hidden_NH)].copy_(hidden_NH)
        self.hidden_NH[len(hidden_NH) :].zero_()
        self.paged.numbers.copy_(torch.from_numpy(decoded.pack(*self.size)))
