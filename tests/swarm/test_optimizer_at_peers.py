"""Adapters that peers train: the numbers are those of torch's optimizers, whoever is lost."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_scene import FOUR_HOPS, ONE_HOP, REPLICAS, assert_close, make_adapter, swarm_of
from torch import Tensor, nn

from shoal.client.finetune.lora import LoraAdapter
from shoal.peer.adapter_shelf import AdapterShelf
from shoal.protocol.errors import RefusedError, UsageError

NUM_UPDATES = 6
RATES = [0.01 * (1 - number / NUM_UPDATES) for number in range(NUM_UPDATES)]
OPTIONS = {
    "adamw": {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1},
    "sgd": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01},
}
LOCAL = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}


def draw_tokens(number: int) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(0, 128, (3, 20), generator=generator)


def learn(
    model: Any,
    adapter: LoraAdapter,
    optimizer: Any,
    *,
    num_updates: int = NUM_UPDATES,
    num_batches: int = 1,
    max_norm: float | None = None,
    between: Callable[[int, str], None] = lambda number, when: None,
) -> list[float]:
    """Train as one does with torch; return the losses."""
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 - n / (2 * num_updates))
    losses: list[float] = []
    for number in range(num_updates):
        optimizer.zero_grad()
        for batch in range(num_batches):
            tokens = draw_tokens(number * num_batches + batch)
            loss = model(tokens, labels=tokens, active_adapter=adapter).loss
            between(number, "forward")
            (loss / num_batches).backward()
            losses.append(loss.item())
        between(number, "backward")
        if max_norm is not None and adapter.trainer is not None:
            optimizer.clip_grad_norm(max_norm)
        elif max_norm is not None:
            nn.utils.clip_grad_norm_(adapter.parameters(), max_norm)
        optimizer.step()
        between(number, "update")
        schedule.step()
    return losses


def learn_here(model: Any, adapter: LoraAdapter, kind: str, **settings: Any) -> list[float]:
    return learn(model, adapter, LOCAL[kind](adapter.parameters(), **OPTIONS[kind]), **settings)


def assert_same(ours: LoraAdapter, theirs: LoraAdapter) -> None:
    expected = theirs.state_dict()
    for name, matrix in ours.state_dict().items():
        assert_close(matrix, expected[name])


def assert_same_losses(ours: list[float], theirs: list[float]) -> None:
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert abs(one - other) < 1e-4 * abs(other)


@pytest.mark.parametrize("spans", [ONE_HOP, FOUR_HOPS], ids=["one hop", "four hops"])
@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_training_at_peers_is_that_of_torch(
    tiny_models: Any, spans: Sequence[tuple[int, int]], kind: str
) -> None:
    with swarm_of(tiny_models, spans) as (_, model):
        ours, theirs = make_adapter(model), make_adapter(model)
        optimizer = model.optimizer_at_peers(ours, kind, **OPTIONS[kind])
        losses = learn(model, ours, optimizer, num_batches=2, max_norm=0.05)
        expected = learn_here(model, theirs, kind, num_batches=2, max_norm=0.05)

        assert_same_losses(losses, expected)
        assert_same(ours, theirs)
