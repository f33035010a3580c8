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
    ("work", "code", "complaint"),
    [
        (PassWork(Span(0, 2), HIDDEN), ErrorCode.WRONG_SPAN, "hosts blocks 1:3, not 0:2"),
        (PassWork(Span(1, 4), HIDDEN), ErrorCode.WRONG_SPAN, "hosts blocks 1:3, not 1:4"),
        (PassWork(SPAN, HIDDEN[0]), ErrorCode.BAD_VALUES, r"\[rows, tokens, 64\], not \(7, 64\)"),
        (PassWork(SPAN, HIDDEN[:, :, :63]), ErrorCode.BAD_VALUES, r"not \(2, 7, 63\)"),
        (PassWork(SPAN, HIDDEN[:0]), ErrorCode.BAD_VALUES, r"not \(0, 7, 64\)"),
        (PassWork(SPAN, HIDDEN[:, :0]), ErrorCode.BAD_VALUES, r"not \(2, 0, 64\)"),
        (PassWork(SPAN, HIDDEN.long()), ErrorCode.BAD_VALUES, "not floats but torch.int64"),
        (PassWork(SPAN, spoil(HIDDEN)), ErrorCode.BAD_VALUES, "the hidden states are not finite"),
        (
            PassWork(SPAN, spoil(HIDDEN, float("inf"))),
            ErrorCode.BAD_VALUES,
            "the hidden states are not finite",
        ),
        (PassWork(SPAN, torch.zeros(1, 513, 64)), ErrorCode.TOO_LONG, "512 tokens, not 513"),
        (PassWork(SPAN, HIDDEN, PROMPTS[:1]), ErrorCode.BAD_VALUES, r"\[2, 1 or 2, 1 to 7, 64\]"),
        (PassWork(SPAN, HIDDEN, PROMPTS[0]), ErrorCode.BAD_VALUES, r"not \(1, 3, 64\)"),
        (
            PassWork(SPAN, HIDDEN, PROMPTS.expand(-1, 3, -1, -1)),
            ErrorCode.BAD_VALUES,
            r"not \(2, 3, 3, 64\)",
        ),
        (PassWork(SPAN, HIDDEN, draw(2, 1, 8, 64)), ErrorCode.BAD_VALUES, r"not \(2, 1, 8, 64\)"),
        (PassWork(SPAN, HIDDEN, PROMPTS[:, :, :0]), ErrorCode.BAD_VALUES, r"not \(2, 1, 0, 64\)"),
        (PassWork(SPAN, HIDDEN, PROMPTS.int()), ErrorCode.BAD_VALUES, "prompts are not floats"),
        (PassWork(SPAN, HIDDEN, spoil(PROMPTS)), ErrorCode.BAD_VALUES, "prompts are not finite"),
    ],
)
@pytest.mark.usefixtures("no_leaks")
def test_unusable_works_are_refused_both_ways(
    engine: Engine, work: PassWork, code: ErrorCode, complaint: str
) -> None:
    with pytest.raises(RefusedError, match=complaint) as there:
        engine.passes.run_forward(work, stay)
    with pytest.raises(RefusedError, match=complaint) as back:
        engine.passes.run_backward(work, torch.zeros(work.hidden_BTH.shape), stay)
    assert there.value.code == back.value.code == code
    del there, back


@pytest.mark.parametrize(
    ("grads", "complaint"),
    [
        (GRADS[:1], r"gradients have shape \(1, 7, 64\), the hidden states \(2, 7, 64\)"),
        (GRADS.int(), "gradients are not floats"),
        (spoil(GRADS), "gradients are not finite"),
    ],
)
@pytest.mark.usefixtures("no_leaks")
def test_unusable_gradients_are_refused(engine: Engine, grads: Tensor, complaint: str) -> None:
    with pytest.raises(RefusedError, match=complaint) as refusal:
        engine.passes.run_backward(PassWork(SPAN, HIDDEN), grads, stay)
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
