"""`tests/parts/virtual_time.py`: jumps, deadlocks, threads."""

import asyncio
import threading

import pytest
from virtual_time import VIRTUAL_EPOCH, DeadlockError, VirtualClock, run_virtual


def test_timers_for_the_same_time_fire_in_the_order_in_which_they_were_set() -> None:
    fired: list[int] = []

    async def wait() -> None:
        loop = asyncio.get_running_loop()
        for number in range(50):
            loop.call_later(1 + number % 3, fired.append, number)
        await asyncio.sleep(4)

    run_virtual(wait())

    assert fired == sorted(range(50), key=lambda number: number % 3)


def test_clock_reads_the_loop_from_a_given_start() -> None:
    async def read() -> tuple[float, float, float]:
        await asyncio.sleep(1.5)
        return asyncio.get_running_loop().time(), VirtualClock().now(), VirtualClock().wall()

    assert run_virtual(read(), start=100.0) == (101.5, 101.5, VIRTUAL_EPOCH + 101.5)


@pytest.mark.parametrize("start", [0.0, 1e7, 1.7e9, 1e12])
def test_timers_fire_in_order_at_any_start(start: float) -> None:
    async def race() -> list[int]:
        order: list[int] = []

        async def note(number: int, seconds: float) -> None:
            await asyncio.sleep(seconds)
            order.append(number)

        async with asyncio.TaskGroup() as group:
            for number, seconds in enumerate([0.3, 0.1, 0.2, 0.0]):
                group.create_task(note(number, seconds))
        return order

    assert run_virtual(race(), start=start) == [3, 1, 2, 0]


def test_timeout_and_call_later_follow_virtual_time() -> None:
    async def wait() -> list[float]:
        loop = asyncio.get_running_loop()
        times: list[float] = []
        loop.call_later(30, lambda: times.append(loop.time()))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(60):
                await asyncio.Event().wait()
        return [*times, loop.time()]

    assert run_virtual(wait()) == [30.0, 60.0]


def test_deadlock_is_an_error_that_names_the_task() -> None:
    async def stuck() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(asyncio.Event().wait(), name="the one that waits")

    with pytest.raises(DeadlockError, match="the one that waits"):
        run_virtual(stuck())


def test_executor_job_is_waited_for_while_time_stands_still() -> None:
    async def compute() -> tuple[int, float]:
        timer = asyncio.create_task(asyncio.sleep(1000))
        gate = threading.Event()
        job = asyncio.get_running_loop().run_in_executor(None, gate.wait)
        asyncio.get_running_loop().call_soon(gate.set)
        await job
        result = (1, VirtualClock().now())
        timer.cancel()
        return result

    assert run_virtual(compute()) == (1, 0.0)


def test_held_time_waits_for_another_thread() -> None:
    async def wait() -> float:
        loop = asyncio.get_running_loop()
        reported = asyncio.Event()
        started = threading.Event()

        def report() -> None:
            started.wait()
            loop.call_soon_threadsafe(reported.set)

        thread = threading.Thread(target=report)
        thread.start()
        with VirtualClock().hold():
            async with asyncio.timeout(1000):
                loop.call_soon(started.set)
                await reported.wait()
        thread.join()
        return loop.time()

    assert run_virtual(wait()) == 0.0


def test_virtual_clock_refuses_a_real_loop() -> None:
    async def read() -> float:
        return VirtualClock().now()

    with pytest.raises(RuntimeError, match="run_virtual"):
        asyncio.run(read())
