"""What a pass refuses, by name, and that nothing stays behind."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from pass_scene import draw, load_engine, stay
from torch import Tensor

from shoal.kernels.linear.quantize import WeightFormat
from shoal.peer.engine.engine import Engine
from shoal.peer.engine.passes.span_passes import PassWork
from shoal.protocol.errors import ErrorCode, RefusedError
from shoal.protocol.spans import Span

SPAN = Span(1, 3)
HIDDEN = draw(2, 7, 64)
PROMPTS = draw(2, 1, 3, 64, seed=2)
GRADS = draw(2, 7, 64, seed=3)


def spoil(tensor: Tensor, value: float = float("nan")) -> Tensor:
    tensor = tensor.clone()
    tensor.view(-1)[5] = value
    return tensor


@pytest.fixture(scope="module")
def engine(tiny_models) -> Engine:
    return load_engine(tiny_models.get(), WeightFormat.INT8, SPAN)


@pytest.fixture
def no_leaks() -> Iterator[None]:
    """Fail if a refusal leaves tensors behind that only the garbage collector would find."""
    gc.collect()
    gc.disable()
    before = count_tensors()
    yield
    after = count_tensors()
    gc.enable()
    assert after <= before


def count_tensors() -> int:
    # Not what it claims to be: some modules only load when they are asked.
    return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())


@pytest.mark.parametrize(
    ("work", "complaint"),
    [
        (PassWork(SPAN, spoil(HIDDEN)), "the hidden states are not finite"),
        (PassWork(SPAN, spoil(HIDDEN, float("inf"))), "the hidden states are not finite"),
        (PassWork(SPAN, HIDDEN, spoil(PROMPTS)), "prompts are not finite"),
    ],
)
@pytest.mark.usefixtures("no_leaks")
def test_unusable_works_are_refused_both_ways(
    engine: Engine, work: PassWork, complaint: str
) -> None:
    with pytest.raises(RefusedError, match=complaint) as there:
        engine.passes.run_forward(work, stay)
    with pytest.raises(RefusedError, match=complaint) as back:
        engine.passes.run_backward(work, torch.zeros(work.hidden_BTH.shape), stay)
    assert there.value.code == back.value.code == ErrorCode.BAD_VALUES
    del there, back


@pytest.mark.usefixtures("no_leaks")
def test_unusable_gradients_are_refused(engine: Engine) -> None:
    with pytest.raises(RefusedError, match="gradients are not finite") as refusal:
        engine.passes.run_backward(PassWork(SPAN, HIDDEN), spoil(GRADS), stay)
    assert refusal.value.code is ErrorCode.BAD_VALUES
    del refusal


@pytest.mark.usefixtures("no_leaks")
def test_what_overflows_is_refused(engine: Engine) -> None:
    work = PassWork(SPAN, HIDDEN)

    with pytest.raises(RefusedError, match="make the blocks overflow") as back:
        engine.passes.run_backward(work, GRADS.sign() * 3e38, stay)
    with pytest.raises(RefusedError, match="make the blocks overflow") as there:
        engine.passes.run_forward(PassWork(SPAN, HIDDEN.sign() * 3e38, PROMPTS.sign() * 3e38), stay)

    assert there.value.code is back.value.code is ErrorCode.BAD_VALUES
    assert engine.passes.run_forward(work, stay).isfinite().all()
    del there, back


@pytest.mark.usefixtures("no_leaks")
def test_a_lack_of_memory_asks_for_smaller_microbatches(engine: Engine) -> None:
    turns: list[int] = []

    def lack_memory() -> None:
        turns.append(1)
        if len(turns) > 20:
            torch.empty(2**50, dtype=torch.uint8)

    with pytest.raises(RefusedError, match="2 x 7 tokens at once; send smaller") as refusal:
        engine.passes.run_backward(PassWork(SPAN, HIDDEN, PROMPTS), GRADS, lack_memory)
    assert refusal.value.code is ErrorCode.OUT_OF_MEMORY
    assert refusal.value.__context__ is None
    del refusal
