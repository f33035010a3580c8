"""Attention of generated tokens in C, against the kernels in torch and bit by bit among itself."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from shoal.kernels.attention.int8_states import quantize_states
from shoal.kernels.attention.native_attention import (
    MAX_HEAD_DIM,
    TokenAttention,
    TokenBatch,
    TokenSegment,
    TokenShape,
    choose_instruction_set,
    list_instruction_sets,
)
from shoal.kernels.attention.rotary import apply_rotary
from shoal.kernels.attention.torch_attention import attention
from shoal.kernels.layers.norm import rms_norm

pytestmark = pytest.mark.skipif(
    choose_instruction_set() is None, reason="the native library was not built"
)
NUM_BLOCKS = 3
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

    def make(self, block: int, instruction_set: int | None = None) -> TokenAttention:
        shape = TokenShape(
            self.num_heads, self.num_groups, self.head_dim, self.window, norm_eps=1e-5
        )
        return TokenAttention(block, shape, self.norm_JD, instruction_set)

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
    "odd heads": Case(num_heads=5, num_groups=1, head_dim=26, rotary_dim=26),
    "tiny heads": Case(head_dim=2, rotary_dim=2),
    "rotated in part": Case(head_dim=80, rotary_dim=32),
    "window": Case(window=17),
    "window of one": Case(window=1),
    "norms": Case(has_norm=True, head_dim=48, rotary_dim=48),
}
INT8_CASES = {
    "int8": Case(is_int8=True),
    "int8 in heads of 26": Case(5, 1, head_dim=26, rotary_dim=26, has_norm=True, is_int8=True),
    "int8 in large heads": Case(8, 1, head_dim=256, rotary_dim=256, window=70, is_int8=True),
}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
every_case_kept = pytest.mark.parametrize(
    "case", [*CASES.values(), *INT8_CASES.values()], ids=[*CASES, *INT8_CASES]
)
every_instruction_set = pytest.mark.parametrize(
    "instruction_set", list_instruction_sets().values(), ids=list_instruction_sets()
)


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@dataclass(frozen=True)
class Session:
    """A session's memory, with a prefix, and the tokens that come next."""

    states_LCBGSD: Tensor
    fused_NO: Tensor
    position: int
    num_tokens: int
    cos_TR: Tensor
    sin_TR: Tensor

    @property
    def num_rows(self) -> int:
        return self.states_LCBGSD.shape[2]

    def copy(self) -> "Session":
        return replace(self, states_LCBGSD=self.states_LCBGSD.clone())

    def lay_out(self, first_row: int = 0) -> TokenSegment:
        return TokenSegment(
            self.states_LCBGSD, 4, first_row, self.position, self.cos_TR, self.sin_TR
        )


def make_session(
    case: Case, position: int, num_tokens: int = 1, num_rows: int = 1, seed: int = 1
) -> Session:
    draw = torch.Generator().manual_seed(seed)
    shape = (NUM_BLOCKS, 2, num_rows, case.num_groups, CAPACITY, case.head_dim)
    width = (case.num_heads + 2 * case.num_groups) * case.head_dim
    angles_TR = torch.randn(num_tokens, case.rotary_dim // 2, generator=draw).repeat(1, 2)
    states_LCBGSD = torch.randn(shape, generator=draw)
    return Session(
        quantize_states(states_LCBGSD) if case.is_int8 else states_LCBGSD,
        torch.randn(num_rows * num_tokens, width, generator=draw),
        position,
        num_tokens,
        angles_TR.cos(),
        angles_TR.sin(),
    )


def attend(
    case: Case, block: int, *sessions: Session, instruction_set: int | None = None
) -> Tensor:
    """Run sessions as one batch; return the rows of all."""
    segments, first_row = [], 0
    for session in sessions:
        segments.append(session.lay_out(first_row))
        first_row += len(session.fused_NO)
    fused_NO = torch.cat([session.fused_NO for session in sessions])
    attended_NO = torch.full((first_row, case.num_heads * case.head_dim), torch.nan)
    case.make(block, instruction_set)(fused_NO, TokenBatch(segments), attended_NO)
    return attended_NO


def attend_in_torch(case: Case, block: int, session: Session) -> Tensor:
    """Do the same with the other kernels, token by token."""
    keys_BGSD, values_BGSD = session.states_LCBGSD[block - 4]
    num_query_key_heads = case.num_heads + case.num_groups
    fused_BTJD = session.fused_NO.view(session.num_rows, session.num_tokens, -1, case.head_dim)
    query_key_BTJD = fused_BTJD[:, :, :num_query_key_heads]
    if case.norm_JD is not None:
        ones_D = torch.ones(case.head_dim)
        query_key_BTJD = rms_norm(query_key_BTJD, ones_D, 1e-5) * case.norm_JD
    query_key_BJTD = apply_rotary(query_key_BTJD.transpose(1, 2), session.cos_TR, session.sin_TR)
    stop = session.position + session.num_tokens
    keys_BGSD[:, :, session.position : stop] = query_key_BJTD[:, case.num_heads :]
    values_BTGD = fused_BTJD[:, :, num_query_key_heads:]
    values_BGSD[:, :, session.position : stop] = values_BTGD.transpose(1, 2)
    attended_BHTD = attention(
        query_key_BJTD[:, : case.num_heads],
        keys_BGSD[:, :, :stop],
        values_BGSD[:, :, :stop],
        session.position,
        scale=case.head_dim**-0.5,
        sliding_window=case.window,
    )
    return attended_BHTD.transpose(1, 2).reshape(len(session.fused_NO), -1)


@every_instruction_set
@every_case
@pytest.mark.parametrize("position", [0, 15, 70, 300])
def test_result_and_cache_equal_those_of_torch(
    case: Case, position: int, instruction_set: int
) -> None:
    ours, theirs = (make_session(case, position, num_tokens=3, num_rows=2) for _ in range(2))

    attended_NO = attend(case, 5, ours, instruction_set=instruction_set)

    torch.testing.assert_close(attended_NO, attend_in_torch(case, 5, theirs), rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(ours.states_LCBGSD, theirs.states_LCBGSD, rtol=1e-5, atol=1e-6)


@every_case_kept
@pytest.mark.parametrize("position", [0, 63, 250])
def test_every_instruction_set_computes_the_same_bits(case: Case, position: int) -> None:
    sessions = [make_session(case, position, 2) for _ in list_instruction_sets()]

    results = [
        attend(case, 4, session, instruction_set=number)
        for session, number in zip(sessions, list_instruction_sets().values(), strict=True)
    ]

    for session, result in zip(sessions, results, strict=True):
        assert torch.equal(result, results[0])
        assert torch.equal(session.states_LCBGSD, sessions[0].states_LCBGSD)


@every_case_kept
def test_token_is_computed_alike_alone_in_a_batch_and_in_a_replay(case: Case) -> None:
    one, other = make_session(case, 100, 5, num_rows=2), make_session(case, 7, 1, seed=2)
    together, company = one.copy(), other.copy()
    replayed = attend(case, 6, one)

    batch = attend(case, 6, company, together, other.copy())

    assert torch.equal(batch[1:11], replayed)
    assert torch.equal(together.states_LCBGSD, one.states_LCBGSD)
    single = make_session(case, 100, 5, num_rows=2)
    fused_BTO = single.fused_NO.view(2, 5, -1)
    for token in range(5):
        step = replace(
            single,
            fused_NO=fused_BTO[:, token].contiguous(),
            position=100 + token,
            num_tokens=1,
            cos_TR=single.cos_TR[token : token + 1],
            sin_TR=single.sin_TR[token : token + 1],
        )
        assert torch.equal(attend(case, 6, step), replayed.view(2, 5, -1)[:, token])
    assert torch.equal(single.states_LCBGSD, one.states_LCBGSD)


def test_threads_change_nothing(two_threads: None) -> None:
    case = CASES["groups"]
    sessions = [make_session(case, 40 * seed, 3, seed=seed) for seed in range(1, 6)]
    copies = [session.copy() for session in sessions]

    together = attend(case, 4, *sessions)

    alone = [attend(case, 4, session) for session in copies]
    assert torch.equal(together, torch.cat(alone))


def test_nothing_but_the_tokens_of_the_block_is_written() -> None:
    case = CASES["groups"]
    session = make_session(case, 33, 2)
    before = session.states_LCBGSD.clone()

    attend(case, 5, session)

    changed = (session.states_LCBGSD != before).any(dim=-1).nonzero()
    assert {tuple(place) for place in changed[:, [0, 4]].tolist()} == {(1, 33), (1, 34)}


def test_tokens_behind_the_position_are_not_read() -> None:
    case = CASES["odd heads"]
    clean, dirty = make_session(case, 50), make_session(case, 50)
    dirty.states_LCBGSD[:, :, :, :, 51:] = torch.nan

    assert torch.equal(attend(case, 5, clean), attend(case, 5, dirty))


def test_scores_far_apart_do_not_overflow() -> None:
    case = CASES["groups"]
    session = make_session(case, 20)
    session.fused_NO.mul_(1e4)
    session.states_LCBGSD.mul_(1e4)
    expected = attend_in_torch(case, 5, session.copy())

    attended_NO = attend(case, 5, session)

    torch.testing.assert_close(attended_NO, expected, rtol=1e-5, atol=1e-2)


@every_instruction_set
@pytest.mark.parametrize("position", [5, 15, 16, 70])
@pytest.mark.parametrize("place", ["query", "key", "old key", "first key"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 3e38])
def test_scores_that_overflow_show_in_the_result(
    place: str, value: float, position: int, instruction_set: int
) -> None:
    case = Case(num_heads=1, num_groups=1, head_dim=16, rotary_dim=2)
    session = make_session(case, position)
    spoiled = {
        "query": session.fused_NO[0, 8:16],
        "key": session.fused_NO[0, 24:32],
        "old key": session.states_LCBGSD[1, 0, 0, 0, 3, 8:16],
        "first key": session.states_LCBGSD[1, 0, 0, 0, 0, 8:16],
    }
    for same in spoiled.values():  # every score gets the same sign from here
        same[:] = 2.0
    session.states_LCBGSD[1, 0, 0, 0, :, 8:16] = 2.0
    spoiled[place][:] = value

    attended_NO = attend(case, 5, session, instruction_set=instruction_set)

    if value == float("-inf") and place != "query":  # a score of minus infinity has no weight
        expected_NO = attend_in_torch(case, 5, session.copy())
        torch.testing.assert_close(attended_NO, expected_NO, rtol=1e-5, atol=2e-6)
    else:
        assert attended_NO.isnan().all()


def test_rows_that_are_not_finite_stay_in_their_session() -> None:
    case = CASES["groups"]
    sound, broken = make_session(case, 9), make_session(case, 9, seed=2)
    broken.fused_NO[:] = torch.inf
    expected = attend(case, 5, sound.copy())

    attended_NO = attend(case, 5, broken, sound)

    assert torch.equal(attended_NO[1:], expected)
    assert not attended_NO[0].isfinite().any()


def test_shape_that_is_too_large_is_refused() -> None:
    with pytest.raises(ValueError, match="no kernel"):
        replace(CASES["groups"], head_dim=MAX_HEAD_DIM + 2).make(4)
