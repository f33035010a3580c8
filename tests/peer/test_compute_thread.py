"""The compute thread with an engine that only notes what it is told to do."""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.peer.engine.compute_thread import ComputeThread
from shoal.peer.engine.engine import StepWork
from shoal.peer.engine.scheduler import PART_TOKENS
from shoal.protocol.errors import ErrorCode, RefusedError, ShoalError
from shoal.protocol.spans import Span

PATIENCE_SECONDS = 30.0
"""For waits that only a broken thread makes long."""


class FakeCache:
    """A session's cache, which nobody here looks into."""

    def fall_back(self, position: int) -> None:
        return


class NotingEngine:
    """Answers every step with its hidden states plus one; notes the batches, may be held up."""

    def __init__(self) -> None:
        self.batches: list[list[StepWork]] = []
        self.entered = threading.Event()
        self.gate = threading.Event()
        self.gate.set()
        self.refused: list[StepWork] = []
        self.num_missing_results = 0
        self.deadly: list[StepWork] = []

    def execute(self, batch: Sequence[StepWork]) -> list[Tensor | ShoalError]:
        self.batches.append(list(batch))
        self.entered.set()
        assert self.gate.wait(PATIENCE_SECONDS)
        if any(work is deadly for work in batch for deadly in self.deadly):
            raise ZeroDivisionError("on purpose")
        refusal = RefusedError(ErrorCode.BAD_VALUES, "not these")
        results: list[Tensor | ShoalError] = [
            refusal if any(work is refused for refused in self.refused) else work.hidden_BTH + 1
            for work in batch
        ]
        return results[: len(results) - self.num_missing_results]

    @property
    def order(self) -> list[StepWork]:
        """All steps, in the order in which they were computed."""
        return [work for batch in self.batches for work in batch]

    async def wait_entered(self) -> None:
        assert await asyncio.to_thread(self.entered.wait, PATIENCE_SECONDS)


def make_work(cache: Any, position: int = 0, num_tokens: int = 1, **options: Any) -> StepWork:
    hidden = torch.full((1, num_tokens, 2), float(position))
    return StepWork(cache, Span(0, 1), position, hidden, **options)


def make_thread(engine: NotingEngine, token_budget: int = 512) -> ComputeThread:
    fake: Any = engine
    return ComputeThread(fake, token_budget)


def run(test: Callable[[], Awaitable[None]]) -> None:
    """Run a test on a loop; no error may be left unread and no thread running."""
    problems: list[dict[str, Any]] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: problems.append(context))
        async with asyncio.timeout(PATIENCE_SECONDS):
            await test()
        gc.collect()  # an error that nobody read is reported when its future goes
        await asyncio.sleep(0)

    asyncio.run(main())
    gc.collect()
    assert problems == []
    assert not [thread for thread in threading.enumerate() if thread.name == "compute"]


def assert_refused(error: BaseException | None, code: ErrorCode) -> None:
    assert isinstance(error, RefusedError), error
    assert error.code is code


def test_step_is_answered_with_its_own_result() -> None:
    engine = NotingEngine()

    async def test() -> None:
        async with make_thread(engine) as compute:
            works = [make_work(FakeCache(), position) for position in range(5)]
            answers = await asyncio.gather(*(compute.submit(work) for work in works))
        for work, answer in zip(works, answers, strict=True):
            assert torch.equal(answer.hidden_BTH, work.hidden_BTH + 1)

    run(test)


def test_steps_of_a_session_are_computed_one_by_one_in_their_order() -> None:
    engine = NotingEngine()
    caches = [FakeCache(), FakeCache(), FakeCache()]
    sizes = (5, 1, 1, 7, 1, 3)

    async def test() -> None:
        engine.gate.clear()
        async with make_thread(engine, token_budget=8) as compute:
            works = [make_work(cache, i, size) for i, size in enumerate(sizes) for cache in caches]
            futures = [compute.submit(work) for work in works]
            engine.gate.set()
            await asyncio.gather(*futures)

    run(test)
    for cache in caches:
        computed = [work.position for work in engine.order if work.cache is cache]
        assert computed == list(range(len(sizes)))
    for batch in engine.batches:
        assert len({id(work.cache) for work in batch}) == len(batch)


def test_cancelled_step_that_waits_is_never_computed() -> None:
    engine = NotingEngine()
    first, dropped, last = (make_work(FakeCache(), position) for position in range(3))

    async def test() -> None:
        engine.gate.clear()
        async with make_thread(engine) as compute:
            running = compute.submit(first)
            await engine.wait_entered()
            waiting, other = compute.submit(dropped), compute.submit(last)
            waiting.cancel()
            engine.gate.set()
            await asyncio.gather(running, other)

    run(test)
    assert engine.order == [first, last]


def test_step_that_is_cancelled_while_it_is_computed_disturbs_nobody() -> None:
    engine = NotingEngine()

    async def test() -> None:
        engine.gate.clear()
        async with make_thread(engine) as compute:
            running = compute.submit(make_work(FakeCache()))
            await engine.wait_entered()
            running.cancel()
            engine.gate.set()
            assert (await compute.submit(make_work(FakeCache(), 4))).hidden_BTH[0, 0, 0] == 5

    run(test)


def test_refused_step_of_a_batch_is_the_only_one_that_fails() -> None:
    engine = NotingEngine()
    good, bad = make_work(FakeCache()), make_work(FakeCache())
    engine.refused.append(bad)

    async def test() -> None:
        async with make_thread(engine) as compute:
            futures = compute.submit(good), compute.submit(bad)
            results = await asyncio.gather(*futures, return_exceptions=True)
        assert not isinstance(results[0], BaseException)
        assert isinstance(results[1], BaseException)
        assert_refused(results[1], ErrorCode.BAD_VALUES)

    run(test)


def test_engine_that_loses_a_result_fails_the_steps_and_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = NotingEngine()

    async def test() -> None:
        async with make_thread(engine) as compute:
            engine.num_missing_results = 1
            with pytest.raises(RefusedError) as caught:
                await compute.submit(make_work(FakeCache()))
            assert_refused(caught.value, ErrorCode.INTERNAL)
            engine.num_missing_results = 0
            await compute.submit(make_work(FakeCache()))

    run(test)
    assert "1 steps got 0 results" in caplog.text


def test_step_that_makes_the_engine_fail_takes_none_of_its_batch_along(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = NotingEngine()
    good, deadly, moving = (
        make_work(FakeCache(), 1),
        make_work(FakeCache(), 2),
        make_work(FakeCache(), 3, row_map=(0,)),
    )
    engine.deadly.append(deadly)

    async def test() -> None:
        compute = make_thread(engine)  # not entered: the test is the thread
        futures = [compute.submit(work) for work in (good, deadly, moving)]
        compute.step()
        result, *errors = await asyncio.gather(*futures, return_exceptions=True)
        assert not isinstance(result, BaseException)
        assert result.hidden_BTH[0, 0, 0] == 2
        for error in errors:
            assert isinstance(error, BaseException)
            assert_refused(error, ErrorCode.INTERNAL)

    run(test)
    # Each alone after the batch, but for the one whose rows may have been moved already.
    assert engine.batches == [[good, deadly, moving], [good], [deadly]]
    assert "the engine failed on 3 steps" in caplog.text


def test_step_that_makes_the_engine_fail_alone_is_not_tried_again() -> None:
    engine = NotingEngine()
    deadly = make_work(FakeCache())
    engine.deadly.append(deadly)

    async def test() -> None:
        async with make_thread(engine) as compute:
            with pytest.raises(RefusedError) as caught:
                await compute.submit(deadly)
            assert_refused(caught.value, ErrorCode.INTERNAL)

    run(test)
    assert engine.batches == [[deadly]]


def test_waiting_time_grows_with_those_who_wait_and_is_told_to_each_step() -> None:
    engine = NotingEngine()

    async def test() -> None:
        async with make_thread(engine) as compute:
            assert compute.queue_seconds == 0
            first = await compute.submit(make_work(FakeCache()))
            assert compute.queue_seconds == 0  # nobody waits
            engine.gate.clear()
            engine.entered.clear()
            running = compute.submit(make_work(FakeCache()))
            await engine.wait_entered()

            cache = FakeCache()
            waiting = [compute.submit(make_work(cache, position)) for position in range(4)]
            one_of_them = compute.queue_seconds
            others = [compute.submit(make_work(FakeCache()), (f"host {n}", "")) for n in range(3)]

            assert one_of_them > 0
            assert compute.queue_seconds == pytest.approx(4 * one_of_them)
            engine.gate.set()
            told = [first, await running, *[await future for future in waiting]]
            await asyncio.gather(*others)
            assert all(answer.compute_seconds > 0 for answer in told)
            # Each of them waited at least for the one that was computed before it.
            for earlier, later in itertools.pairwise(told[2:]):
                assert later.queue_seconds > earlier.compute_seconds

    run(test)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_thread_that_dies_leaves_nobody_waiting() -> None:
    engine = NotingEngine()

    def die() -> None:
        raise SystemExit  # passes every handler of the thread

    async def test() -> None:
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

    run(test)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_thread_that_dies_in_the_engine_answers_the_steps_in_its_hands() -> None:
    class DeadlyEngine(NotingEngine):
        def execute(self, batch: Sequence[StepWork]) -> list[Tensor | ShoalError]:
            super().execute(batch)
            raise SystemExit

    engine = DeadlyEngine()

    async def test() -> None:
        engine.gate.clear()
        async with make_thread(engine) as compute:
            futures = [compute.submit(make_work(FakeCache())) for _ in range(3)]
            await engine.wait_entered()
            engine.gate.set()
            for result in await asyncio.gather(*futures, return_exceptions=True):
                assert isinstance(result, BaseException)
                assert_refused(result, ErrorCode.DRAINING)

    run(test)


def test_call_returns_what_the_function_returns_on_the_thread() -> None:
    async def test() -> None:
        async with make_thread(NotingEngine()) as compute:
            assert await compute.call(lambda: threading.current_thread().name) == "compute"

    run(test)


def test_error_of_a_call_reaches_its_caller_and_no_other() -> None:
    def fail() -> None:
        raise ZeroDivisionError("on purpose")

    async def test() -> None:
        async with make_thread(NotingEngine()) as compute:
            failing, fine = compute.call(fail), compute.call(lambda: 7)
            with pytest.raises(ZeroDivisionError, match="on purpose"):
                await failing
            assert await fine == 7
            await compute.submit(make_work(FakeCache()))

    run(test)


def test_error_of_a_posted_function_is_logged_and_nothing_else(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail() -> None:
        raise ZeroDivisionError("on purpose")

    async def test() -> None:
        async with make_thread(NotingEngine()) as compute:
            compute.post(fail)
            assert await compute.call(lambda: 7) == 7

    run(test)
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert "on purpose" in caplog.text


def test_calls_and_posts_run_in_their_order() -> None:
    done: list[int] = []

    async def test() -> None:
        async with make_thread(NotingEngine()) as compute:
            for number in range(0, 20, 2):
                compute.post(lambda number=number: done.append(number))
                compute.call(lambda number=number: done.append(number + 1))
            await compute.call(lambda: None)

    run(test)
    assert done == list(range(20))


def test_calls_that_keep_coming_leave_room_for_steps() -> None:
    is_over = threading.Event()

    async def test() -> None:
        async with make_thread(NotingEngine()) as compute:

            def call_again() -> None:
                if not is_over.is_set():
                    compute.post(call_again)

            compute.post(call_again)
            await compute.submit(make_work(FakeCache()))
            is_over.set()

    run(test)


def test_prompt_is_computed_in_parts_between_which_others_decode() -> None:
    engine = NotingEngine()
    num_tokens = 2 * PART_TOKENS + 10

    async def test() -> None:
        compute = make_thread(engine)  # not entered: the test is the thread
        cache, decoding = FakeCache(), FakeCache()
        waiting = compute.submit(make_work(cache, 5, num_tokens), ("prompt", ""))
        behind = compute.submit(make_work(cache, 5 + num_tokens), ("prompt", ""))
        num_batches = 0
        while not behind.done() and num_batches < 10_000:
            token = compute.submit(make_work(decoding, num_batches), ("other", ""))
            compute.step()
            num_batches += 1
            assert engine.batches[-1][0].cache is decoding
            await asyncio.sleep(0)
            assert token.done()
        computed = await waiting
        assert torch.equal(computed.hidden_BTH, torch.full((1, num_tokens, 2), 6.0))
        parts = [(work.position, work.num_tokens) for work in engine.order if work.cache is cache]
        assert parts == [
            (5, PART_TOKENS),
            (5 + PART_TOKENS, PART_TOKENS),
            (5 + 2 * PART_TOKENS, 10),
            (5 + num_tokens, 1),
        ]
        assert (await behind).hidden_BTH[0, 0, 0] == 6 + num_tokens

    run(test)


def test_prompt_of_which_one_token_is_asked_answers_with_that() -> None:
    engine = NotingEngine()

    async def test() -> None:
        async with make_thread(engine) as compute:
            work = replace(make_work(FakeCache(), num_tokens=150), last_token_only=True)
            answer = await compute.submit(work)
        # This engine answers every token that it is given: the last part's are left.
        assert answer.hidden_BTH.shape[1] == engine.order[-1].num_tokens

    run(test)


def test_refused_part_ends_its_prompt() -> None:
    class RefusingEngine(NotingEngine):
        def execute(self, batch: Sequence[StepWork]) -> list[Tensor | ShoalError]:
            self.refused = [work for work in batch if work.position == PART_TOKENS]
            return super().execute(batch)

    engine = RefusingEngine()

    async def test() -> None:
        async with make_thread(engine) as compute:
            with pytest.raises(RefusedError) as caught:
                await compute.submit(make_work(FakeCache(), num_tokens=5 * PART_TOKENS))
            assert_refused(caught.value, ErrorCode.BAD_VALUES)
            await compute.submit(make_work(FakeCache()))

    run(test)
    assert [work.position for work in engine.order] == [0, PART_TOKENS, 0]


def test_rest_of_a_cancelled_prompt_is_not_computed() -> None:
    engine = NotingEngine()

    async def test() -> None:
        engine.gate.clear()
        async with make_thread(engine) as compute:
            running = compute.submit(make_work(FakeCache(), num_tokens=5 * PART_TOKENS))
            await engine.wait_entered()
            running.cancel()
            engine.gate.set()
            await compute.submit(make_work(FakeCache()))

    run(test)
    assert [work.num_tokens for work in engine.order] == [PART_TOKENS, 1]


def test_what_comes_after_the_end_is_declined() -> None:
    engine = NotingEngine()
    posted: list[int] = []

    async def test() -> None:
        async with make_thread(engine) as compute:
            pass
        compute.post(lambda: posted.append(1))
        futures = compute.submit(make_work(FakeCache())), compute.call(lambda: posted.append(2))
        for result in await asyncio.gather(*futures, return_exceptions=True):
            assert isinstance(result, BaseException)
            assert_refused(result, ErrorCode.DRAINING)

    run(test)
    assert (engine.order, posted) == ([], [])


def test_end_with_work_waiting_declines_it_and_completes_what_runs() -> None:
    engine = NotingEngine()
    running = make_work(FakeCache(), 1)

    async def test() -> None:
        engine.gate.clear()
        async with make_thread(engine) as compute:
            under_way = compute.submit(running)
            await engine.wait_entered()
            waiting = [compute.submit(make_work(FakeCache(), 2)), compute.call(lambda: 3)]
            compute.post(lambda: None)
            # Runs when the end of the block lets the loop go on: the thread is stopping by then.
            asyncio.get_running_loop().call_soon(engine.gate.set)
        assert (await under_way).hidden_BTH[0, 0, 0] == 2
        for result in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(result, BaseException)
            assert_refused(result, ErrorCode.DRAINING)

    run(test)
    assert engine.order == [running]


def test_end_with_work_that_nobody_waits_for_any_more_leaves_no_unread_error() -> None:
    engine = NotingEngine()

    async def test() -> None:
        engine.gate.clear()
        async with make_thread(engine) as compute:
            compute.submit(make_work(FakeCache()))
            await engine.wait_entered()
            for _ in range(3):
                compute.submit(make_work(FakeCache()))
                compute.call(lambda: None)
            asyncio.get_running_loop().call_soon(engine.gate.set)

    run(test)


def test_loop_that_is_gone_does_not_disturb_the_thread() -> None:
    """A loop that is closed under a step: what `asyncio.run` leaves behind when it is killed."""
    engine = NotingEngine()
    engine.gate.clear()
    threads: list[ComputeThread] = []

    async def begin() -> None:
        compute = make_thread(engine)
        await compute.__aenter__()
        threads.append(compute)
        compute.submit(make_work(FakeCache()))
        await engine.wait_entered()

    async def end() -> None:
        await threads[0].__aexit__(None, None, None)

    asyncio.run(begin())
    engine.gate.set()
    asyncio.run(end())
    assert not [thread for thread in threading.enumerate() if thread.name == "compute"]
