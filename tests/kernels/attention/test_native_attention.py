"""Attention in C, against the obvious version and bit by bit among itself."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise

import pytest
import torch
from attention_scene import (
    CASES,
    INT8_CASES,
    KINDS,
    Case,
    Session,
    are_same_states,
    assert_near,
    attend,
    attend_by_definition,
    make_session,
)
from torch import Tensor

from shoal.kernels.attention.native_attention import (
    MAX_HEAD_DIM,
    PromptAttention,
    TokenAttention,
)
from shoal.kernels.native.library import list_instruction_sets, load_library

pytestmark = pytest.mark.skipif(load_library() is None, reason="the native library was not built")
Kind = type[TokenAttention]

every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
every_case_kept = pytest.mark.parametrize(
    "case", [*CASES.values(), *INT8_CASES.values()], ids=[*CASES, *INT8_CASES]
)
every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
TOKEN_SETS, PROMPT_SETS = (list_instruction_sets(kind.kernel) for kind in KINDS.values())


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def attend_in_parts(kind: Kind, case: Case, session: Session, cuts: Sequence[int]) -> Tensor:
    edges = [0, *cuts, session.fused_BTO.shape[1]]
    parts = [attend(kind, case, session.cut(first, stop))[0] for first, stop in pairwise(edges)]
    return torch.cat(parts, dim=1)


# ---- tokens and prompts


@lru_cache(maxsize=1)
def define(case: Case, position: int, num_tokens: int) -> tuple[Tensor, Session]:
    """Return what the definition computes, which takes longest, and the session behind it."""
    session = make_session(case, position, num_tokens, num_rows=2)
    return attend_by_definition(case, session), session


@pytest.mark.parametrize(
    ("kind", "instruction_set"),
    [
        # All sets compute the same bits; that is the next test.
        pytest.param(kind, number, id=f"{word}-{name}", marks=[pytest.mark.thorough] * (place > 0))
        for word, kind in KINDS.items()
        for place, (name, number) in enumerate(list_instruction_sets(kind.kernel).items())
    ],
)
@every_case
@pytest.mark.parametrize(
    ("position", "num_tokens"),
    [(0, 9), (60, 8), pytest.param(127, 3, marks=pytest.mark.thorough), (300, 3)],
)
def test_result_and_cache_are_those_of_the_definition(
    case: Case, position: int, num_tokens: int, kind: Kind, instruction_set: int
) -> None:
    ours = make_session(case, position, num_tokens, num_rows=2)
    expected_BTO, theirs = define(case, position, num_tokens)

    (attended_BTO,) = attend(kind, case, ours, instruction_set=instruction_set)

    assert_near(attended_BTO, expected_BTO)
    torch.testing.assert_close(
        ours.states_LCBGSD, theirs.states_LCBGSD, rtol=1e-5, atol=1e-6, equal_nan=True
    )


@every_kind
@every_case_kept
@pytest.mark.parametrize("position", [pytest.param(0, marks=pytest.mark.thorough), 63, 250])
def test_every_instruction_set_computes_the_same_bits(
    case: Case, position: int, kind: Kind
) -> None:
    numbers = list_instruction_sets(kind.kernel).values()
    sessions = [make_session(case, position, 70, 2) for _ in numbers]

    results = [
        attend(kind, case, session, instruction_set=number)[0]
        for session, number in zip(sessions, numbers, strict=True)
    ]

    for session, result in zip(sessions, results, strict=True):
        assert torch.equal(result, results[0])
        assert are_same_states(session, sessions[0])


@every_case_kept
@pytest.mark.parametrize(
    ("kind", "cuts"),
    [
        (PromptAttention, [1]),
        (PromptAttention, [64]),
        (PromptAttention, [16, 32, 48, 64]),
        (PromptAttention, [3, 4, 5, 100]),
        (PromptAttention, list(range(1, 130))),
        (TokenAttention, list(range(1, 130))),
    ],
)
def test_cuts_change_nothing(case: Case, kind: Kind, cuts: list[int]) -> None:
    session = make_session(case, 37, 130, num_rows=2)
    whole = session.copy()

    assert torch.equal(attend_in_parts(kind, case, session, cuts), attend(kind, case, whole)[0])
    assert are_same_states(session, whole)


@every_kind
@every_case_kept
def test_company_changes_nothing(case: Case, kind: Kind) -> None:
    session = make_session(case, 100, 50, num_rows=2)
    others = [make_session(case, 7, 3, seed=2), make_session(case, 0, 90, seed=3)]
    alone = session.copy()

    _, together, _ = attend(kind, case, others[0], session, others[1])

    assert torch.equal(together, attend(kind, case, alone)[0])
    assert are_same_states(session, alone)


@every_kind
def test_rows_change_nothing(kind: Kind) -> None:
    case = CASES["groups"]
    both = make_session(case, 10, 70, num_rows=2)
    second = replace(
        both, states_LCBGSD=both.states_LCBGSD[:, :, 1:].clone(), fused_BTO=both.fused_BTO[1:]
    )

    assert torch.equal(attend(kind, case, both)[0][1:], attend(kind, case, second)[0])


@every_kind
def test_threads_change_nothing(two_threads: None, kind: Kind) -> None:
    case = CASES["groups"]
    sessions = [make_session(case, 30 * seed, 100, seed=seed) for seed in range(1, 6)]
    copies = [session.copy() for session in sessions]

    together = attend(kind, case, *sessions)

    torch.set_num_threads(1)
    for result, copied in zip(together, copies, strict=True):
        assert torch.equal(result, attend(kind, case, copied)[0])


@every_case_kept
def test_cache_of_a_prompt_is_that_of_generated_tokens_to_the_bit(case: Case) -> None:
    prompt = make_session(case, 30, 40)
    generated = prompt.copy()

    attend(PromptAttention, case, prompt)

    attend(TokenAttention, case, generated)
    assert are_same_states(prompt, generated)


@every_kind
def test_no_tokens_are_no_work(kind: Kind) -> None:
    case = CASES["groups"]
    empty, session = make_session(case, 5, 0), make_session(case, 5, 3)
    alone = session.copy()

    first, second, third = attend(kind, case, empty, session, empty)

    assert first.numel() == third.numel() == 0
    assert torch.equal(second, attend(kind, case, alone)[0])


@every_kind
def test_scores_far_apart_do_not_overflow(kind: Kind) -> None:
    case = CASES["groups"]
    ours, theirs = (make_session(case, 20, 100) for _ in range(2))
    for session in (ours, theirs):
        session.fused_BTO.mul_(1e4)
        session.states_LCBGSD.mul_(1e4)

    attended_BTO = attend(kind, case, ours)[0]

    expected = attend_by_definition(case, theirs, torch.float32)
    torch.testing.assert_close(attended_BTO, expected, rtol=1e-5, atol=1e-2)


@every_kind
def test_nothing_but_the_tokens_of_the_block_is_written(kind: Kind) -> None:
    case = CASES["groups"]
    session = make_session(case, 33, 2)
    session.states_LCBGSD.nan_to_num_()
    before = session.states_LCBGSD.clone()

    attend(kind, case, session)

    changed = (session.states_LCBGSD != before).any(dim=-1).nonzero()
    assert {tuple(place) for place in changed[:, [0, 4]].tolist()} == {(1, 33), (1, 34)}


@every_kind
def test_shape_that_is_too_large_is_refused(kind: Kind) -> None:
    with pytest.raises(ValueError, match="no kernel"):
        kind(0, replace(CASES["groups"], head_dim=MAX_HEAD_DIM + 2).shape)


@every_kind
def test_rows_that_are_not_finite_stay_in_their_session(kind: Kind) -> None:
    case = CASES["groups"]
    sound, broken = make_session(case, 9, 1), make_session(case, 9, 1, seed=2)
    broken.fused_BTO[:] = torch.inf
    (expected,) = attend(kind, case, sound.copy())

    of_broken, of_sound = attend(kind, case, broken, sound)

    assert torch.equal(of_sound, expected)
    assert not of_broken.isfinite().any()


# ---- tokens alone


@pytest.mark.parametrize("instruction_set", TOKEN_SETS.values(), ids=TOKEN_SETS)
@pytest.mark.parametrize("position", [5, 15, 16, 70])
@pytest.mark.parametrize("place", ["query", "key", "old key", "first key"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 3e38])
def test_scores_that_overflow_show_in_the_result(
    place: str, value: float, position: int, instruction_set: int
) -> None:
    case = Case(num_heads=1, num_groups=1, head_dim=16, rotary_dim=2)
    session = make_session(case, position, 1)
    spoiled = {
        "query": session.fused_BTO[0, 0, 8:16],
        "key": session.fused_BTO[0, 0, 24:32],
        "old key": session.states_LCBGSD[1, 0, 0, 0, 3, 8:16],
        "first key": session.states_LCBGSD[1, 0, 0, 0, 0, 8:16],
    }
    for same in spoiled.values():  # every score gets the same sign from here
        same[:] = 2.0
    session.states_LCBGSD[1, 0, 0, 0, :position, 8:16] = 2.0
    spoiled[place][:] = value

    (attended_BTO,) = attend(TokenAttention, case, session, instruction_set=instruction_set)

    if value == float("-inf") and place != "query":  # a score of minus infinity has no weight
        expected_BTO = attend_by_definition(case, session.copy(), torch.float32)
        torch.testing.assert_close(attended_BTO, expected_BTO, rtol=1e-5, atol=2e-6)
    else:
        assert attended_BTO.isnan().all()


# ---- prompts alone


@every_case
@pytest.mark.parametrize("position", [0, 30])
def test_long_prompt_attends_as_in_torch(case: Case, position: int) -> None:
    ours, theirs = (make_session(case, position, 280) for _ in range(2))

    (attended_BTO,) = attend(PromptAttention, case, ours)

    assert_near(attended_BTO, attend_by_definition(case, theirs, torch.float32))


@pytest.mark.parametrize("instruction_set", PROMPT_SETS.values(), ids=PROMPT_SETS)
@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("part", ["query", "key", "value"])
def test_numbers_that_are_not_finite_show_and_reach_no_token_before_them(
    part: str, number: float, instruction_set: int
) -> None:
    case = Case(num_heads=4, num_groups=1, rotary_dim=0)
    prompt = make_session(case, 50, 90)
    (expected,) = attend(PromptAttention, case, prompt.copy())
    first = {"query": 0, "key": 4, "value": 5}[part] * case.head_dim
    prompt.fused_BTO[:, 33, first : first + case.head_dim] = number

    (attended_BTO,) = attend(PromptAttention, case, prompt, instruction_set=instruction_set)

    assert torch.equal(attended_BTO[:, :33], expected[:, :33])
    if part == "query":
        assert not attended_BTO[:, 33, : case.head_dim].isfinite().any()
        assert torch.equal(attended_BTO[:, 34:], expected[:, 34:])
    else:
        assert not attended_BTO[:, 33:].isfinite().any()


def test_score_of_minus_infinity_is_no_weight() -> None:
    case = Case(num_heads=1, num_groups=1, rotary_dim=0)
    ours, theirs = (make_session(case, 0, 70) for _ in range(2))
    for prompt in (ours, theirs):
        prompt.fused_BTO[..., : 2 * case.head_dim].abs_()
        prompt.fused_BTO[:, 3, case.head_dim : 2 * case.head_dim] = -torch.inf

    (attended_BTO,) = attend(PromptAttention, case, ours)

    expected = attend_by_definition(case, theirs)
    assert torch.equal(attended_BTO.isnan(), expected.isnan())
    assert_near(attended_BTO, expected)
