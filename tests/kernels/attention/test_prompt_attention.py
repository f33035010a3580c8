"""Attention of prompts in C, against the obvious version and bit by bit among itself."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import kernel_reference as reference
import pytest
import torch
from prompt_scene import CASES, INT8_CASES, Case, Prompt, assert_near, attend, make_prompt
from torch import Tensor

from shoal.kernels.attention.native_attention import (
    MAX_HEAD_DIM,
    PromptAttention,
    TokenAttention,
    list_prompt_instruction_sets,
)
from shoal.kernels.attention.rotary import apply_rotary
from shoal.kernels.attention.torch_attention import attention

pytestmark = pytest.mark.skipif(
    not list_prompt_instruction_sets(), reason="the native library was not built"
)
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
every_case_kept = pytest.mark.parametrize(
    "case", [*CASES.values(), *INT8_CASES.values()], ids=[*CASES, *INT8_CASES]
)
every_instruction_set = pytest.mark.parametrize(
    "instruction_set", list_prompt_instruction_sets().values(), ids=list_prompt_instruction_sets()
)


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def attend_in_parts(case: Case, prompt: Prompt, cuts: Sequence[int]) -> Tensor:
    edges = [0, *cuts, prompt.fused_BTO.shape[1]]
    parts = [attend(case, prompt.cut(first, stop))[0] for first, stop in pairwise(edges)]
    return torch.cat(parts, dim=1)


def attend_by_definition(case: Case, prompt: Prompt, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return the same from the obvious kernels, or in float32 from those in torch.

    Writes keys and values into the memory, too.
    """
    is_wide = dtype is torch.float64
    keys_BGSD, values_BGSD = prompt.states_LCBGSD[1]
    heads_BTJD = prompt.fused_BTO.unflatten(2, (-1, case.head_dim)).to(dtype)
    query_key_BTJD, values_BTGD = heads_BTJD.tensor_split([-case.num_groups], dim=2)
    if case.norm_JD is not None:
        query_key_BTJD = reference.rms_norm(
            query_key_BTJD, torch.ones(case.head_dim), case.shape.norm_eps
        )
        query_key_BTJD = (query_key_BTJD * case.norm_JD).to(dtype)
    rotate = reference.apply_rotary if is_wide else apply_rotary
    query_key_BJTD = rotate(query_key_BTJD.transpose(1, 2), prompt.cos_TR, prompt.sin_TR)
    stop = prompt.position + prompt.fused_BTO.shape[1]
    keys_BGSD[:, :, prompt.position : stop] = query_key_BJTD[:, case.num_heads :]
    values_BGSD[:, :, prompt.position : stop] = values_BTGD.transpose(1, 2)
    attended_BHTD = (reference.attention if is_wide else attention)(
        query_key_BJTD[:, : case.num_heads],
        keys_BGSD[:, :, :stop].to(dtype),
        values_BGSD[:, :, :stop].to(dtype),
        prompt.position,
        scale=case.head_dim**-0.5,
        sliding_window=case.window,
    )
    return attended_BHTD.transpose(1, 2).flatten(2)


@every_instruction_set
@every_case
@pytest.mark.parametrize(("position", "num_tokens"), [(0, 9), (60, 8), (127, 3)])
def test_result_and_cache_are_those_of_the_definition(
    case: Case, position: int, num_tokens: int, instruction_set: int
) -> None:
    ours, theirs = (make_prompt(case, position, num_tokens, num_rows=2) for _ in range(2))

    (attended_BTO,) = attend(case, ours, instruction_set=instruction_set)

    assert_near(attended_BTO, attend_by_definition(case, theirs))
    torch.testing.assert_close(
        ours.states_LCBGSD, theirs.states_LCBGSD, rtol=1e-5, atol=1e-6, equal_nan=True
    )


@every_case
@pytest.mark.parametrize("position", [0, 30])
def test_long_prompt_attends_as_in_torch(case: Case, position: int) -> None:
    ours, theirs = (make_prompt(case, position, 280) for _ in range(2))

    (attended_BTO,) = attend(case, ours)

    assert_near(attended_BTO, attend_by_definition(case, theirs, torch.float32))


@every_case_kept
@pytest.mark.parametrize("position", [0, 63, 70])
def test_every_instruction_set_computes_the_same_bits(case: Case, position: int) -> None:
    prompts = [make_prompt(case, position, 70, 2) for _ in list_prompt_instruction_sets()]

    results = [
        attend(case, prompt, instruction_set=number)[0]
        for prompt, number in zip(prompts, list_prompt_instruction_sets().values(), strict=True)
    ]

    for prompt, result in zip(prompts, results, strict=True):
        assert torch.equal(result, results[0])
        assert are_same_states(prompt, prompts[0])


@every_case_kept
@pytest.mark.parametrize("cuts", [[1], [64], [16, 32, 48, 64], [3, 4, 5, 100], [*range(1, 130)]])
def test_cuts_of_a_prompt_change_nothing(case: Case, cuts: list[int]) -> None:
    prompt = make_prompt(case, 37, 130, num_rows=2)
    whole = prompt.copy()

    assert torch.equal(attend_in_parts(case, prompt, cuts), attend(case, whole)[0])
    assert are_same_states(prompt, whole)


@every_case_kept
def test_company_changes_nothing(case: Case) -> None:
    prompt = make_prompt(case, 100, 50, num_rows=2)
    others = [make_prompt(case, 7, 3, seed=2), make_prompt(case, 0, 90, seed=3)]
    alone = prompt.copy()

    _, together, _ = attend(case, others[0], prompt, others[1])

    assert torch.equal(together, attend(case, alone)[0])
    assert are_same_states(prompt, alone)


def test_rows_change_nothing() -> None:
    case = CASES["groups"]
    both = make_prompt(case, 10, 70, num_rows=2)
    second = replace(
        both, states_LCBGSD=both.states_LCBGSD[:, :, 1:].clone(), fused_BTO=both.fused_BTO[1:]
    )

    assert torch.equal(attend(case, both)[0][1:], attend(case, second)[0])


def test_threads_change_nothing(two_threads: None) -> None:
    case = CASES["groups"]
    prompts = [make_prompt(case, 30 * seed, 100, seed=seed) for seed in range(1, 6)]
    copies = [prompt.copy() for prompt in prompts]

    together = attend(case, *prompts)

    torch.set_num_threads(1)
    for result, copied in zip(together, copies, strict=True):
        assert torch.equal(result, attend(case, copied)[0])


@every_case_kept
def test_cache_is_that_of_generated_tokens_to_the_bit(case: Case) -> None:
    prompt = make_prompt(case, 30, 40)
    generated = prompt.copy()

    attend(case, prompt)

    attend(case, generated, kind=TokenAttention)
    assert are_same_states(prompt, generated)


def test_no_tokens_are_no_work() -> None:
    case = CASES["groups"]
    empty, prompt = make_prompt(case, 5, 0), make_prompt(case, 5, 3)
    alone = prompt.copy()

    first, second, third = attend(case, empty, prompt, empty)

    assert first.numel() == third.numel() == 0
    assert torch.equal(second, attend(case, alone)[0])


@every_instruction_set
@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("part", ["query", "key", "value"])
def test_numbers_that_are_not_finite_show_and_reach_no_token_before_them(
    part: str, number: float, instruction_set: int
) -> None:
    case = Case(num_heads=4, num_groups=1, rotary_dim=0)
    prompt = make_prompt(case, 50, 90)
    expected = attend(case, prompt.copy())[0]
    first = {"query": 0, "key": 4, "value": 5}[part] * case.head_dim
    prompt.fused_BTO[:, 33, first : first + case.head_dim] = number

    (attended_BTO,) = attend(case, prompt, instruction_set=instruction_set)

    assert torch.equal(attended_BTO[:, :33], expected[:, :33])
    if part == "query":
        assert not attended_BTO[:, 33, : case.head_dim].isfinite().any()
        assert torch.equal(attended_BTO[:, 34:], expected[:, 34:])
    else:
        assert not attended_BTO[:, 33:].isfinite().any()


def test_score_of_minus_infinity_is_no_weight() -> None:
    case = Case(num_heads=1, num_groups=1, rotary_dim=0)
    ours, theirs = (make_prompt(case, 0, 70) for _ in range(2))
    for prompt in (ours, theirs):
        prompt.fused_BTO[..., : 2 * case.head_dim].abs_()
        prompt.fused_BTO[:, 3, case.head_dim : 2 * case.head_dim] = -torch.inf

    attended_BTO = attend(case, ours)[0]

    expected = attend_by_definition(case, theirs)
    assert torch.equal(attended_BTO.isnan(), expected.isnan())
    assert_near(attended_BTO, expected)


def test_scores_far_apart_do_not_overflow() -> None:
    case = CASES["groups"]
    ours, theirs = (make_prompt(case, 20, 100) for _ in range(2))
    for prompt in (ours, theirs):
        prompt.fused_BTO.mul_(1e4)
        prompt.states_LCBGSD.mul_(1e4)

    attended_BTO = attend(case, ours)[0]

    expected = attend_by_definition(case, theirs, torch.float32)
    torch.testing.assert_close(attended_BTO, expected, rtol=1e-5, atol=1e-2)


def test_nothing_but_the_tokens_of_the_block_is_written() -> None:
    case = CASES["groups"]
    prompt = make_prompt(case, 33, 2)
    prompt.states_LCBGSD.nan_to_num_()
    before = prompt.states_LCBGSD.clone()

    attend(case, prompt)

    changed = (prompt.states_LCBGSD != before).any(dim=-1).nonzero()
    assert {tuple(place) for place in changed[:, [0, 4]].tolist()} == {(1, 33), (1, 34)}


def test_shape_that_is_too_large_is_refused() -> None:
    with pytest.raises(ValueError, match="no kernel"):
        PromptAttention(0, replace(CASES["groups"], head_dim=MAX_HEAD_DIM + 2).shape)


def are_same_states(one: Prompt, other: Prompt) -> bool:
    """Compare memories, with their numbers that are none."""
    return torch.equal(one.states_LCBGSD.nan_to_num(), other.states_LCBGSD.nan_to_num())
