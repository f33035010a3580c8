"""Keys and values that a program writes into pages, beside what torch norms, turns and packs."""

import pytest
import torch
from kernel_reference import assert_same_bits
from torch import Tensor
from triton_devices import every_device

from shoal.kernels.attention.int8_kv import dequantize_kv, quantize_kv
from shoal.kernels.attention.rotary import RotaryTable, apply_rotary
from shoal.kernels.attention.triton_states import write_states
from shoal.kernels.layers.norm import rms_norm

pytestmark = pytest.mark.slow  # the interpreter is

HEADS, GROUPS, PAGE_TOKENS, NUM_PAGES = 3, 2, 16, 5
PAGES, PLACES = torch.tensor([4, 0, 2]), torch.tensor([15, 0, 7])
POSITIONS = torch.tensor([31, 0, 1007])


def draw(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def transform(fused_NXD: Tensor, norm_JD: Tensor | None, width: int | None) -> tuple[Tensor, ...]:
    """Return queries, keys and values as the torch code of a block does."""
    query_key_NJD, values_NGD = fused_NXD.tensor_split([-GROUPS], dim=1)
    if norm_JD is not None:
        ones = torch.ones(fused_NXD.shape[-1])
        normed_NJD = rms_norm(query_key_NJD.float(), ones, 1e-6) * norm_JD
        query_key_NJD = normed_NJD.to(fused_NXD.dtype)
    if width is not None:
        cos_ND, sin_ND = make_rotation(width)
        query_key_NJD = apply_rotary(query_key_NJD.transpose(0, 1), cos_ND, sin_ND).transpose(0, 1)
    return *query_key_NJD.tensor_split([HEADS], dim=1), values_NGD


def make_rotation(width: int) -> tuple[Tensor, Tensor]:
    table = RotaryTable.build(width, 2048, {"rope_type": "default", "rope_theta": 1e4})
    return table.select(POSITIONS)


def make_pages(head_dim: int, dtype: torch.dtype, device: str) -> Tensor:
    width = quantize_kv(torch.zeros(head_dim)).shape[-1]
    shape = (NUM_PAGES, 2, GROUPS, PAGE_TOKENS, width)
    return torch.full(shape, 7, dtype=dtype, device=device)


def run(
    fused_NXD: Tensor, pages: Tensor, norm_JD: Tensor | None, width: int | None, device: str
) -> Tensor:
    rotation = None
    if width is not None:
        cos, sin = make_rotation(width)
        rotation = cos.to(device), sin.to(device)
    queries = write_states(
        fused_NXD.to(device), pages, PAGES.int().to(device), PLACES.int().to(device),
        rotation=rotation, norm_JD=None if norm_JD is None else norm_JD.to(device), norm_eps=1e-6,
    )  # fmt: skip
    return queries.cpu()


@every_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("head_dim", "width", "has_norm"),
    [(16, 16, False), (26, 26, True), (24, 8, True), (1, None, False), (130, None, True)],
)
def test_states_are_those_of_torch(
    head_dim: int, width: int | None, has_norm: bool, dtype: torch.dtype, device: str
) -> None:
    fused = draw(3, HEADS + 2 * GROUPS, head_dim).to(dtype)
    norm = draw(HEADS + GROUPS, head_dim, seed=2) if has_norm else None
    pages = make_pages(head_dim, dtype, device)

    queries = run(fused, pages, norm, width, device)

    written = pages.cpu()
    tolerance = 1e-5 if dtype is torch.float32 else 1e-2
    expected_queries, *states = transform(fused, norm, width)
    assert queries.dtype is dtype
    torch.testing.assert_close(queries, expected_queries, rtol=tolerance, atol=tolerance)
    for kind, expected in enumerate(states):
        kept = written[PAGES, kind, :, PLACES, :head_dim]
        torch.testing.assert_close(kept, expected, rtol=tolerance, atol=tolerance)
        written[PAGES, kind, :, PLACES, :head_dim] = 7
    assert (written == 7).all()


@every_device
@pytest.mark.parametrize(("head_dim", "width"), [(16, 16), (26, None), (130, 64)])
def test_records_are_those_of_torch(head_dim: int, width: int | None, device: str) -> None:
    fused = draw(3, HEADS + 2 * GROUPS, head_dim)
    fused[0, -1] = 0.0
    fused[1, -1] *= 1e-35
    pages = make_pages(head_dim, torch.int8, device)

    run(fused, pages, None, width, device)

    written = pages.cpu()
    _, keys, values = transform(fused, None, width)
    assert_same_bits(written[PAGES, 1, :, PLACES], quantize_kv(values))
    for state, expected in zip(written[PAGES, 0, :, PLACES], quantize_kv(keys), strict=True):
        # The last digit of a turned number may tip a whole one.
        ours, theirs = (
            dequantize_kv(records[None, None], head_dim, torch.float32)
            for records in (state, expected)
        )
        torch.testing.assert_close(ours, theirs, rtol=0, atol=float(theirs.abs().max()) / 100)
    written[PAGES, :, :, PLACES] = 7
    assert (written == 7).all()


@every_device
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_record_of_what_is_not_finite_says_so(value: float, device: str) -> None:
    fused = draw(3, HEADS + 2 * GROUPS, 16)
    fused[1, HEADS, 3] = value
    pages = make_pages(16, torch.int8, device)

    run(fused, pages, None, None, device)

    keys = dequantize_kv(pages.cpu()[:, 0], 16, torch.float32)
    assert keys[0, 0, 0].isnan().all()
    assert keys[4, :, 15].isfinite().all()


@every_device
def test_token_has_the_same_bits_alone(device: str) -> None:
    fused, norm = draw(3, HEADS + 2 * GROUPS, 24), draw(HEADS + GROUPS, 24, seed=2)
    together, alone = (make_pages(24, torch.float32, device) for _ in range(2))
    queries = run(fused, together, norm, None, device)

    query = write_states(
        fused[2:].to(device), alone, PAGES[2:].int().to(device), PLACES[2:].int().to(device),
        rotation=None, norm_JD=norm.to(device), norm_eps=1e-6,
    )  # fmt: skip

    assert torch.equal(query.cpu(), queries[2:])
    assert torch.equal(alone[2, :, :, 7], together[2, :, :, 7])
