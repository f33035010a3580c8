"""Passes on the compute thread: between steps, in turns, and gone when nobody waits for them."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from compute_thread_scene import (
    FakeCache,
    NotingEngine,
    assert_refused,
    make_thread,
    make_work,
    run,
)

from shoal.peer.engine.pass_queue import ComputedPass, GiveWay, PassJob, PassQueue
from shoal.protocol.errors import ErrorCode, RefusedError


class FakeClock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> float:
        return self.seconds


def make_job(run: Callable[[GiveWay], Any], holder: str = "home", num_tokens: int = 1) -> PassJob:
    future: asyncio.Future[ComputedPass] = asyncio.get_running_loop().create_future()
    return PassJob(run, num_tokens, (holder, ""), future, 0.0)


def with_loop(test: Callable[[], None]) -> None:
    async def main() -> None:
        test()

    asyncio.run(main())


# ---- the queue by itself


def test_pass_has_as_much_time_as_others_took() -> None:
    clock = FakeClock()
    interruptions: list[float] = []

    def compute_others() -> bool:
        interruptions.append(clock.seconds)
        clock.seconds += 6
        return True

    def compute(give_way: GiveWay) -> str:
        for _ in range(20):
            clock.seconds += 1
            give_way()
        return "done"

    def test() -> None:
        done = PassQueue(clock.now).run(make_job(compute), compute_others)

        assert isinstance(done, ComputedPass)
        assert done.result == "done"
        assert interruptions == [1, 13, 25, 37]
        assert (done.compute_seconds, done.queue_seconds) == (20, 24)

    with_loop(test)


def test_pass_beside_which_nothing_waits_is_not_held_up() -> None:
    clock = FakeClock()
    asked: list[float] = []

    def compute_others() -> bool:
        asked.append(clock.seconds)
        return False

    def compute(give_way: GiveWay) -> None:
        for _ in range(5):
            clock.seconds += 1
            give_way()

    def test() -> None:
        done = PassQueue(clock.now).run(make_job(compute), compute_others)
        assert isinstance(done, ComputedPass)
        assert done.queue_seconds == 0
        assert asked == [1, 2, 3, 4, 5]

    with_loop(test)


def test_holders_take_turns_by_the_tokens_they_had() -> None:
    def test() -> None:
        queue = PassQueue(float)
        for name, sizes in {"greedy": [100] * 3, "modest": [10] * 12}.items():
            for size in sizes:
                queue.append(make_job(bool, name, size))

        order = [job.holder[0] for job in iter(queue.choose, None)]

        assert order[:12] == ["greedy", *["modest"] * 10, "greedy"]
        assert sorted(order) == ["greedy"] * 3 + ["modest"] * 12

    with_loop(test)


def test_cancelled_pass_is_never_begun() -> None:
    def test() -> None:
        queue = PassQueue(float)
        dropped, other = make_job(bool), make_job(bool)
        queue.append(dropped)
        queue.append(other)
        dropped.future.cancel()

        assert [queue.choose(), queue.choose()] == [other, None]
        assert len(queue) == 0

    with_loop(test)


# ---- on the thread


def test_steps_are_computed_while_a_pass_goes_on() -> None:
    engine = NotingEngine()
    order: list[str] = []
    engine.inside = lambda: order.append("step")

    async def test() -> None:
        async with make_thread(engine) as compute:
            loop = asyncio.get_running_loop()

            def compute_pass(give_way: GiveWay) -> str:
                for number in range(3):
                    order.append(f"pass {number}")
                    submitted = asyncio.run_coroutine_threadsafe(submit(), loop).result()
                    while not submitted.done():
                        give_way()
                return "done"

            async def submit() -> asyncio.Future[Any]:
                return compute.submit(make_work(FakeCache()))

            done = await compute.submit_pass(compute_pass, 1)
            assert done.result == "done"
            assert done.compute_seconds > 0

    run(test)
    assert order == ["pass 0", "step", "pass 1", "step", "pass 2", "step"]


def test_calls_are_answered_while_a_pass_goes_on() -> None:
    """A session that opens or closes must not wait for the end of a pass."""

    async def test() -> None:
        async with make_thread(NotingEngine()) as compute:
            loop = asyncio.get_running_loop()

            def compute_pass(give_way: GiveWay) -> None:
                called = asyncio.run_coroutine_threadsafe(call(), loop).result()
                while not called.done():
                    give_way()

            async def call() -> asyncio.Future[int]:
                return compute.call(lambda: 7)

            await compute.submit_pass(compute_pass, 1)

    run(test)


def test_cancelled_pass_ends_at_its_next_pause_and_leaves_nothing() -> None:
    class Tensor:
        """Stands for what a pass holds on to."""

    held: list[weakref.ref[Tensor]] = []

    async def test() -> None:
        begun = asyncio.Event()
        async with make_thread(NotingEngine()) as compute:
            loop = asyncio.get_running_loop()

            def compute_for_ever(give_way: GiveWay) -> None:
                tensor = Tensor()
                held.append(weakref.ref(tensor))
                loop.call_soon_threadsafe(begun.set)
                while True:
                    give_way()

            future = compute.submit_pass(compute_for_ever, 1)
            await begun.wait()
            future.cancel()
            await compute.submit_pass(lambda give_way: None, 1)  # its turn comes
            gc.collect()
            assert held[0]() is None

    run(test)


@pytest.mark.parametrize("has_begun", [True, False])
def test_thread_that_stops_refuses_its_passes(has_begun: bool) -> None:
    async def test() -> None:
        begun = asyncio.Event()
        async with make_thread(NotingEngine()) as compute:
            loop = asyncio.get_running_loop()

            def compute_for_ever(give_way: GiveWay) -> None:
                loop.call_soon_threadsafe(begun.set)
                while True:
                    give_way()

            running = compute.submit_pass(compute_for_ever, 1)
            waiting = compute.submit_pass(compute_for_ever, 1)
            if has_begun:
                await begun.wait()
        for future in (running, waiting, compute.submit_pass(compute_for_ever, 1)):
            with pytest.raises(RefusedError) as refusal:
                await future
            assert_refused(refusal.value, ErrorCode.DRAINING)

    run(test)


def test_pass_that_fails_is_refused_and_the_next_one_is_computed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(give_way: GiveWay) -> None:
        raise RefusedError(ErrorCode.BAD_VALUES, "not these")

    def fail(give_way: GiveWay) -> None:
        raise ZeroDivisionError("on purpose")

    async def test() -> None:
        async with make_thread(NotingEngine()) as compute:
            futures = [compute.submit_pass(run, 1) for run in (refuse, fail, lambda give_way: 5)]
            refused, failed, done = await asyncio.gather(*futures, return_exceptions=True)
        assert isinstance(refused, RefusedError)
        assert isinstance(failed, RefusedError)
        assert_refused(refused, ErrorCode.BAD_VALUES)
        assert_refused(failed, ErrorCode.INTERNAL)
        assert isinstance(done, ComputedPass)
        assert done.result == 5

    run(test)
    assert "on purpose" in caplog.text
