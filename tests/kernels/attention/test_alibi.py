"""Slopes and biases against those that BLOOM and Falcon make in transformers."""

import pytest
import torch
from transformers.models.bloom import modeling_bloom
from transformers.models.falcon import modeling_falcon

from shoal.kernels.attention.alibi import Alibi
from shoal.kernels.attention.torch_attention import attention


@pytest.mark.parametrize("num_heads", [1, 2, 4, 7, 8, 12, 71, 112])
def test_biases_equal_those_of_bloom(num_heads: int) -> None:
    biases = Alibi.build(num_heads).draw_biases(0, 600)

    expected = modeling_bloom.build_alibi_tensor(torch.ones(1, 600), num_heads, torch.float32)
    torch.testing.assert_close(biases, expected[:, 0], rtol=1e-6, atol=0)


@pytest.mark.parametrize("num_heads", [4, 7])
def test_biases_in_bfloat16_equal_those_of_falcon(num_heads: int) -> None:
    biases = Alibi.build(num_heads, scale=0.25, dtype=torch.bfloat16).draw_biases(0, 600)

    ones = torch.ones(1, 600, dtype=torch.int64)
    expected = modeling_falcon.build_alibi_tensor(ones, num_heads, torch.float32)
    assert torch.equal(biases, expected[:, 0] * 0.25)


def test_biases_of_a_part_are_a_part_of_the_biases() -> None:
    alibi = Alibi.build(6)

    assert torch.equal(alibi.draw_biases(3, 9), alibi.draw_biases(0, 9)[:, 3:])


@pytest.mark.parametrize("num_groups", [1, 2, 6])
def test_keys_may_carry_the_biases(num_groups: int) -> None:
    generator = torch.Generator().manual_seed(1)
    queries = torch.randn(2, 6, 9, 8, generator=generator, requires_grad=True)
    keys, values = (
        torch.randn(2, num_groups, 9, 8, generator=generator, requires_grad=True) for _ in range(2)
    )
    alibi, inputs = Alibi.build(6), (queries, keys, values)

    expected = attention(*inputs, 0, scale=0.3, alibi=alibi)
    found = attention(*alibi.append_to(*inputs, 0.3), 0, scale=0.3)[..., :8]

    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    for mine, theirs in zip(
        torch.autograd.grad(found.square().sum(), inputs),
        torch.autograd.grad(expected.square().sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("head_dim", [80, 128])  # scales that are no powers of two
def test_keys_carry_the_biases_in_16_bits(head_dim: int) -> None:
    generator = torch.Generator().manual_seed(1)
    queries, keys, values = (
        torch.randn(1, 4, 1024, head_dim, generator=generator).bfloat16() for _ in range(3)
    )
    alibi, scale = Alibi.build(4, dtype=torch.bfloat16), head_dim**-0.5

    found = attention(*alibi.append_to(queries, keys, values, scale), 0, scale=scale)

    expected = attention(queries.float(), keys.float(), values.float(), 0, scale=scale, alibi=alibi)
    error = (found[..., :head_dim] - expected).square().mean() / expected.square().mean()
    assert error.sqrt() < 0.005


@pytest.mark.parametrize("num_groups", [1, 4])
def test_heads_with_biases_have_a_size_that_fused_kernels_take(num_groups: int) -> None:
    queries, keys = torch.ones(1, 4, 3, 64), torch.ones(1, num_groups, 3, 64)

    for tensor in Alibi.build(4).append_to(queries, keys, keys, 0.125):
        assert tensor.shape[-1] == 72
