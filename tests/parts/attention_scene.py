"""Tokens for the kernels in C, with the memories of their sessions, and what they should become."""

from dataclasses import dataclass, replace

import kernel_reference as reference
import torch
from torch import Tensor

from shoal.kernels.attention.int8_kv import quantize_kv
from shoal.kernels.attention.native_attention import (
    MAX_HEAD_DIM,
    PromptAttention,
    TokenAttention,
    TokenBatch,
    TokenSegment,
    TokenShape,
)
from shoal.kernels.attention.rotary import apply_rotary
from shoal.kernels.attention.torch_attention import attention
from shoal.kernels.native.library import list_instruction_sets

FIRST_BLOCK = 4
CAPACITY = 320
KINDS = {"tokens": TokenAttention, "prompts": PromptAttention}
"""The kernels: what one computes the other does, too, but for the last digits."""


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
    "heads of two": Case(head_dim=2, rotary_dim=2),
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
class Session:
    """A session's memory, with a prefix, and the tokens that come next."""

    states_LCBGSD: Tensor
    fused_BTO: Tensor
    position: int
    cos_TR: Tensor
    sin_TR: Tensor

    def copy(self) -> "Session":
        return replace(self, states_LCBGSD=self.states_LCBGSD.clone())

    def cut(self, first: int, stop: int) -> "Session":
        """Return some of the tokens, with the same memory."""
        return replace(
            self,
            fused_BTO=self.fused_BTO[:, first:stop],
            position=self.position + first,
            cos_TR=self.cos_TR[first:stop],
            sin_TR=self.sin_TR[first:stop],
        )


def make_session(
    case: Case, position: int, num_tokens: int, num_rows: int = 1, seed: int = 1
) -> Session:
    draw = torch.Generator().manual_seed(seed)
    shape = (3, 2, num_rows, case.num_groups, CAPACITY, case.head_dim)
    width = (case.num_heads + 2 * case.num_groups) * case.head_dim
    angles_TR = torch.randn(num_tokens, case.rotary_dim // 2, generator=draw).repeat(1, 2)
    states_LCBGSD = torch.randn(shape, generator=draw)
    states_LCBGSD[:, :, :, :, position:] = torch.nan  # nobody has written there
    return Session(
        quantize_kv(states_LCBGSD) if case.is_int8 else states_LCBGSD,
        torch.randn(num_rows, num_tokens, width, generator=draw),
        position,
        angles_TR.cos(),
        angles_TR.sin(),
    )


def attend(
    kind: type[TokenAttention],
    case: Case,
    *sessions: Session,
    instruction_set: int | None = None,
) -> list[Tensor]:
    """Run sessions as one batch; return the results of each, [B, T, heads * D].

    Without an instruction set it is the fastest, also where torch is faster.
    """
    if instruction_set is None:
        instruction_set = next(iter(list_instruction_sets(kind.kernel).values()))
    fused_NO = torch.cat([session.fused_BTO.flatten(0, 1) for session in sessions])
    segments, first_row = [], 0
    for session in sessions:
        segments.append(
            TokenSegment(
                session.states_LCBGSD,
                FIRST_BLOCK,
                first_row,
                session.position,
                session.cos_TR,
                session.sin_TR,
            )
        )
        first_row += session.fused_BTO[..., 0].numel()
    attended_NO = torch.full((first_row, case.num_heads * case.head_dim), torch.nan)
    kernel = kind(FIRST_BLOCK + 1, case.shape, case.norm_JD, instruction_set)
    kernel(fused_NO, TokenBatch(segments), attended_NO)
    sizes = [session.fused_BTO[..., 0].numel() for session in sessions]
    return [
        part.unflatten(0, session.fused_BTO.shape[:2])
        for part, session in zip(attended_NO.split(sizes), sessions, strict=True)
    ]


def attend_by_definition(
    case: Case, session: Session, dtype: torch.dtype = torch.float64
) -> Tensor:
    """Return the same from the obvious kernels, or in float32 from those in torch.

    Writes keys and values into the memory, too.
    """
    is_wide = dtype is torch.float64
    keys_BGSD, values_BGSD = session.states_LCBGSD[1]
    heads_BTJD = session.fused_BTO.unflatten(2, (-1, case.head_dim)).to(dtype)
    query_key_BTJD, values_BTGD = heads_BTJD.tensor_split([-case.num_groups], dim=2)
    if case.norm_JD is not None:
        query_key_BTJD = reference.rms_norm(
            query_key_BTJD, torch.ones(case.head_dim), case.shape.norm_eps
        )
        query_key_BTJD = (query_key_BTJD * case.norm_JD).to(dtype)
    rotate = reference.apply_rotary if is_wide else apply_rotary
    query_key_BJTD = rotate(query_key_BTJD.transpose(1, 2), session.cos_TR, session.sin_TR)
    stop = session.position + session.fused_BTO.shape[1]
    keys_BGSD[:, :, session.position : stop] = query_key_BJTD[:, case.num_heads :]
    values_BGSD[:, :, session.position : stop] = values_BTGD.transpose(1, 2)
    attended_BHTD = (reference.attention if is_wide else attention)(
        query_key_BJTD[:, : case.num_heads],
        keys_BGSD[:, :, :stop].to(dtype),
        values_BGSD[:, :, :stop].to(dtype),
        session.position,
        scale=case.head_dim**-0.5,
        sliding_window=case.window,
    )
    return attended_BHTD.transpose(1, 2).flatten(2)


def are_same_states(one: Session, other: Session) -> bool:
    """Compare memories, with their numbers that are none."""
    return torch.equal(one.states_LCBGSD.nan_to_num(), other.states_LCBGSD.nan_to_num())


def assert_near(ours: Tensor, expected: Tensor) -> None:
    """Within 1e-5 of a row's largest number."""
    largest = expected.abs().amax(dim=-1, keepdim=True)
    assert ((ours - expected).abs() <= 1e-5 * largest).all()
