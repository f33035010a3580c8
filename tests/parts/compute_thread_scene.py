"""A compute thread whose engine notes what it does, or fails."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import torch
from async_tests import make_decorator
from torch import Tensor

from shoal.peer.engine.blocks.batch import PART_TOKENS
from shoal.peer.engine.compute_thread import ComputeThread
from shoal.peer.engine.steps import StepWork
from shoal.protocol.errors import ErrorCode, RefusedError, ShoalError
from shoal.protocol.spans import Span

PATIENCE_SECONDS = 30.0
"""For waits that only a broken thread makes long."""


class FakeCache:
    """A session's cache, which only notes where steps that failed took it back to."""

    def __init__(self) -> None:
        self.falls: list[int] = []

    def fall_back(self, position: int) -> None:
        self.falls.append(position)


class NotingEngine:
    """Answers every step with its hidden states plus one; notes the batches, may be held up."""

    part_tokens = PART_TOKENS
    span = Span(0, 1)
    num_weight_bytes = 1

    def __init__(self) -> None:
        self.batches: list[list[StepWork]] = []
        self.finished: list[list[StepWork]] = []
        self.between: Callable[[], object] = bool
        """Happens before the one block of this engine, where steps of others may be computed."""
        self.inside: Callable[[], object] = bool
        """Happens while a batch is computed."""
        self.entered = threading.Event()
        self.gate = threading.Event()
        self.gate.set()
        self.refused: list[StepWork] = []
        self.refused_positions: set[int] = set()
        self.num_missing_results = 0
        self.deadly: list[StepWork] = []

    def execute(
        self, batch: Sequence[StepWork], give_way: Callable[[], object] | None = None
    ) -> list[Tensor | ShoalError]:
        self.batches.append(list(batch))
        self.entered.set()
        assert self.gate.wait(PATIENCE_SECONDS)
        self.inside()
        if give_way is not None:
            self.between()
            give_way()
        if any(work is deadly for work in batch for deadly in self.deadly):
            raise ZeroDivisionError("on purpose")
        self.finished.append(list(batch))
        refusal = RefusedError(ErrorCode.BAD_VALUES, "not these")
        results: list[Tensor | ShoalError] = [
            refusal if self._refuses(work) else work.hidden_BTH + 1 for work in batch
        ]
        return results[: len(results) - self.num_missing_results]

    def _refuses(self, work: StepWork) -> bool:
        is_named = any(work is refused for refused in self.refused)
        return is_named or work.position in self.refused_positions

    @property
    def order(self) -> list[StepWork]:
        """All steps, in the order in which they were computed."""
        return [work for batch in self.batches for work in batch]

    async def wait_entered(self) -> None:
        assert await asyncio.to_thread(self.entered.wait, PATIENCE_SECONDS)


def make_work(cache: Any, position: int = 0, num_tokens: int = 1, **options: Any) -> StepWork:
    hidden = torch.full((1, num_tokens, 2), float(position))
    return StepWork(cache, position, hidden, **options)


def make_thread(
    engine: NotingEngine, token_budget: int = 512, now: Callable[[], float] = time.monotonic
) -> ComputeThread:
    fake: Any = engine
    return ComputeThread(fake, token_budget, now)


async def run(test: Callable[[], Awaitable[None]]) -> None:
    """Run a test on a loop; no error may be left unread and no thread running."""
    problems: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: problems.append(context))
    async with asyncio.timeout(PATIENCE_SECONDS):
        await test()
    gc.collect()  # an error that nobody read is reported when its future goes
    await asyncio.sleep(0)
    gc.collect()
    assert problems == []
    assert not [thread for thread in threading.enumerate() if thread.name == "compute"]


on_loop = make_decorator(run, 0, is_real=True)


def assert_refused(error: BaseException | None, code: ErrorCode) -> None:
    assert isinstance(error, RefusedError), error
    assert error.code is code
