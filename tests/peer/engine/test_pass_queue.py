"""Passes on the compute thread: between steps, in turns, and gone when nobody waits for them."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import pytest
from compute_thread_scene import (
    FakeCache,
    NotingEngine,
    assert_refused,
    make_thread,
    make_work,
    on_loop,
)

from shoal.kernels.pauses import GiveWay
from shoal.peer.engine.pass_queue import ComputedPass, Interruption, PassJob, PassQueue
from shoal.protocol.errors import ErrorCode, RefusedError


class FakeClock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> float:
        return self.seconds


def make_job(run: Callable[[GiveWay], Any], tenant: str = "home", cost: int = 1) -> PassJob:
    loop = asyncio.get_running_loop()
    return PassJob(run, cost, (tenant, ""), loop.create_future(), loop.create_future(), 0.0)


# ---- the queue by itself


class Company:
    """Interruptions that always wait and take their time; notes when each runs."""

    def __init__(self, clock: FakeClock, **seconds: float) -> None:
        self.noted: list[tuple[float, str]] = []
        self._clock = clock
        self._seconds = {Interruption[name]: taken for name, taken in seconds.items()}

    def interrupt(self, kinds: Collection[Interruption]) -> Interruption | None:
        guest = next((one for one in self._seconds if one in kinds), None)
        if guest is not None:
            self.noted.append((self._clock.seconds, guest.name))
            self._clock.seconds += self._seconds[guest]
        return guest


def run_beside(company: Company, clock: FakeClock, num_seconds: int) -> ComputedPass:
    """Run a pass that looks for others each second of its own."""

    def compute(give_way: GiveWay) -> str:
        for _ in range(num_seconds):
            clock.seconds += 1
            give_way()
        return "done"

    done = PassQueue(clock.now).run(make_job(compute), company.interrupt)
    assert isinstance(done, ComputedPass)
    return done


@on_loop()
async def test_pass_has_as_much_time_as_prompts_and_a_quarter_of_what_tokens_have() -> None:
    clock = FakeClock()
    prompts = Company(clock, PROMPTS=6)
    done = run_beside(prompts, clock, 20)
    assert done.result == "done"
    assert [when for when, _ in prompts.noted] == [1, 13, 25, 37]
    assert (done.compute_seconds, done.queue_seconds) == (20, 24)

    clock = FakeClock()
    tokens = Company(clock, TOKENS=8)
    run_beside(tokens, clock, 6)
    assert [when for when, _ in tokens.noted] == [1, 11, 21]


@on_loop()
async def test_tokens_do_not_wait_for_what_a_pass_is_owed_by_prompts() -> None:
    clock = FakeClock()
    company = Company(clock, PROMPTS=6, TOKENS=2)

    run_beside(company, clock, 8)

    assert company.noted == [
        (1, "PROMPTS"), (8, "TOKENS"), (11, "TOKENS"), (14, "TOKENS"), (17, "TOKENS"),
        (20, "TOKENS"), (23, "PROMPTS"), (30, "TOKENS"),
    ]  # fmt: skip


@on_loop()
async def test_pass_beside_which_nothing_waits_is_not_held_up() -> None:
    clock = FakeClock()
    done = run_beside(Company(clock), clock, 5)
    assert (done.queue_seconds, done.compute_seconds) == (0, 5)


@on_loop()
async def test_short_passes_of_others_are_computed_in_the_middle_of_a_long_one() -> None:
    queue, order = PassQueue(float), []

    def note(name: str) -> Callable[[GiveWay], None]:
        def compute(give_way: GiveWay) -> None:
            order.append(name)
            give_way()
            order.append(f"end of {name}")

        return compute

    def interrupt(kinds: Collection[Interruption]) -> Interruption | None:
        job = queue.choose()
        if job is None:
            return None
        queue.run(job, interrupt)
        return Interruption.PASS

    for name, tenant, cost in (
        ("long", "greedy", 100), ("of the same", "greedy", 10), ("short", "modest", 50),
        ("as long", "other", 51), ("shorter", "third", 25), ("another", "fourth", 30),
    ):  # fmt: skip
        queue.append(make_job(note(name), tenant, cost))
    longest = queue.choose()
    assert longest is not None
    queue.run(longest, interrupt)

    assert order == [
        "long", "short", "shorter", "end of shorter", "end of short", "end of long",
    ]  # fmt: skip
    assert len(queue.jobs) == 3


@on_loop()
async def test_queue_is_the_rest_of_what_runs_and_one_pass_of_each_holder() -> None:
    clock = FakeClock()
    queue = PassQueue(clock.now)
    seen: list[float] = []

    def compute(give_way: GiveWay) -> None:
        for _ in range(10):
            clock.seconds += 1
            seen.append(queue.queue_seconds)

    queue.append(make_job(compute, "home", 20))
    assert queue.queue_seconds == 0
    for _ in range(2):
        if (job := queue.choose()) is not None:
            queue.run(job, lambda kinds: None)
        for tenant in ("home", "home", "away"):
            queue.append(make_job(compute, tenant, 20))

    assert seen[:10] == [0] * 10
    assert seen[10:] == list(range(19, 9, -1))
    assert queue.queue_seconds == 20


@on_loop()
async def test_holders_take_turns_by_the_tokens_they_had() -> None:
    queue = PassQueue(float)
    for name, sizes in {"greedy": [100] * 3, "modest": [10] * 12}.items():
        for size in sizes:
            queue.append(make_job(bool, name, size))

    order = [job.tenant[0] for job in iter(queue.choose, None)]

    assert order[:12] == ["greedy", *["modest"] * 10, "greedy"]
    assert sorted(order) == ["greedy"] * 3 + ["modest"] * 12


@on_loop()
async def test_cancelled_pass_is_never_begun() -> None:
    queue = PassQueue(float)
    dropped, other = make_job(bool), make_job(bool)
    queue.append(dropped)
    queue.append(other)
    dropped.future.cancel()

    assert [queue.choose(), queue.choose()] == [other, None]
    assert queue.take_cancelled() == [dropped]
    assert len(queue.jobs) == 0


@pytest.mark.parametrize(("max_bytes", "num_guests"), [(9, 0), (10, 1), (14, 1), (15, 2)])
@on_loop()
async def test_interruptions_find_room_in_the_memory_that_is_left(
    max_bytes: int, num_guests: int
) -> None:
    """A pass that is computed faster may need more memory: forward, with many tokens."""

    begun: list[str] = []

    queue = PassQueue(float)
    queue.max_bytes = max_bytes

    def interrupt(kinds: Collection[Interruption]) -> Interruption | None:
        job = queue.choose()
        if job is None:
            return None
        begun.append(job.tenant[0])
        queue.run(job, interrupt)
        return Interruption.PASS

    def compute(give_way: GiveWay) -> None:
        give_way()

    host, *guests = [
        replace(make_job(compute, name, cost), num_bytes=5)
        for name, cost in (("host", 100), ("guest", 10), ("its guest", 1))
    ]
    for guest in guests:
        queue.append(guest)
    queue.run(host, interrupt)

    assert len(begun) == num_guests


# ---- on the thread


@on_loop()
async def test_short_pass_is_answered_while_a_long_one_of_another_client_goes_on() -> None:
    async with make_thread(NotingEngine()) as compute:
        loop = asyncio.get_running_loop()

        def compute_long(give_way: GiveWay) -> str:
            short = asyncio.run_coroutine_threadsafe(submit(), loop).result()
            while not short.future.done():
                give_way()
            return "long"

        async def submit() -> PassJob:
            return compute.submit_pass(lambda give_way: "short", 5, ("away", ""))

        done = await compute.submit_pass(compute_long, 10, ("home", "")).future
        assert done.result == "long"


@on_loop()
async def test_pass_that_is_dropped_beneath_another_is_not_released_before_it_ends() -> None:
    may_end, guest_begun = threading.Event(), asyncio.Event()
    async with make_thread(NotingEngine()) as compute:
        loop = asyncio.get_running_loop()

        def interrupt(give_way: GiveWay) -> str:
            loop.call_soon_threadsafe(guest_begun.set)
            while not may_end.is_set():
                give_way()
            return "guest"

        def compute_for_ever(give_way: GiveWay) -> None:
            while True:
                give_way()

        long = compute.submit_pass(compute_for_ever, 10, ("home", ""))
        guest = compute.submit_pass(interrupt, 5, ("away", ""))
        await guest_begun.wait()
        compute.drop_pass(long)
        await compute.call(bool)
        assert not long.released.done()

        may_end.set()
        assert (await guest.future).result == "guest"
        await long.released


@on_loop()
async def test_steps_are_computed_while_a_pass_goes_on() -> None:
    engine = NotingEngine()
    order: list[str] = []
    engine.inside = lambda: order.append("step")

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

        done = await compute.submit_pass(compute_pass, 1).future
        assert done.result == "done"
        assert done.compute_seconds > 0

    assert order == ["pass 0", "step", "pass 1", "step", "pass 2", "step"]


@on_loop()
async def test_calls_are_answered_while_a_pass_goes_on() -> None:
    """A session that opens or closes must not wait for the end of a pass."""

    async with make_thread(NotingEngine()) as compute:
        loop = asyncio.get_running_loop()

        def compute_pass(give_way: GiveWay) -> None:
            called = asyncio.run_coroutine_threadsafe(call(), loop).result()
            while not called.done():
                give_way()

        async def call() -> asyncio.Future[int]:
            return compute.call(lambda: 7)

        await compute.submit_pass(compute_pass, 1).future


@on_loop()
async def test_cancelled_pass_ends_at_its_next_pause_and_leaves_nothing() -> None:
    class Tensor:
        """Stands for what a pass holds on to."""

    held: list[weakref.ref[Tensor]] = []

    begun = asyncio.Event()
    async with make_thread(NotingEngine()) as compute:
        loop = asyncio.get_running_loop()

        def compute_for_ever(give_way: GiveWay) -> None:
            tensor = Tensor()
            held.append(weakref.ref(tensor))
            loop.call_soon_threadsafe(begun.set)
            while True:
                give_way()

        job = compute.submit_pass(compute_for_ever, 1)
        await begun.wait()
        compute.drop_pass(job)
        await job.released
        await compute.submit_pass(lambda give_way: None, 1).future  # its turn comes
        gc.collect()
        assert held[0]() is None


@pytest.mark.parametrize("has_begun", [True, False])
@on_loop()
async def test_thread_that_stops_refuses_its_passes(has_begun: bool) -> None:
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
    for job in (running, waiting, compute.submit_pass(compute_for_ever, 1)):
        with pytest.raises(RefusedError) as refusal:
            await job.future
        await job.released
        assert_refused(refusal.value, ErrorCode.DRAINING)


@on_loop()
async def test_pass_that_fails_is_refused_and_the_next_one_is_computed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(give_way: GiveWay) -> None:
        raise RefusedError(ErrorCode.BAD_VALUES, "not these")

    def fail(give_way: GiveWay) -> None:
        raise ZeroDivisionError("on purpose")

    async with make_thread(NotingEngine()) as compute:
        futures = [compute.submit_pass(run, 1).future for run in (refuse, fail, lambda give_way: 5)]
        refused, failed, done = await asyncio.gather(*futures, return_exceptions=True)
    assert isinstance(refused, RefusedError)
    assert isinstance(failed, RefusedError)
    assert_refused(refused, ErrorCode.BAD_VALUES)
    assert_refused(failed, ErrorCode.INTERNAL)
    assert isinstance(done, ComputedPass)
    assert done.result == 5

    assert "on purpose" in caplog.text
