"""Background tasks, and the loop's lag on a clock that a test can hold up."""

import asyncio
from collections.abc import Iterator

import pytest
from virtual_time import run_virtual

from shoal.peer.process.background import BackgroundTasks, LoopLag


async def end_after(seconds: float, error: Exception | None = None) -> None:
    await asyncio.sleep(seconds)
    if error is not None:
        raise error


@pytest.mark.parametrize("num_ended", [1, 2])
def test_background_tasks_that_end_normally_end_nothing_else(num_ended: int) -> None:
    async def main() -> str:
        async with BackgroundTasks() as tasks:
            for _ in range(num_ended):
                tasks.begin(end_after(1.0))
            return await tasks.run_until(asyncio.sleep(2.0, "done"))

    assert run_virtual(main()) == "done"


def test_background_task_that_fails_ends_what_runs_beside_it() -> None:
    async def main() -> None:
        async with BackgroundTasks() as tasks:
            tasks.begin(end_after(1.0))
            tasks.begin(end_after(2.0, ValueError("broken")))
            await tasks.run_until(asyncio.sleep(60.0))

    with pytest.raises(ValueError, match="broken"):
        run_virtual(main())


class LateClock:
    """Shows that every sleep took longer than asked, by what `delays` says."""

    def __init__(self, delays: Iterator[float]) -> None:
        self._delays = delays
        self._lost = 0.0
        self._is_due = False

    def now(self) -> float:
        if self._is_due:
            self._lost += next(self._delays, 0.0)
        self._is_due = not self._is_due
        return asyncio.get_running_loop().time() + self._lost

    def wall(self) -> float:
        return self.now()


def measure(delays: list[float], seconds: float) -> LoopLag:
    async def main() -> LoopLag:
        lag = LoopLag(LateClock(iter(delays)))
        task = asyncio.create_task(lag.run())
        await asyncio.sleep(seconds)
        task.cancel()
        await asyncio.wait({task})
        return lag

    return run_virtual(main())


def test_idle_loop_has_no_lag() -> None:
    lag = measure([], 60.0)

    assert lag.mean_seconds < 1e-6
    assert lag.max_seconds < 1e-6


def test_lag_is_noted_and_forgotten_but_for_its_maximum() -> None:
    assert measure([0.5] * 100, 20.0).mean_seconds > 0.45

    lag = measure([0.5], 60.0)

    assert 0.499 < lag.max_seconds < 0.501
    assert lag.mean_seconds < 0.01
