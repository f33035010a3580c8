"""What a peer hosts stays as it was loaded, whatever is computed with it."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from pass_scene import draw, load_engine, stay
from torch import Tensor

from shoal.kernels.linear.quantize import WeightFormat
from shoal.peer.engine.adapters.adapter import Adapter, AdapterPart
from shoal.peer.engine.engine import Engine
from shoal.peer.engine.passes.span_passes import PassWork
from shoal.peer.engine.steps import StepWork

FORMATS = [WeightFormat.FP32, WeightFormat.BF16, WeightFormat.INT8]


def find_tensors(part: Any, seen: set[int]) -> Iterator[Tensor]:
    """Yield every tensor that an object holds, in an order that is always the same."""
    if id(part) in seen:
        return
    seen.add(id(part))
    if isinstance(part, Tensor):
        yield part
    elif isinstance(part, dict):
        for value in part.values():
            yield from find_tensors(value, seen)
    elif isinstance(part, list | tuple):
        for value in part:
            yield from find_tensors(value, seen)
    elif dataclasses.is_dataclass(part):
        for field in dataclasses.fields(part):
            yield from find_tensors(getattr(part, field.name), seen)
    elif type(part).__module__.startswith("shoal."):
        yield from find_tensors(vars(part), seen)


def hash_weights(engine: Engine) -> tuple[int, str]:
    """Return how many bytes of tensors the blocks have, and their digest."""
    digest, num_bytes = hashlib.sha256(), 0
    for tensor in find_tensors(engine.keep_blocks(engine.span), set()):
        data = tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()
        digest.update(data)
        num_bytes += len(data)
    return num_bytes, digest.hexdigest()


def make_adapter(hidden_size: int, num_outputs: int) -> Adapter:
    down, up = draw(2, hidden_size), draw(num_outputs, 2)
    part = AdapterPart("any", slice(0, num_outputs), down, up, 0.5, None)
    return Adapter(2, {(1, "output"): (part,)})


@pytest.mark.parametrize("weights", FORMATS)
def test_weights_are_the_same_after_steps_and_training(
    tiny_models: Any, weights: WeightFormat
) -> None:
    engine = load_engine(tiny_models.get(), weights)
    size = engine.spec.hidden_size
    num_bytes, loaded = hash_weights(engine)
    assert num_bytes >= engine.num_weight_bytes > 0

    hidden, adapter = draw(2, 20, size), make_adapter(size, size)
    work = PassWork(engine.span, hidden, 0.3 * draw(4, 1, 5, size), (adapter, None))
    engine.passes.run_forward(work, stay)
    engine.passes.run_backward(work, draw(2, 20, size, seed=2), stay)
    cache = engine.pool.open(2, 30, engine.span)
    engine.execute([StepWork(cache, 0, hidden)])

    assert hash_weights(engine) == (num_bytes, loaded)


def test_changed_weight_is_seen(tiny_models: Any) -> None:
    engine = load_engine(tiny_models.get())
    loaded = hash_weights(engine)

    largest = max(find_tensors(engine.keep_blocks(engine.span), set()), key=Tensor.numel)
    largest.view(-1)[0] += 1

    assert hash_weights(engine) != loaded
