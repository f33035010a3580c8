"""Attention over pages in Triton: the reference, whatever the pages, in any company.

Of generated tokens first, then of prompts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import kernel_reference as reference
import pytest
import torch
from chosen_cases import choose_cases
from torch import Tensor
from triton_devices import every_device

from shoal.kernels.attention.int8_kv import quantize_kv
from shoal.kernels.attention.triton_attention import (
    MAX_HEAD_DIM,
    PART_TOKENS,
    paged_attention,
    paged_prompt_attention,
)

pytestmark = pytest.mark.slow  # the interpreter is

LENGTHS = [PART_TOKENS, 1, 37, 2 * PART_TOKENS + 1]
SHORT = [37, PART_TOKENS + 1]
"""A part of the keys, and a part and another. The interpreter takes 30 ms for each."""


@dataclass
class Caches:
    """Sessions of some lengths, their pages scattered over one memory, and a token of each."""

    queries_NHD: Tensor
    pages_PCGSW: Tensor
    tables_NM: Tensor
    lengths_N: Tensor

    def attend(self, device: str = "cpu", **options: Any) -> Tensor:
        tensors = (self.queries_NHD, self.pages_PCGSW, self.tables_NM, self.lengths_N)
        scale = self.queries_NHD.shape[-1] ** -0.5
        attend = reference.paged_attention if device == "reference" else paged_attention
        moved = (tensor if device == "reference" else tensor.to(device) for tensor in tensors)
        return attend(*moved, scale=scale, **options).cpu()

    def pick(self, *tokens: int) -> Caches:
        """Return some of the tokens in another order, with the same memory."""
        chosen = list(tokens)
        return Caches(
            self.queries_NHD[chosen], self.pages_PCGSW,
            self.tables_NM[chosen], self.lengths_N[chosen],
        )  # fmt: skip


@dataclass
class Prompts:
    """Rows of a number of tokens at a position, of sessions whose pages are scattered."""

    rows: list[tuple[int, int]]
    queries_NHD: Tensor
    pages_PCGSW: Tensor
    tables_XM: Tensor

    @classmethod
    def make(cls, rows: list[tuple[int, int]], **shape: Any) -> Prompts:
        caches = make_caches([position + count for count, position in rows], **shape)
        queries = torch.randn(
            sum(count for count, _ in rows), *caches.queries_NHD.shape[1:],
            generator=torch.Generator().manual_seed(4),
        )  # fmt: skip
        queries = queries.to(caches.queries_NHD.dtype)
        return cls(rows, queries, caches.pages_PCGSW, caches.tables_NM)

    def attend(self, device: str = "cpu", **options: Any) -> Tensor:
        counts = [count for count, _ in self.rows]
        firsts = [sum(counts[:row]) for row in range(len(counts))]
        rows = [(first, *row) for first, row in zip(firsts, self.rows, strict=True)]
        rows_X3 = torch.tensor(rows, dtype=torch.int32).view(-1, 3)
        tensors = (self.queries_NHD, self.pages_PCGSW, self.tables_XM, rows_X3)
        options["scale"] = self.queries_NHD.shape[-1] ** -0.5
        if device == "reference":
            return reference.paged_prompt_attention(*tensors, **options)
        queries, pages, tables, rows_X3 = (tensor.to(device) for tensor in tensors)
        most_tokens = max(counts, default=0)
        return paged_prompt_attention(queries, pages, tables, rows_X3, most_tokens, **options).cpu()

    def pick(self, row: int, start: int, stop: int) -> Prompts:
        """Return some tokens of one row, by themselves."""
        count, position = self.rows[row]
        first = sum(before for before, _ in self.rows[:row])
        assert stop <= count
        queries = self.queries_NHD[first + start : first + stop]
        table = self.tables_XM[row : row + 1].contiguous()
        return Prompts([(stop - start, position + start)], queries, self.pages_PCGSW, table)


def make_caches(
    lengths: list[int],
    *,
    heads: int = 4,
    groups: int = 2,
    head_dim: int = 16,
    page_tokens: int = 16,
    dtype: torch.dtype = torch.float32,
    is_int8: bool = False,
) -> Caches:
    draw = torch.Generator().manual_seed(3)
    needed = [-(-length // page_tokens) for length in lengths]
    states = torch.randn(
        sum(needed) + 1, 2, groups, page_tokens, head_dim, generator=draw
    ).to(dtype)  # fmt: skip
    order = torch.randperm(len(states), generator=draw).tolist()
    # Whatever no session has written to must not matter.
    states[order[0]] = torch.nan
    tables = torch.full((len(lengths), max(needed)), order.pop(0), dtype=torch.int32)
    for row, (length, num_pages) in enumerate(zip(lengths, needed, strict=True)):
        for place in range(num_pages):
            page = order.pop()
            tables[row, place] = page
            states[page, :, :, max(0, length - place * page_tokens) :] = torch.nan
    return Caches(
        torch.randn(len(lengths), heads, head_dim, generator=draw).to(dtype),
        quantize_kv(states) if is_int8 else states,
        tables,
        torch.tensor(lengths, dtype=torch.int32),
    )


def assert_near(actual: Tensor, expected: Tensor) -> None:
    # Float32 up to the order of sums; on a device also with its own powers and products.
    tolerance = {torch.float32: 2e-5, torch.bfloat16: 1e-2, torch.float16: 1e-3}[actual.dtype]
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)


@every_device
@pytest.mark.parametrize(
    ("heads", "groups", "head_dim", "page_tokens", "is_int8"),
    [
        pytest.param(4, 2, 16, 64, False, marks=pytest.mark.thorough), (4, 2, 16, 64, True),
        (1, 1, 26, 16, True), (20, 1, 8, 5, False), (3, 1, 256, 64, False),
        pytest.param(3, 3, 80, 300, True, marks=pytest.mark.thorough),
    ],
)  # fmt: skip
def test_attention_matches_the_reference(
    heads: int, groups: int, head_dim: int, page_tokens: int, is_int8: bool, device: str
) -> None:
    caches = make_caches(
        LENGTHS if heads == 4 else SHORT,
        heads=heads, groups=groups, head_dim=head_dim, page_tokens=page_tokens, is_int8=is_int8,
    )  # fmt: skip

    assert_near(caches.attend(device), caches.attend("reference"))


@every_device
def test_floats_may_lie_further_apart_than_a_head_is_wide(device: str) -> None:
    caches = make_caches(SHORT, groups=1)
    expected = caches.attend(device)
    wide = torch.full((*caches.pages_PCGSW.shape[:-1], 20), torch.nan)
    wide[..., :16] = caches.pages_PCGSW
    caches.pages_PCGSW = wide

    assert torch.equal(caches.attend(device), expected)
    assert_near(expected, caches.attend("reference"))


@every_device
@pytest.mark.parametrize("is_int8", [False, True], ids=["floats", "int8"])
@pytest.mark.parametrize("window", [1, 13, PART_TOKENS])
def test_window_hides_all_but_the_last_keys(window: int, is_int8: bool, device: str) -> None:
    caches = make_caches(SHORT, groups=1, is_int8=is_int8)

    result = caches.attend(device, sliding_window=window)

    assert_near(result, caches.attend("reference", sliding_window=window))


@every_device
@pytest.mark.parametrize(
    ("softcap", "window", "is_int8"),
    [(50.0, None, False), (0.8, 20, True)],
)
def test_scores_are_capped_before_the_softmax(
    softcap: float, window: int | None, is_int8: bool, device: str
) -> None:
    caches = make_caches(SHORT, groups=1, is_int8=is_int8)
    caches.queries_NHD *= 8

    result = caches.attend(device, softcap=softcap, sliding_window=window)

    assert_near(result, caches.attend("reference", softcap=softcap, sliding_window=window))
    assert not torch.allclose(result, caches.attend(device, sliding_window=window), atol=1e-4)


@every_device
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_states_of_16_bits_are_attended_to_in_float32(dtype: torch.dtype, device: str) -> None:
    caches = make_caches(SHORT, groups=1, dtype=dtype)

    result = caches.attend(device)

    assert result.dtype is dtype
    assert_near(result, caches.attend("reference"))


@every_device
@pytest.mark.parametrize(("window", "is_int8"), [(None, False), (None, True), (20, False)])
def test_token_has_the_same_bits_alone_and_in_any_company(
    window: int | None, is_int8: bool, device: str
) -> None:
    caches = make_caches(SHORT, groups=1, is_int8=is_int8)

    together = caches.attend(device, sliding_window=window)

    for tokens in [(0,), (1,), (1, 1, 0)]:
        some = caches.pick(*tokens).attend(device, sliding_window=window)
        assert torch.equal(some, together[list(tokens)])


@every_device
def test_token_has_the_same_bits_with_a_table_of_its_own_length(device: str) -> None:
    caches = make_caches(SHORT, groups=1)
    alone = caches.pick(0)
    alone.tables_NM = alone.tables_NM[:, :3].contiguous()

    assert torch.equal(alone.attend(device), caches.attend(device)[:1])


@every_device
def test_row_without_keys_gets_zeros_and_disturbs_nobody(device: str) -> None:
    caches = make_caches([37, 5])
    expected = caches.attend(device)[0]
    caches.lengths_N[1] = 0

    result = caches.attend(device)

    assert torch.equal(result[0], expected)
    assert not result[1].any()


@every_device
@pytest.mark.parametrize(
    ("kind", "is_int8"), choose_cases([(0, False), (1, True)], [0, 1], [False, True])
)
def test_numbers_that_are_not_finite_show_in_the_tokens_that_see_them(
    kind: int, is_int8: bool, device: str
) -> None:
    caches = make_caches(SHORT, groups=1, is_int8=is_int8)
    clean = caches.attend(device)
    page = caches.tables_NM[1, 1]
    states = torch.full((16,), torch.nan)
    caches.pages_PCGSW[page, kind, 0, 3] = quantize_kv(states) if is_int8 else states

    result = caches.attend(device)

    assert result[1].isnan().all()
    assert torch.equal(result[0], clean[0])
    # Behind the window they are not seen.
    assert caches.attend(device, sliding_window=200)[1].isfinite().all()


@every_device
def test_no_tokens_at_all_are_fine(device: str) -> None:
    assert make_caches([5]).pick().attend(device).shape == (0, 4, 16)


ROWS = [(70, 0), (1, 37), (5, 130)]
"""A prompt of two tiles, a token, and the rest of a prompt behind some blocks of keys."""


@every_device
@pytest.mark.parametrize(
    ("heads", "groups", "head_dim", "page_tokens", "is_int8"),
    [
        (4, 2, 16, 64, False), (2, 1, 26, 5, True), (3, 1, 256, 16, True),
        pytest.param(4, 2, 16, 64, True, marks=pytest.mark.thorough),
        pytest.param(2, 2, 80, 300, False, marks=pytest.mark.thorough),
    ],
)  # fmt: skip
def test_prompts_match_the_reference(
    heads: int, groups: int, head_dim: int, page_tokens: int, is_int8: bool, device: str
) -> None:
    prompts = Prompts.make(
        ROWS if heads == 4 else ROWS[1:],
        heads=heads, groups=groups, head_dim=head_dim, page_tokens=page_tokens, is_int8=is_int8,
    )  # fmt: skip

    assert_near(prompts.attend(device), prompts.attend("reference"))


@every_device
@pytest.mark.parametrize(("window", "softcap"), [(1, None), (50, 0.8), (None, 50.0)])
def test_prompts_have_windows_and_caps(
    window: int | None, softcap: float | None, device: str
) -> None:
    prompts = Prompts.make(ROWS, heads=2, groups=1)
    prompts.queries_NHD *= 8

    result = prompts.attend(device, sliding_window=window, softcap=softcap)

    assert_near(result, prompts.attend("reference", sliding_window=window, softcap=softcap))
    assert not torch.allclose(result, prompts.attend(device), atol=1e-4)


@every_device
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_prompts_of_16_bits_are_attended_to_in_float32(dtype: torch.dtype, device: str) -> None:
    prompts = Prompts.make(ROWS[1:], heads=2, groups=1, dtype=dtype)

    result = prompts.attend(device)

    assert result.dtype is torch.float32
    assert_near(result, prompts.attend("reference"))


@every_device
@pytest.mark.parametrize(("window", "is_int8"), [(None, False), (None, True), (50, False)])
def test_prompt_has_the_same_bits_in_any_company_and_wherever_it_is_cut(
    window: int | None, is_int8: bool, device: str
) -> None:
    prompts = Prompts.make(ROWS, heads=2, groups=1, is_int8=is_int8)

    together = prompts.attend(device, sliding_window=window)

    for row, start, stop in [(0, 0, 70), (0, 0, 3), (0, 3, 64), (0, 64, 70), (2, 0, 5), (2, 4, 5)]:
        part = prompts.pick(row, start, stop).attend(device, sliding_window=window)
        first = {0: 0, 2: 71}[row]
        # In the interpreter numpy multiplies, and rounds a row by its place in the product.
        whole = together[first + start : first + stop]
        assert_near(part, whole.double())
        assert device == "cpu" or torch.equal(part, whole)


@every_device
def test_queries_of_prompts_may_lie_apart(device: str) -> None:
    prompts = Prompts.make(ROWS[1:], heads=2, groups=1)
    expected = prompts.attend(device)

    wide = torch.full((6, 3, 16), torch.nan)
    wide[:, :2] = prompts.queries_NHD
    prompts.queries_NHD = wide[:, :2]
    assert torch.equal(prompts.attend(device), expected)

    prompts.queries_NHD = prompts.queries_NHD.mT.contiguous().mT
    assert torch.equal(prompts.attend(device), expected)


@every_device
def test_numbers_that_are_not_finite_show_in_the_prompts_that_see_them(device: str) -> None:
    prompts = Prompts.make(ROWS, heads=2, groups=1)
    clean = prompts.attend(device)
    page = prompts.tables_XM[2, 1]
    prompts.pages_PCGSW[page, 0, 0, 3] = torch.nan

    result = prompts.attend(device)

    assert result[71:].isnan().all()
    assert torch.equal(result[:71], clean[:71])
    # Behind the window they are not seen.
    assert prompts.attend(device, sliding_window=100)[71:].isfinite().all()


@every_device
def test_no_prompts_at_all_are_fine(device: str) -> None:
    prompts = Prompts.make(ROWS[1:]).pick(0, 0, 0)

    assert prompts.attend(device).shape == (0, 4, 16)


def test_what_does_not_fit_is_refused() -> None:
    caches = make_caches([5, 9])
    queries, pages, tables, lengths = (
        caches.queries_NHD, caches.pages_PCGSW, caches.tables_NM, caches.lengths_N,
    )  # fmt: skip
    wide = MAX_HEAD_DIM + 1

    with pytest.raises(ValueError, match="do not fit pages"):
        paged_attention(queries[:, :3], pages, tables, lengths, scale=1.0)
    with pytest.raises(ValueError, match="do not fit pages"):
        paged_attention(torch.zeros(2, 4, 17), pages, tables, lengths, scale=1.0)
    with pytest.raises(ValueError, match="do not fit pages"):
        paged_attention(queries, pages.to(torch.int8), tables, lengths, scale=1.0)
    with pytest.raises(ValueError, match=f"at most {MAX_HEAD_DIM}"):
        paged_attention(torch.zeros(2, 4, wide), pages, tables, lengths, scale=1.0)
    with pytest.raises(ValueError, match="as many tables"):
        paged_attention(queries, pages, tables[:1], lengths, scale=1.0)
    with pytest.raises(ValueError, match="int32"):
        paged_attention(queries, pages, tables.long(), lengths, scale=1.0)
    with pytest.raises(ValueError, match="contiguous"):
        paged_attention(queries, pages.mT.contiguous().mT, tables, lengths, scale=1.0)
    with pytest.raises(ValueError, match="at least one position"):
        paged_attention(queries, pages, tables, lengths, scale=1.0, sliding_window=0)
    with pytest.raises(ValueError, match="rows of three numbers"):
        paged_prompt_attention(queries, pages, tables, lengths, 1, scale=1.0)
