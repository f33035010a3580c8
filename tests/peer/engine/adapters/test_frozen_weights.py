"""What a peer hosts stays as it was loaded, whatever is computed with it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pass_scene import draw, load_engine, stay
from torch import Tensor, nn

from shoal.kernels.linear.quantize import ON_CPUS, WeightFormat
from shoal.peer.engine.adapters.adapter import Adapter, AdapterPart
from shoal.peer.engine.engine import Engine
from shoal.peer.engine.passes.span_passes import PassWork
from shoal.peer.engine.steps import StepWork


def list_weights(engine: Engine) -> list[Tensor]:
    """Return every tensor that the blocks of an engine hold, wherever it is."""
    found: dict[int, Tensor] = {}
    seen: dict[int, object] = {}  # which keeps them, and so their ids

    def visit(thing: object) -> None:
        if id(thing) in seen:
            return
        seen[id(thing)] = thing
        if isinstance(thing, Tensor):
            found[id(thing)] = thing
        elif isinstance(thing, nn.Module):
            for weight in [*thing.parameters(), *thing.buffers()]:
                visit(weight)
        elif isinstance(thing, list | tuple | set):
            for item in thing:
                visit(item)
        elif isinstance(thing, dict):
            visit(list(thing.values()))
        elif type(thing).__module__.startswith("shoal."):
            names = getattr(type(thing), "__slots__", ())
            visit([getattr(thing, name) for name in names])
            visit(getattr(thing, "__dict__", {}))

    visit(engine.keep_blocks(engine.span))
    return [tensor for tensor in found.values() if not tensor.is_meta]


def make_adapter(size: int) -> Adapter:
    part = AdapterPart("any", slice(0, size), draw(2, size), draw(size, 2), 0.5, None)
    return Adapter(2, {(1, "output"): (part,)})


@pytest.mark.parametrize("variant", ["llama", "mixtral", "bloom", "wrapped-stablelm"])
@pytest.mark.parametrize("weights", ON_CPUS)
def test_weights_are_the_same_after_steps_and_training(
    tiny_models: Any, variant: str, weights: WeightFormat
) -> None:
    is_wrapped = variant.startswith("wrapped")
    if is_wrapped and weights is WeightFormat.INT8:
        pytest.skip("wrapped blocks have float weights")
    engine = load_engine(tiny_models.get(variant), weights)
    held = list_weights(engine)
    before = [tensor.clone() for tensor in held]
    assert sum(tensor.nbytes for tensor in held) >= engine.num_weight_bytes > 0

    size = engine.spec.hidden_size
    hidden, adapter = draw(2, 20, size), None if is_wrapped else make_adapter(size)
    work = PassWork(engine.span, hidden, 0.3 * draw(4, 1, 5, size), (adapter, None))
    engine.passes.run_forward(work, stay)
    engine.passes.run_backward(work, draw(2, 20, size, seed=2), stay)
    cache = engine.pool.open(2, 30, engine.span)
    engine.execute([StepWork(cache, 0, hidden)])

    for tensor, copied in zip(held, before, strict=True):
        assert torch.equal(tensor, copied)
        assert not tensor.requires_grad
        assert tensor.grad is None
