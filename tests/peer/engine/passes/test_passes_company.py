"""Passes give way to the steps of sessions, and neither notices the other."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from pass_scene import draw, load_engine, stay
from torch import Tensor

from shoal.kernels.linear.quantize import WeightFormat
from shoal.peer.engine.engine import Engine
from shoal.peer.engine.passes import span_passes
from shoal.peer.engine.passes.span_passes import PassWork
from shoal.peer.engine.steps import StepWork


@pytest.fixture(autouse=True)
def many_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(span_passes, "COST_BETWEEN_PAUSES", 2**18)
    monkeypatch.setattr(span_passes, "TOKENS_AT_ONCE", dict.fromkeys(WeightFormat, 40))


class Company:
    """Two sessions, one with a prompt and one that decodes, which begin anew again and again."""

    def __init__(self, engine: Engine, size: int) -> None:
        self.outputs: list[list[Tensor]] = []
        self._engine = engine
        self._caches = [engine.pool.open(2, 40, engine.span) for _ in range(2)]
        self._hidden = draw(2, 12, size, seed=9)
        self._num_turns = 0

    def take_turn(self) -> None:
        """Step in one turn of five, which is often enough, and soon done."""
        self._num_turns += 1
        if self._num_turns % 5 == 0:
            self.step()

    def step(self) -> None:
        prompt, generator = self._caches
        works = [
            StepWork(prompt, 0, self._hidden),
            StepWork(generator, 0, self._hidden[:, :2], last_token_only=True,
                decoded=True,
            ),
        ]  # fmt: skip
        results = self._engine.execute(works)
        outputs = [result for result in results if isinstance(result, Tensor)]
        assert len(outputs) == 2, results
        self.outputs.append(outputs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "weights"),
    [
        ("llama", WeightFormat.INT8),
        pytest.param("gemma2", WeightFormat.INT8, marks=pytest.mark.thorough),
        ("qwen3-moe", WeightFormat.FP32),
        pytest.param("falcon-alibi", WeightFormat.FP32, marks=pytest.mark.thorough),
        ("wrapped-stablelm", WeightFormat.FP32),
    ],
)
def test_steps_in_the_middle_of_a_pass_change_no_bit_of_either(
    tiny_models, variant: str, weights: WeightFormat
) -> None:
    engine = load_engine(tiny_models.get(variant), weights)
    size = engine.spec.hidden_size
    work = PassWork(engine.span, draw(2, 60, size), draw(4, 1, 5, size, seed=2))
    grads = draw(2, 60, size, seed=3)
    company = Company(engine, size)
    company.step()

    def run(give_way: Callable[[], object]) -> list[Tensor]:
        found = engine.passes.run_backward(work, grads, give_way)
        assert found.prompts_LBPH is not None
        return [engine.passes.run_forward(work, give_way), found.hidden_BTH, found.prompts_LBPH]

    quiet, disturbed = run(stay), run(company.take_turn)

    # Wrapped blocks pause between their rows alone.
    assert len(company.outputs) > (5 if variant.startswith("wrapped") else 20)
    for expected, result in zip(quiet, disturbed, strict=True):
        assert torch.equal(result, expected)
    for outputs in company.outputs:
        for expected, result in zip(company.outputs[0], outputs, strict=True):
            assert torch.equal(result, expected)
    engine.pool.check_integrity()


@pytest.mark.slow
def test_passes_in_the_middle_of_another_one_change_no_bit_of_either(tiny_models) -> None:
    """Backward in the middle of backward: autograd has one queue for all of a thread."""
    engine = load_engine(tiny_models.get("llama"), WeightFormat.INT8)
    size = engine.spec.hidden_size
    long, short = PassWork(engine.span, draw(2, 60, size)), PassWork(engine.span, draw(1, 9, size))
    long_grads, short_grads = draw(2, 60, size, seed=3), draw(1, 9, size, seed=4)
    guests: list[tuple[Tensor, Tensor]] = []
    num_pauses = 0

    def run_short() -> tuple[Tensor, Tensor]:
        back = engine.passes.run_backward(short, short_grads, stay)
        return engine.passes.run_forward(short, stay), back.hidden_BTH

    def have_guests() -> None:
        nonlocal num_pauses
        num_pauses += 1
        if num_pauses % 7 == 0:
            guests.append(run_short())

    alone, expected = run_short(), engine.passes.run_backward(long, long_grads, stay).hidden_BTH
    found = engine.passes.run_backward(long, long_grads, have_guests).hidden_BTH

    assert torch.equal(found, expected)
    assert len(guests) > 10
    for guest in guests:
        assert torch.equal(guest[0], alone[0])
        assert torch.equal(guest[1], alone[1])


def test_the_gradient_pauses_as_often_as_the_way_there(tiny_models) -> None:
    engine = load_engine(tiny_models.get("llama"), WeightFormat.INT8)
    work = PassWork(engine.span, draw(4, 120, 64))
    turns: list[int] = []

    engine.passes.run_forward(work, lambda: turns.append(1))
    forth = len(turns)
    turns.clear()
    engine.passes.run_backward(work, draw(4, 120, 64), lambda: turns.append(1))

    assert forth >= 4 * 4 * 120 * 64 * 400 / 2**18 / 4
    # Blocks are computed once more, but for the last, and then with their gradients.
    assert len(turns) >= 2.5 * forth


def test_tensors_are_looked_at_and_copied_in_parts(
    tiny_models, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load_engine(tiny_models.get("llama"))
    work, grads = PassWork(engine.span, draw(2, 60, 64)), draw(2, 60, 64)
    turns: list[int] = []

    def count(num_numbers: int) -> int:
        monkeypatch.setattr(span_passes, "NUMBERS_AT_ONCE", num_numbers)
        turns.clear()
        engine.passes.run_backward(work, grads, lambda: turns.append(1))
        return len(turns)

    # Both are looked at and copied there, the input is hashed, and what comes of it is looked at.
    assert count(2 * 60 * 64 // 10) - count(2 * 60 * 64) == 6 * 9


def test_what_fails_in_the_turn_of_others_ends_the_pass_as_it_is(tiny_models) -> None:
    engine = load_engine(tiny_models.get("llama"))

    def fail() -> None:
        raise LookupError("somebody else's fault")

    with pytest.raises(LookupError, match="somebody else's"):
        engine.passes.run_backward(PassWork(engine.span, draw(1, 5, 64)), draw(1, 5, 64), fail)
    assert not torch.is_inference_mode_enabled()
    assert torch.is_grad_enabled()
