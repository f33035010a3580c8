"""Deep prompts of sessions: added to the inputs of blocks wherever their positions are computed.

So a position has its prompt in a first step, in a replay and after a rollback.

Tensor suffixes: N rows of all steps (batch times tokens), L blocks, B rows of a session or 1 for
all of them, P positions, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...protocol.spans import Span
from .blocks.rows import Segment
from .steps import AcceptedStep


@dataclass(frozen=True)
class PromptedSegment:
    """A segment of which some positions have prompts, and these, for the blocks of a stretch."""

    segment: Segment
    prompts_LBPH: torch.Tensor

    def add(self, hidden_NH: torch.Tensor, place: int) -> None:
        """Add the prompts of a block, by its place in the stretch, to its inputs."""
        segment, prompts_BPH = self.segment, self.prompts_LBPH[place]
        hidden_BTH = hidden_NH[segment.start : segment.stop].unflatten(0, (segment.num_rows, -1))
        hidden_BTH[:, : prompts_BPH.shape[1]] += prompts_BPH


def find_prompts(
    steps: Sequence[AcceptedStep], segments: Sequence[Segment], stretch: Span
) -> list[PromptedSegment]:
    """Return the segments of a stretch that prompts are added to."""
    found: list[PromptedSegment] = []
    for step, segment in zip(steps, segments, strict=True):
        prompts_LBPH, span = step.work.cache.prompts_LBPH, step.work.span
        if prompts_LBPH is not None and segment.position < prompts_LBPH.shape[2]:
            blocks = slice(stretch.start - span.start, stretch.stop - span.start)
            positions = slice(segment.position, segment.position + segment.num_tokens)
            found.append(PromptedSegment(segment, prompts_LBPH[blocks, :, positions]))
    return found


def add_prompts(
    hidden_NH: torch.Tensor, prompts: Sequence[PromptedSegment], place: int
) -> torch.Tensor:
    """Return the inputs of a block with their prompts; those given stay as they are."""
    if not prompts:
        return hidden_NH
    hidden_NH = hidden_NH.clone()
    for prompted in prompts:
        prompted.add(hidden_NH, place)
    return hidden_NH
