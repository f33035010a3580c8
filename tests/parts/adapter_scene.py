"""Swarms in one process, adapters that change something, and peft's models with the same."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import peft
import torch
from torch import Tensor

from shoal.client import AutoDistributedModelForCausalLM
from shoal.client.model.causal_lm import DistributedCausalLM
from shoal.client.training.lora import LoraAdapter
from shoal.peer.local_swarm.loopback import LoopbackSwarm

ONE_HOP = ((0, 4),)
FOUR_HOPS = ((0, 1), (1, 2), (2, 3), (3, 4))
REPLICAS = ((0, 2), (0, 2), (2, 4), (2, 4))
TOLERANCE = 1e-4


@contextlib.contextmanager
def swarm_of(
    tiny_models: Any,
    spans: Sequence[tuple[int, int]] = FOUR_HOPS,
    variant: str = "llama",
    **settings: Any,
) -> Iterator[tuple[LoopbackSwarm, DistributedCausalLM]]:
    directory = tiny_models.get(variant).directory
    swarm = LoopbackSwarm(directory, spans, weights="fp32")
    with AutoDistributedModelForCausalLM.from_pretrained(
        directory, connect=swarm.connect, torch_dtype="float32", **settings
    ) as model:
        yield swarm, model


def make_adapter(model: Any, seed: int = 1, **settings: Any) -> LoraAdapter:
    """Return an adapter with matrices that change something."""
    adapter = LoraAdapter.create(model, **{"rank": 3, "alpha": 5, **settings})
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for matrix in adapter.parameters():
            matrix.copy_(0.1 * torch.randn(matrix.shape, generator=generator))
    return adapter


def open_with_peft(tiny_model: Any, adapter: LoraAdapter, folder: Path) -> Any:
    adapter.save(folder)
    reference = copy.deepcopy(tiny_model.reference)
    return peft.PeftModel.from_pretrained(reference, folder, is_trainable=True)


def assert_close(
    found: Tensor | None, expected: Tensor | None, tolerance: float = TOLERANCE
) -> None:
    assert found is not None
    assert expected is not None
    assert found.shape == expected.shape
    found, expected = found.detach().double(), expected.detach().double()
    error = float((found - expected).norm() / expected.norm())
    assert error < tolerance, error
