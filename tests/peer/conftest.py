"""The engine that a service under test has."""

from __future__ import annotations

from typing import Any

import pytest
from kv_cache_scene import PoolMaker
from service_scene import SPAN

from shoal.kernels.linear.quantize import WeightFormat
from shoal.models.checkpoints.checkpoint import Checkpoint
from shoal.peer.engine.engine import Engine


@pytest.fixture(scope="module")
def engine(tiny_models: Any) -> Engine:
    """Two blocks in the middle of the plain tiny Llama."""
    checkpoint = Checkpoint.open(tiny_models.get().directory)
    return Engine.load(checkpoint, SPAN, WeightFormat.FP32, kv_budget_bytes=2**22)


@pytest.fixture(params=["lazy", "paged"])
def make_pool(request: pytest.FixtureRequest) -> PoolMaker:
    """Makes pools of KV memory; the test runs once for each kind of memory."""
    return PoolMaker(request.param)
