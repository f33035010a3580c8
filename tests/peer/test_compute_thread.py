"""The compute thread with an engine that only notes what it is told to do."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Collection
from dataclasses import replace

import pytest
import torch
from compute_thread_scene import FakeCache, NotingEngine, make_thread, make_work, run

from shoal.peer.engine.pace import Pace
from shoal.peer.engine.scheduler import LEAD_TOKENS, PART_TOKENS


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


class LateCondition(threading.Condition):
    """Lets something happen before the lock is taken, once."""

    def __init__(self) -> None:
        super().__init__()
        self.before: Callable[[], object] = bool

    def __enter__(self) -> bool:
        before, self.before = self.before, bool
        before()
        return super().__enter__()


def test_no_step_is_lost_that_comes_while_a_batch_is_chosen() -> None:
    engine, wake = NotingEngine(), LateCondition()

    async def test() -> None:
        compute = make_thread(engine)  # not entered: the test is the thread
        compute._wake = wake
        early = compute.submit(make_work(FakeCache()))
        wake.before = compute.step
        late = compute.submit(make_work(FakeCache()))
        compute.step()
        await asyncio.gather(early, late)

    run(test)
    assert [len(batch) for batch in engine.batches] == [1, 1]


class CrowdedPace(Pace):
    """Knows of others that decode beside everybody."""

    def find_in_company(
        self, holders: Collection[tuple[str, str]], now: float
    ) -> set[tuple[str, str]]:
        return set(holders)


def test_flood_travels_one_step_at_a_time_beside_others() -> None:
    engine = NotingEngine()

    async def test() -> None:
        compute = make_thread(engine)  # not entered: the test is the thread
        compute._pace = CrowdedPace(512, PART_TOKENS)
        holders = [*[("home", "flood")] * 3, ("home", "one")]
        futures = [compute.submit(make_work(FakeCache()), holder) for holder in holders]
        for _ in range(3):
            compute.step()
        await asyncio.gather(*futures)

    run(test)
    assert [len(batch) for batch in engine.batches] == [2, 1, 1]


class PausedPace(Pace):
    """Has prompts wait."""

    def resume_in(self, now: float) -> float:
        return 3.0


class NotingCondition(threading.Condition):
    """Notes how long somebody would have slept."""

    def __init__(self) -> None:
        super().__init__()
        self.naps: list[float | None] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.naps.append(timeout)
        return True


def test_thread_sleeps_while_everybody_has_to_wait_for_the_end_of_a_pause() -> None:
    engine, wake = NotingEngine(), NotingCondition()
    many_rows = replace(make_work(FakeCache()), hidden_BTH=torch.zeros(LEAD_TOKENS + 1, 1, 2))

    async def test() -> None:
        compute = make_thread(engine)  # not entered: the test is the thread
        compute._wake, compute._pace = wake, PausedPace(512, PART_TOKENS)
        futures = [compute.submit(make_work(FakeCache(), num_tokens=2), ("newcomer", ""))]
        futures.append(compute.submit(many_rows, ("greedy", "")))
        assert compute._wait_for_work()
        assert wake.naps == []  # somebody decodes
        compute.step()

        # Who decodes so far ahead of others shares the budget of prompts, which is none now.
        futures.append(compute.submit(make_work(FakeCache()), ("greedy", "")))
        assert compute._wait_for_work()
        assert wake.naps == [3.0]
        compute.step()
        assert [len(batch) for batch in engine.batches] == [1]

        futures.append(compute.submit(make_work(FakeCache()), ("newcomer", "")))
        assert compute._wait_for_work()
        assert wake.naps == [3.0]
        for future in futures:
            future.cancel()

    run(test)


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


def test_call_returns_what_the_function_returns_on_the_thread() -> None:
    async def test() -> None:
        async with make_thread(NotingEngine()) as compute:
            assert await compute.call(lambda: threading.current_thread().name) == "compute"

    run(test)


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
