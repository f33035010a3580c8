"""The shards of an adapter before anything is asked of peers; `swarm/` has the rest."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from shoal.client.adapters.learned_states import LearnedState
from shoal.client.optimizer_shards.sharded_optimizer import ShardedOptimizer
from shoal.client.passes.microbatches import Texts
from shoal.client.passes.pass_asking import PassAsker
from shoal.protocol.errors import UsageError
from shoal.protocol.messages.adapters import LoraConfig, OptimizerKind, OptimizerSettings
from shoal.protocol.spans import Span

MATRICES = {"model.layers.1.mlp.up_proj.lora_A.weight": torch.ones(2, 4)}
STATE = LearnedState(LoraConfig(2, 4.0), OptimizerKind.SGD, MATRICES, num_updates=3)
NOBODY = cast(PassAsker, SimpleNamespace(make_failures=list[Exception]))
"""Any question to a peer would fail."""


def make_texts(optimizer: ShardedOptimizer) -> Texts:
    return Texts(torch.zeros(1, 1, 4), adapters=(optimizer.take_version(is_trained=True),))


def run(work: Any) -> Any:
    return asyncio.run(work)


def test_optimizer_has_begun_before_any_peer_has_the_state() -> None:
    optimizer = ShardedOptimizer(NOBODY)
    assert not optimizer.has_begun
    assert run(optimizer.fetch()) is None

    optimizer.begin(STATE)

    assert optimizer.has_begun
    optimizer.forget()
    assert not optimizer.has_begun
    assert run(optimizer.fetch()) is None


def test_update_without_gradients_asks_nobody_and_changes_nothing() -> None:
    optimizer = ShardedOptimizer(NOBODY)
    optimizer.begin(STATE)
    before = optimizer.take_version(is_trained=True)

    run(optimizer.update(OptimizerSettings(OptimizerKind.SGD, 0.1), max_norm=1.0))

    assert optimizer.take_version(is_trained=True) == before


@pytest.mark.parametrize("change", ["begin", "forget"])
def test_texts_of_an_older_version_are_refused_before_a_peer_is_asked(change: str) -> None:
    optimizer = ShardedOptimizer(NOBODY)
    optimizer.begin(STATE)
    texts = make_texts(optimizer)
    optimizer.begin(STATE) if change == "begin" else optimizer.forget()

    with pytest.raises(UsageError, match="call backward\\(\\) before step"):
        run(optimizer.ask_forward(Span(1, 2), texts))
    with pytest.raises(UsageError, match="call backward\\(\\) before step"):
        run(optimizer.ask_backward(Span(1, 2), texts, torch.zeros(1, 1, 4), "fp32"))


def test_versions_of_two_optimizers_are_told_apart() -> None:
    one, other = ShardedOptimizer(NOBODY), ShardedOptimizer(NOBODY)

    assert one.lineage != other.lineage
