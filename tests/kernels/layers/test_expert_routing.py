"""The router chooses what a plain one would, and the same whoever shares the batch."""

import pytest
import torch

from shoal.kernels.layers.expert_routing import Router


def draw(*shape: int, seed: int = 6) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("is_normalized", [False, True])
@pytest.mark.parametrize("size", [1, 48, 1024])
def test_router_matches_the_plain_product(size: int, is_normalized: bool) -> None:
    hidden, weight = draw(50, size), draw(8, size, seed=7) / size**0.5

    experts, shares = Router(weight)(hidden, 3, is_normalized=is_normalized)

    probabilities = (hidden.double() @ weight.double().t()).softmax(dim=-1)
    expected_shares, expected_experts = probabilities.topk(3, dim=-1)
    if is_normalized:
        expected_shares /= expected_shares.sum(dim=-1, keepdim=True)
    assert torch.equal(experts, expected_experts)
    torch.testing.assert_close(shares.double(), expected_shares, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_router_treats_a_row_alike_in_every_batch(dtype: torch.dtype) -> None:
    hidden, router = draw(97, 96).to(dtype), Router(draw(16, 96, seed=7))
    experts, shares = router(hidden, 4, is_normalized=True)

    for start, stop in [(0, 1), (5, 6), (3, 20), (96, 97), (40, 97)]:
        part_experts, part_shares = router(hidden[start:stop], 4, is_normalized=True)

        assert torch.equal(part_experts, experts[start:stop])
        assert torch.equal(part_shares, shares[start:stop])


def test_router_survives_rows_of_zeros() -> None:
    experts, shares = Router(torch.zeros(4, 8))(torch.zeros(2, 8), 2, is_normalized=False)

    assert experts.shape == (2, 2)
    assert torch.equal(shares, torch.full((2, 2), 0.25))
