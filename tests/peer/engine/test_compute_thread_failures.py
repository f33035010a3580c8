"""An engine that refuses, fails or dies on the compute thread: who hears of it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from compute_thread_scene import (
    FakeCache,
    NotingEngine,
    assert_refused,
    make_thread,
    make_work,
    on_loop,
)
from torch import Tensor

from shoal.peer.engine.blocks.batch import PART_TOKENS
from shoal.peer.engine.steps import StepWork
from shoal.protocol.errors import ErrorCode, RefusedError, ShoalError


@on_loop()
async def test_refused_step_of_a_batch_is_the_only_one_that_fails() -> None:
    engine = NotingEngine()
    good, bad = make_work(FakeCache()), make_work(FakeCache())
    engine.refused.append(bad)

    async with make_thread(engine) as compute:
        futures = compute.submit(good), compute.submit(bad)
        results = await asyncio.gather(*futures, return_exceptions=True)
    assert not isinstance(results[0], BaseException)
    assert isinstance(results[1], BaseException)
    assert_refused(results[1], ErrorCode.BAD_VALUES)


@on_loop()
async def test_engine_that_loses_a_result_fails_the_steps_and_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = NotingEngine()

    async with make_thread(engine) as compute:
        engine.num_missing_results = 1
        with pytest.raises(RefusedError) as caught:
            await compute.submit(make_work(FakeCache()))
        assert_refused(caught.value, ErrorCode.INTERNAL)
        engine.num_missing_results = 0
        await compute.submit(make_work(FakeCache()))

    assert "1 steps got 0 results" in caplog.text


@on_loop()
async def test_step_that_makes_the_engine_fail_takes_none_of_its_batch_along(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = NotingEngine()
    good, deadly, moving = (
        make_work(FakeCache(), 1),
        make_work(FakeCache(), 2),
        make_work(FakeCache(), 3, row_map=(0,)),
    )
    engine.deadly.append(deadly)

    compute = make_thread(engine)  # not entered: the test is the thread
    futures = [compute.submit(work) for work in (good, deadly, moving)]
    compute.iterate()
    result, *errors = await asyncio.gather(*futures, return_exceptions=True)
    assert not isinstance(result, BaseException)
    assert result.hidden_BTH[0, 0, 0] == 2
    for error in errors:
        assert isinstance(error, BaseException)
        assert_refused(error, ErrorCode.INTERNAL)

    # Each alone after the batch, but for the one whose rows may have been moved already.
    assert engine.batches == [[good, deadly, moving], [good], [deadly]]
    assert "the engine failed on a batch of 3 steps" in caplog.text


@pytest.mark.parametrize(("row_map", "rest"), [(None, 7), ((0,), 0)])
@on_loop()
async def test_failed_step_takes_the_cache_back_to_what_is_certain(
    row_map: tuple[int, ...] | None, rest: int
) -> None:
    engine = NotingEngine()
    # Its second part is refused: the first one has moved the rows.
    work = make_work(FakeCache(), 7, num_tokens=PART_TOKENS + 1, row_map=row_map)
    engine.refused_positions.add(7 + PART_TOKENS)

    async with make_thread(engine) as compute:
        with pytest.raises(RefusedError):
            await compute.submit(work)

    cache: Any = work.cache
    assert cache.falls == [rest]


@on_loop()
async def test_step_whose_parts_cannot_be_joined_fails_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class UnevenEngine(NotingEngine):
        """Stands for a machine without the memory to join the parts of a prompt."""

        def execute(
            self, batch: Sequence[StepWork], give_way: Callable[[], object] | None = None
        ) -> list[Tensor | ShoalError]:
            return [work.hidden_BTH.expand(1, -1, 2 + work.position // 64) for work in batch]

    def make_flat(num_tokens: int) -> StepWork:
        hidden = torch.zeros(1, num_tokens, 1)
        return replace(make_work(FakeCache()), hidden_BTH=hidden)

    engine = UnevenEngine()
    broken, whole = make_flat(2 * PART_TOKENS), make_flat(1)

    async with make_thread(engine, token_budget=PART_TOKENS) as compute:
        results = await asyncio.gather(
            compute.submit(broken), compute.submit(whole), return_exceptions=True
        )
        assert isinstance(results[0], BaseException)
        assert_refused(results[0], ErrorCode.INTERNAL)
        assert not isinstance(results[1], BaseException)
        await compute.submit(make_flat(1))

    assert "the parts of a step could not be joined; the step is refused" in caplog.text
    cache: Any = broken.cache
    assert cache.falls == [0]


@on_loop()
async def test_step_that_makes_the_engine_fail_alone_is_not_tried_again() -> None:
    engine = NotingEngine()
    deadly = make_work(FakeCache())
    engine.deadly.append(deadly)

    async with make_thread(engine) as compute:
        with pytest.raises(RefusedError) as caught:
            await compute.submit(deadly)
        assert_refused(caught.value, ErrorCode.INTERNAL)

    assert engine.batches == [[deadly]]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@on_loop()
async def test_thread_that_dies_leaves_nobody_waiting() -> None:
    engine = NotingEngine()

    def die() -> None:
        raise SystemExit  # passes every handler of the thread

    engine.gate.clear()
    async with make_thread(engine) as compute:
        running = compute.submit(make_work(FakeCache()))
        await engine.wait_entered()
        compute.post(die)
        waiting = [compute.submit(make_work(FakeCache())), compute.call(lambda: 3)]
        engine.gate.set()
        await running
        for result in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(result, BaseException)
            assert_refused(result, ErrorCode.DRAINING)
        with pytest.raises(RefusedError):
            await compute.submit(make_work(FakeCache()))
        assert compute.died.done()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@on_loop()
async def test_thread_that_dies_in_the_engine_answers_the_steps_in_its_hands() -> None:
    class DeadlyEngine(NotingEngine):
        def execute(
            self, batch: Sequence[StepWork], give_way: Callable[[], object] | None = None
        ) -> list[Tensor | ShoalError]:
            super().execute(batch)
            raise SystemExit

    engine = DeadlyEngine()

    engine.gate.clear()
    async with make_thread(engine) as compute:
        futures = [compute.submit(make_work(FakeCache())) for _ in range(3)]
        await engine.wait_entered()
        engine.gate.set()
        for result in await asyncio.gather(*futures, return_exceptions=True):
            assert isinstance(result, BaseException)
            assert_refused(result, ErrorCode.DRAINING)


@on_loop()
async def test_error_of_a_call_reaches_its_caller_and_no_other() -> None:
    def fail() -> None:
        raise ZeroDivisionError("on purpose")

    async with make_thread(NotingEngine()) as compute:
        failing, fine = compute.call(fail), compute.call(lambda: 7)
        with pytest.raises(ZeroDivisionError, match="on purpose"):
            await failing
        assert await fine == 7
        await compute.submit(make_work(FakeCache()))


@on_loop()
async def test_error_of_a_posted_function_is_logged_and_nothing_else(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail() -> None:
        raise ZeroDivisionError("on purpose")

    async with make_thread(NotingEngine()) as compute:
        compute.post(fail)
        assert await compute.call(lambda: 7) == 7

    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert "on purpose" in caplog.text


@on_loop()
async def test_refused_part_ends_its_prompt() -> None:
    engine = NotingEngine()
    engine.refused_positions.add(PART_TOKENS)

    async with make_thread(engine) as compute:
        with pytest.raises(RefusedError) as caught:
            await compute.submit(make_work(FakeCache(), num_tokens=5 * PART_TOKENS))
        assert_refused(caught.value, ErrorCode.BAD_VALUES)
        await compute.submit(make_work(FakeCache()))

    assert [work.position for work in engine.order] == [0, PART_TOKENS, 0]


@on_loop()
async def test_urgent_step_that_fails_leaves_the_prompt_it_interrupted_alone() -> None:
    engine = NotingEngine()
    prompt, deadly = make_work(FakeCache(), 0, PART_TOKENS), make_work(FakeCache(), 1)
    engine.deadly.append(deadly)

    compute = make_thread(engine)  # not entered: the test is the thread
    futures = [compute.submit(prompt)]
    engine.between = lambda: futures.append(compute.submit(deadly, ("home", "other")))
    compute.iterate()
    result, error = await asyncio.gather(*futures, return_exceptions=True)
    assert not isinstance(result, BaseException)
    assert isinstance(error, BaseException)
    assert_refused(error, ErrorCode.INTERNAL)

    assert engine.finished == [[prompt]]
