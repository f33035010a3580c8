"""Prompts for the kernels in C, with the memories of their sessions."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shoal.kernels.attention.int8_states import quantize_states
from shoal.kernels.attention.native_attention import (
    MAX_HEAD_DIM,
    PromptAttention,
    TokenAttention,
    TokenBatch,
    TokenSegment,
    TokenShape,
    list_prompt_instruction_sets,
)

FIRST_BLOCK = 4
CAPACITY = 320


@dataclass(frozen=True)
class Case:
    """One shape of a block."""

    num_heads: int = 4
    num_groups: int = 2
    head_dim: int = 64
    rotary_dim: int = 64
    window: int | None = None
    has_norm: bool = False
    is_int8: bool = False

    @property
    def shape(self) -> TokenShape:
        return TokenShape(
            self.num_heads, self.num_groups, self.head_dim, self.window, norm_eps=1e-5
        )

    @property
    def norm_JD(self) -> Tensor | None:
        draw = torch.Generator().manual_seed(3)
        shape = (self.num_heads + self.num_groups, self.head_dim)
        return torch.rand(shape, generator=draw) + 0.5 if self.has_norm else None


CASES = {
    "groups": Case(),
    "one group": Case(num_heads=6, num_groups=1),
    "no groups": Case(num_heads=3, num_groups=3, head_dim=32, rotary_dim=32),
    "large heads": Case(num_heads=8, num_groups=1, head_dim=256, rotary_dim=256),
    "largest heads": Case(num_heads=1, num_groups=1, head_dim=MAX_HEAD_DIM, rotary_dim=64),
    "heads of 26": Case(num_heads=5, num_groups=1, head_dim=26, rotary_dim=26),
    "odd heads": Case(num_heads=7, num_groups=1, head_dim=33, rotary_dim=12),
    "heads of one": Case(head_dim=1, rotary_dim=0),
    "rotated in part": Case(head_dim=80, rotary_dim=32),
    "window": Case(window=17),
    "window of one": Case(num_heads=3, num_groups=3, window=1),
    "window of a block": Case(num_heads=3, num_groups=3, window=64),
    "norms": Case(has_norm=True, head_dim=48, rotary_dim=48),
}
INT8_CASES = {
    "int8": Case(is_int8=True),
    "int8 in heads of 26": Case(5, 1, head_dim=26, rotary_dim=26, has_norm=True, is_int8=True),
    "int8 in large heads": Case(8, 1, head_dim=256, rotary_dim=256, window=70, is_int8=True),
}


@dataclass(frozen=True)
class Prompt:
    """A session's memory, with a prefix, and the tokens that come next."""

    states_LCBGSD: Tensor
    fused_BTO: Tensor
    position: int
    cos_TR: Tensor
    sin_TR: Tensor

    def copy(self) -> "Prompt":
        return replace(self, states_LCBGSD=self.states_LCBGSD.clone())

    def cut(self, first: int, stop: int) -> "Prompt":
        """Return some of the tokens, with the same memory."""
        return replace(
            self,
            fused_BTO=self.fused_BTO[:, first:stop],
            position=self.position + first,
            cos_TR=self.cos_TR[first:stop],
            sin_TR=self.sin_TR[first:stop],
        )


def make_prompt(
    case: Case, position: int, num_tokens: int, num_rows: int = 1, seed: int = 1
) -> Prompt:
    draw = torch.Generator().manual_seed(seed)
    shape = (3, 2, num_rows, case.num_groups, CAPACITY, case.head_dim)
    width = (case.num_heads + 2 * case.num_groups) * case.head_dim
    angles_TR = torch.randn(num_tokens, case.rotary_dim // 2, generator=draw).repeat(1, 2)
    states_LCBGSD = torch.randn(shape, generator=draw)
    states_LCBGSD[:, :, :, :, position:] = torch.nan  # nobody has written there
    return Prompt(
        quantize_states(states_LCBGSD) if case.is_int8 else states_LCBGSD,
        torch.randn(num_rows, num_tokens, width, generator=draw),
        position,
        angles_TR.cos(),
        angles_TR.sin(),
    )


def attend(
    case: Case,
    *prompts: Prompt,
    instruction_set: int = next(iter(list_prompt_instruction_sets().values()), 0),
    kind: type[TokenAttention] = PromptAttention,
) -> list[Tensor]:
    """Run prompts as one batch; return the results of each, [B, T, heads * D]."""
    fused_NO = torch.cat([prompt.fused_BTO.flatten(0, 1) for prompt in prompts])
    segments, first_row = [], 0
    for prompt in prompts:
        segments.append(
            TokenSegment(
                prompt.states_LCBGSD,
                FIRST_BLOCK,
                first_row,
                prompt.position,
                prompt.cos_TR,
                prompt.sin_TR,
            )
        )
        first_row += prompt.fused_BTO[..., 0].numel()
    attended_NO = torch.full((first_row, case.num_heads * case.head_dim), torch.nan)
    kernel = kind(FIRST_BLOCK + 1, case.shape, case.norm_JD, instruction_set)
    kernel(fused_NO, TokenBatch(segments), attended_NO)
    sizes = [prompt.fused_BTO[..., 0].numel() for prompt in prompts]
    return [
        part.unflatten(0, prompt.fused_BTO.shape[:2])
        for part, prompt in zip(attended_NO.split(sizes), prompts, strict=True)
    ]


def assert_near(ours: Tensor, expected: Tensor) -> None:
    """Within 1e-5 of a row's largest number."""
    largest = expected.abs().amax(dim=-1, keepdim=True)
    assert ((ours - expected).abs() <= 1e-5 * largest).all()
