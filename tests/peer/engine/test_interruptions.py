"""A real engine in the middle of whose prompts steps of other sessions are computed.

Neither may notice: what both have computed is what each computes undisturbed, to the bit.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from compute_thread_scene import on_loop
from engine_devices import WHOLE, draw_hidden
from torch import Tensor

from shoal.kernels.linear.quantize import WeightFormat
from shoal.models.checkpoints.checkpoint import Checkpoint
from shoal.peer.engine.compute_thread import ComputeThread
from shoal.peer.engine.engine import Engine
from shoal.peer.engine.loading.engine_loader import load_engine
from shoal.peer.engine.scheduler import IterationBudget
from shoal.peer.engine.steps import StepWork
from shoal.protocol.errors import ShoalError
from shoal.protocol.spans import Span
from shoal.protocol.tensors import KVFormat

NUM_DECODING = 6
NUM_TOKENS_BEFORE = 20


@dataclass
class Play:
    """Prompts of some sessions, and the next token of others; the same ones for a seed."""

    engine: Engine
    kv_format: KVFormat
    seed: int

    def make_prompts(self) -> list[StepWork]:
        dice = random.Random(self.seed)
        spans = (WHOLE, Span(1, 3), Span(0, 2))
        return [
            self._open(draw_hidden(number, dice.choice([1, 3]), dice.choice([5, 16, 64])), span)
            for number, span in enumerate(spans, 100 * self.seed)
        ]

    def make_tokens(self) -> list[StepWork]:
        """Return a step each of sessions that have a prefix, which they go on from."""
        tokens: list[StepWork] = []
        for number in range(NUM_DECODING):
            begun = self._open(draw_hidden(1000 + number, 1, NUM_TOKENS_BEFORE), WHOLE)
            self.engine.execute([begun])
            hidden = draw_hidden(2000 + number, 1, 1)
            tokens.append(StepWork(begun.cache, NUM_TOKENS_BEFORE, hidden, decoded=True))
        return tokens

    def _open(self, hidden: Tensor, span: Span) -> StepWork:
        cache = self.engine.pool.open(hidden.shape[0], 200, span, kv_format=self.kv_format)
        return StepWork(cache, 0, hidden)

    def compute_alone(self, *works: StepWork) -> list[Tensor]:
        results = [self.engine.execute([work])[0] for work in works]
        return [expect_tensor(result) for result in results]


def expect_tensor(result: object) -> Tensor:
    assert isinstance(result, Tensor), result
    return result


def assert_equal(results: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for result, undisturbed in zip(results, expected, strict=True):
        assert torch.equal(result, undisturbed)


def load(tiny_models: Any, weights: WeightFormat) -> Engine:
    checkpoint = Checkpoint.open(tiny_models.get().directory)
    return load_engine(checkpoint, WHOLE, weights, kv_budget_bytes=2**24)


class YieldingBudget(IterationBudget):
    """Lets everything that is urgent interrupt at once, however long it takes."""

    def must_give_way(self, now: float) -> bool:
        return True


class EngineWithArrivals:
    """An engine during whose batches something arrives before every block."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.arrive: Callable[[], object] = bool
        self.go_on: Callable[[], object] = bool

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def execute(
        self, batch: Sequence[StepWork], give_way: Callable[[], object] | None = None
    ) -> list[Tensor | ShoalError]:
        if give_way is None:
            return self._engine.execute(batch)

        def arrive_and_give_way() -> None:
            self.arrive()
            give_way()
            self.go_on()

        return self._engine.execute(batch, arrive_and_give_way)


@pytest.mark.parametrize("kv_format", KVFormat)
@on_loop()
async def test_tokens_that_arrive_before_each_block_of_prompts_are_computed_there(
    tiny_models: Any, kv_format: KVFormat
) -> None:
    play = Play(load(tiny_models, WeightFormat.INT8), kv_format, seed=7)
    expected = play.compute_alone(*play.make_prompts(), *play.make_tokens())

    engine: Any = EngineWithArrivals(play.engine)
    compute = ComputeThread(engine)  # not entered: the test is the thread
    compute.budget = YieldingBudget(512, engine.part_tokens, len(WHOLE))
    tokens = play.make_tokens()
    prompts = [compute.submit(work, ("prompts", "")) for work in play.make_prompts()]
    answers: list[Any] = []
    num_done_meanwhile: list[int] = []

    def arrive() -> None:
        if len(answers) < len(tokens):
            answers.append(compute.submit(tokens[len(answers)], ("decoding", "")))

    def count() -> None:
        done = [work for work in tokens if work.cache.length > NUM_TOKENS_BEFORE]
        num_done_meanwhile.append(len(done))

    engine.arrive, engine.go_on = arrive, count
    while compute._jobs:
        compute.iterate()

    results = [(await future).hidden_BTH for future in (*prompts, *answers)]
    assert_equal(results, expected)
    assert num_done_meanwhile[:NUM_DECODING] == list(range(1, NUM_DECODING + 1))

    play.engine.pool.check_integrity()
