"""Clock: what code that waits and measures relies on, for each implementation."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from virtual_time import VirtualClock, run_virtual

from shoal.protocol.net.clock import Clock, SystemClock

Run = Callable[[Coroutine[Any, Any, None]], None]

CLOCKS = pytest.mark.parametrize(
    ("clock", "run"),
    [
        pytest.param(SystemClock(), asyncio.run, id="system"),
        pytest.param(VirtualClock(), run_virtual, id="virtual"),
    ],
)


@CLOCKS
def test_clock_is_that_of_the_loop_on_which_code_waits(clock: Clock, run: Run) -> None:
    async def test() -> None:
        loop = asyncio.get_running_loop()
        for seconds in (0.0, 0.001, 0.002):
            before = loop.time()
            assert before <= clock.now() <= loop.time()
            await asyncio.sleep(seconds)

    run(test())


@CLOCKS
def test_no_reading_goes_back(clock: Clock, run: Run) -> None:
    async def test() -> None:
        readings: list[float] = []
        for seconds in (0.0, 0.001, 0.002):
            readings += [clock.now(), clock.now()]
            await asyncio.sleep(seconds)
        assert readings == sorted(readings)

    run(test())


@CLOCKS
def test_wall_seconds_are_those_of_a_date_of_this_century(clock: Clock, run: Run) -> None:
    async def test() -> None:
        assert 1_600_000_000 < clock.wall() < 4_000_000_000

    run(test())
