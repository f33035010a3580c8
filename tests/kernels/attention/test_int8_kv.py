"""Records of an int8 KV cache: in torch, by definition, and as the kernels in C write and read."""

from dataclasses import replace

import pytest
import torch
from allocations import AllocationSizes
from attention_scene import (
    INT8_CASES,
    KINDS,
    Case,
    Session,
    assert_near,
    attend,
    make_session,
)
from kernel_reference import round_state
from torch import Tensor

from shoal.kernels.attention.int8_kv import (
    SCALE_BYTES,
    count_record_bytes,
    dequantize_kv,
    quantize_kv,
)
from shoal.kernels.attention.native_attention import TokenAttention
from shoal.kernels.attention.rotary import apply_rotary
from shoal.kernels.attention.torch_attention import attention
from shoal.kernels.layers.norm import rms_norm
from shoal.kernels.native.library import list_instruction_sets, load_library

needs_library = pytest.mark.skipif(
    load_library() is None, reason="the native library was not built"
)
every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
POSITION = 150


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("head_dim", [1, 26, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_records_are_those_of_the_definition(head_dim: int, dtype: torch.dtype) -> None:
    states_ND = draw(40, head_dim).to(dtype)
    states_ND[1] = 0.0
    states_ND[2] *= 1e-33
    states_ND[3] *= 1e37
    states_ND[4, 0], states_ND[5, -1] = torch.inf, torch.nan

    records_NR = quantize_kv(states_ND)

    assert records_NR.shape == (40, count_record_bytes(head_dim))
    for state_D, record_R in zip(states_ND, records_NR, strict=True):
        scale, numbers = round_state(state_D)
        torch.testing.assert_close(
            record_R[:SCALE_BYTES].view(torch.float32)[0],
            torch.tensor(scale), rtol=0, atol=0, equal_nan=True,
        )  # fmt: skip
        assert record_R[SCALE_BYTES:].tolist()[:head_dim] == numbers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_take_no_memory_on_their_way_back_but_for_one_head(dtype: torch.dtype) -> None:
    records = quantize_kv(draw(4, 8, 50, 64))
    expected = records[..., SCALE_BYTES:].float() * records[..., :SCALE_BYTES].view(torch.float32)

    with AllocationSizes() as sizes:
        back = dequantize_kv(records, 64, dtype)

    assert torch.equal(back, expected.to(dtype))
    largest, *others = sorted(sizes.found, reverse=True)
    assert largest == back.nbytes
    assert max(others, default=0) <= 50 * 64 * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_come_back_within_half_a_scale(dtype: torch.dtype) -> None:
    states_ND = draw(100, 64).to(dtype)

    back_ND = dequantize_kv(quantize_kv(states_ND), 64, torch.float32)

    half_N1 = states_ND.float().abs().amax(dim=-1, keepdim=True) / 254
    assert ((back_ND - states_ND.float()).abs() <= half_N1 * 1.0001).all()


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
def test_state_that_is_not_finite_stays_so(number: float) -> None:
    states_ND = draw(2, 64)
    states_ND[1, 7] = number

    back_ND = dequantize_kv(quantize_kv(states_ND), 64, torch.float32)

    assert back_ND[0].isfinite().all()
    assert back_ND[1].isnan().all()


@needs_library
@every_kind
@pytest.mark.parametrize("name", INT8_CASES)
def test_kernels_in_c_write_the_records_of_torch(name: str, kind: type[TokenAttention]) -> None:
    case = INT8_CASES[name]
    ours = make_session(case, POSITION, 30, num_rows=2)
    theirs = make_session(replace(case, is_int8=False), POSITION, 30, num_rows=2)
    theirs.fused_BTO[0, 5] = ours.fused_BTO[0, 5] = 0.0

    attend(kind, case, ours)
    attend(kind, case, theirs)

    written = (..., slice(POSITION, POSITION + 30), slice(None))
    ours_R = ours.states_LCBGSD[1][written]
    assert torch.equal(ours_R, quantize_kv(theirs.states_LCBGSD[1][written]))


@needs_library
@every_kind
@pytest.mark.parametrize("name", INT8_CASES)
def test_attention_reads_what_was_kept_also_of_its_own_step(
    name: str, kind: type[TokenAttention]
) -> None:
    case = INT8_CASES[name]
    session = make_session(case, POSITION, 30, num_rows=2)

    for number in list_instruction_sets(kind.kernel).values():
        (attended_BTO,) = attend(kind, case, session, instruction_set=number)

        assert_near(attended_BTO, attend_kept(case, session))


def attend_kept(case: Case, session: Session) -> Tensor:
    """Attend in torch over the records that a session's memory holds by now."""
    num_tokens = session.fused_BTO.shape[1]
    heads_BTJD = session.fused_BTO.unflatten(2, (-1, case.head_dim))[:, :, : case.num_heads]
    if case.norm_JD is not None:
        ones_D = torch.ones(case.head_dim)
        heads_BTJD = rms_norm(heads_BTJD, ones_D, 1e-5) * case.norm_JD[: case.num_heads]
    queries = apply_rotary(heads_BTJD.transpose(1, 2), session.cos_TR, session.sin_TR)
    keys_BGSD, values_BGSD = dequantize_kv(
        session.states_LCBGSD[1, ..., : POSITION + num_tokens, :], case.head_dim, torch.float32
    )
    attended_BHTD = attention(
        queries, keys_BGSD, values_BGSD, POSITION,
        scale=case.head_dim**-0.5, sliding_window=case.window,
    )  # fmt: skip
    return attended_BHTD.transpose(1, 2).flatten(2)


@needs_library
@every_kind
@pytest.mark.parametrize("number", [torch.nan, torch.inf])
@pytest.mark.parametrize("part", ["key", "value"])
def test_numbers_that_are_not_finite_show_in_every_result_behind_them(
    part: str, number: float, kind: type[TokenAttention]
) -> None:
    case = Case(num_heads=4, num_groups=1, rotary_dim=0, is_int8=True)
    session = make_session(case, 50, 90)
    (expected_BTO,) = attend(kind, case, session.copy())
    place = {"key": 4, "value": 5}[part] * case.head_dim
    session.fused_BTO[:, 33, place] = number

    (attended_BTO,) = attend(kind, case, session)

    assert torch.equal(attended_BTO[:, :33], expected_BTO[:, :33])
    assert attended_BTO[:, 33:].isnan().all()


@needs_library
@every_kind
def test_bytes_behind_the_position_are_not_read(kind: type[TokenAttention]) -> None:
    case = INT8_CASES["int8"]
    clean, dirty = (make_session(case, 50, 1) for _ in range(2))
    dirty.states_LCBGSD[:, :, :, :, 51:] = 77

    assert torch.equal(*(attend(kind, case, session)[0] for session in (clean, dirty)))
