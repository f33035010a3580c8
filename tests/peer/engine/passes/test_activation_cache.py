"""What went into blocks is kept for a while, within bounds, and changes no gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pass_scene import draw, load_engine, stay

from shoal.kernels.linear.quantize import WeightFormat
from shoal.peer.engine.blocks.block import Block
from shoal.peer.engine.passes.span_passes import ActivationCache, PassWork
from shoal.protocol.spans import Span

WHOLE, HIDDEN, PASS_BYTES = Span(0, 4), 64, 4 * 2 * 7 * 64 * 4


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> list[Block]:
    """Note every block that is computed on its way there."""
    noted: list[Block] = []
    run_pass = Block.run_pass

    def note_and_run(block: Block, *arguments: Any) -> torch.Tensor:
        noted.append(block)
        return run_pass(block, *arguments)

    monkeypatch.setattr(Block, "run_pass", note_and_run)
    return noted


def make_work(seed: int, span: Span = WHOLE, prompt_seed: int | None = None) -> PassWork:
    prompts = None if prompt_seed is None else draw(len(span), 1, 3, HIDDEN, seed=prompt_seed)
    return PassWork(span, draw(2, 7, HIDDEN, seed=seed), prompts)


@pytest.mark.parametrize("weights", [WeightFormat.INT8, WeightFormat.FP32])
@pytest.mark.parametrize("prompt_seed", [None, 5])
def test_gradients_are_the_same_to_the_bit_and_nothing_is_computed_twice(
    tiny_models: Any, forwards: list[Block], weights: WeightFormat, prompt_seed: int | None
) -> None:
    engine = load_engine(tiny_models.get(), weights)
    work, grads = make_work(1, prompt_seed=prompt_seed), draw(2, 7, HIDDEN, seed=9)
    expected = engine.passes.run_backward(work, grads, stay)
    engine.passes.activations.limit(2**20)
    engine.passes.run_forward(work, stay)
    forwards.clear()

    found = engine.passes.run_backward(work, grads, stay)
    assert forwards == []
    again = engine.passes.run_backward(work, grads, stay)  # they were taken
    assert len(forwards) == 3
    for one in (found, again):
        assert torch.equal(one.hidden_BTH, expected.hidden_BTH)
        if prompt_seed is not None:
            assert one.prompts_LBPH is not None
            assert expected.prompts_LBPH is not None
            assert torch.equal(one.prompts_LBPH, expected.prompts_LBPH)


@pytest.mark.parametrize(
    "other", [make_work(2), make_work(1, Span(1, 4)), make_work(1, prompt_seed=5)]
)
def test_other_passes_find_nothing(
    tiny_models: Any, forwards: list[Block], other: PassWork
) -> None:
    engine = load_engine(tiny_models.get())
    engine.passes.activations.limit(2**20)
    engine.passes.run_forward(make_work(1), stay)
    forwards.clear()
    engine.passes.run_backward(other, draw(2, 7, HIDDEN), stay)

    assert len(forwards) == len(other.span) - 1


def test_oldest_make_room_for_the_newest(tiny_models: Any, forwards: list[Block]) -> None:
    engine = load_engine(tiny_models.get())
    engine.passes.activations.limit(2 * PASS_BYTES)
    for seed in (1, 2, 3):
        engine.passes.run_forward(make_work(seed), stay)
    assert engine.passes.activations.num_bytes == 2 * PASS_BYTES
    forwards.clear()
    for seed, num_computed in ((3, 0), (2, 0), (1, 3)):
        engine.passes.run_backward(make_work(seed), draw(2, 7, HIDDEN), stay)
        assert len(forwards) == num_computed
    assert engine.passes.activations.num_bytes == 0


def test_what_is_larger_than_everything_is_not_kept() -> None:
    kept = ActivationCache()
    kept.limit(100)
    kept.keep("small", [torch.zeros(20)])
    kept.keep("large", [torch.zeros(20), torch.zeros(20)])

    assert kept.num_bytes == 80
    kept.limit(0)
    assert kept.num_bytes == 0
