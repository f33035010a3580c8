"""Muon: torch's rule, without its rounding to bfloat16."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shoal.peer.engine.training.muon import apply_muon, orthogonalize

RATES = {"learning_rate": 0.02, "momentum": 0.95, "weight_decay": 0.1}


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def run_ours(start: Tensor, gradients: Tensor) -> Tensor:
    """Return what updates make of a weight."""
    weight, buffer = start.clone(), torch.zeros_like(start)
    for gradient in gradients:
        apply_muon(weight, gradient, buffer, **RATES)
    return weight


def run_torch(start: Tensor, gradients: Tensor) -> Tensor:
    weight = torch.nn.Parameter(start.clone())
    optimizer = torch.optim.Muon(
        [weight], lr=0.02, momentum=0.95, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
    )
    for gradient in gradients:
        weight.grad = gradient.clone()
        optimizer.step()
    return weight.detach()


def measure_error(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / other.norm())


@pytest.mark.parametrize("shape", [(64, 64), (96, 32), (32, 96)])
def test_muon_is_torchs_but_for_its_rounding(shape: tuple[int, int]) -> None:
    start, *more = draw(6, *shape)
    start, gradients = start * 0.02, torch.stack(more)

    ours = run_ours(start, gradients)
    of_torch = run_torch(start, gradients)
    exact = run_ours(start.double(), gradients.double())

    moved = exact - start
    assert measure_error(ours - start, moved) < 3e-6
    assert measure_error(of_torch - start, moved) < 2e-2  # bfloat16 has steps of 2^-8
    assert measure_error(of_torch - start, moved) > 1e-3  # so the comparison sees such steps


def test_muon_brings_singular_values_near_one() -> None:
    matrix = draw(48, 64) @ torch.diag(torch.logspace(0, -1.5, 64))

    values = torch.linalg.svdvals(orthogonalize(matrix))

    assert 0.6 < float(values.min()) <= float(values.max()) < 1.25
    assert not orthogonalize(torch.zeros(4, 3)).any()
