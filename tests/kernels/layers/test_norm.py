"""The norm against the reference and against transformers."""

import kernel_reference as reference
import pytest
import torch
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from shoal.kernels.layers.norm import layer_norm, rms_norm


def draw(*shape: int, seed: int = 4) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize("shape", [(1, 8), (5, 33), (2, 4, 3, 16), (0, 8)])
@pytest.mark.parametrize("eps", [1e-6, 1e-2])
def test_rms_norm_matches_the_reference(shape: tuple[int, ...], eps: float) -> None:
    hidden, weight = draw(*shape), draw(shape[-1], seed=5)

    result = rms_norm(hidden, weight, eps)

    torch.testing.assert_close(
        result.double(), reference.rms_norm(hidden, weight, eps), rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize("shape", [(1, 8), (5, 33), (2, 4, 3, 16)])
def test_layer_norm_matches_the_reference(shape: tuple[int, ...]) -> None:
    hidden, weight, bias = draw(*shape), draw(shape[-1], seed=5), draw(shape[-1], seed=6)

    result = layer_norm(hidden, weight, bias, 1e-5)

    expected = reference.layer_norm(hidden, weight, bias, 1e-5)
    torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_of_bfloat16_is_rounded_once(weight_dtype: torch.dtype) -> None:
    hidden, weight = draw(4, 256).bfloat16(), draw(256, seed=5).bfloat16().to(weight_dtype)

    result = rms_norm(hidden, weight, 1e-6)

    expected = reference.rms_norm(hidden, weight, 1e-6)
    assert result.dtype is torch.bfloat16
    torch.testing.assert_close(result.double(), expected, rtol=2**-8, atol=0.0)


def test_rms_norm_of_bfloat16_keeps_all_digits_of_a_float32_weight() -> None:
    hidden, weight = draw(64, 256).bfloat16(), draw(256, seed=5).bfloat16() / 64
    module = Gemma2RMSNorm(256, eps=1e-6).bfloat16()
    with torch.no_grad():
        module.weight.copy_(weight)
        expected = module(hidden)

    result = rms_norm(hidden, 1.0 + weight.float(), 1e-6)

    assert result.dtype is torch.bfloat16
    # Two ways to the same float32 fall on two sides of a rounding now and then.
    assert (result != expected).float().mean() < 0.002
    rounded = rms_norm(hidden, (1.0 + weight.float()).bfloat16(), 1e-6)
    assert (rounded != expected).float().mean() > 0.05


def test_rms_norm_takes_statistics_in_float32() -> None:
    # Squares of 1e-3 or sums of 4096 of them lose most digits in bfloat16.
    hidden = torch.full((1, 4096), 1e-3, dtype=torch.bfloat16)

    result = rms_norm(hidden, torch.ones(4096, dtype=torch.bfloat16), 1e-12)

    assert torch.equal(result, torch.ones_like(hidden))


def test_rms_norm_equals_llama() -> None:
    hidden, weight = draw(3, 7, 64), draw(64, seed=5)
    module = LlamaRMSNorm(64, eps=1e-5)
    with torch.no_grad():
        module.weight.copy_(weight)
        expected = module(hidden)

    torch.testing.assert_close(rms_norm(hidden, weight, 1e-5), expected, rtol=1e-6, atol=1e-6)


def test_row_is_normalized_alike_alone_and_in_a_batch() -> None:
    hidden, weight = draw(9, 1030), draw(1030, seed=5)

    together = rms_norm(hidden, weight, 1e-6)

    for row, expected in zip(hidden, together, strict=True):
        assert torch.equal(rms_norm(row[None], weight, 1e-6)[0], expected)


def test_views_and_gradients_give_the_same() -> None:
    hidden, weight = draw(6, 64), draw(32, seed=5)
    halves = hidden[:, ::2]

    assert torch.equal(rms_norm(halves, weight, 1e-6), rms_norm(halves.clone(), weight, 1e-6))
    wanted = hidden[:, :32].clone().requires_grad_()
    rms_norm(wanted, weight, 1e-6).sum().backward()
    assert wanted.grad is not None
