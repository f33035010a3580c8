"""Clock: what code that waits and measures relies on, for each implementation."""

import asyncio
from collections.abc import Iterator

import pytest
from async_tests import RunAsync
from virtual_time import VirtualClock, VirtualEventLoop

from shoal.protocol.net.clock import Clock, SystemClock


@pytest.fixture(params=[SystemClock, VirtualClock])
def clock(request: pytest.FixtureRequest) -> Clock:
    return request.param()


@pytest.fixture
def run_async(clock: Clock) -> Iterator[RunAsync]:
    """Runs a test on the loop whose time the clock shows."""
    loop_factory = VirtualEventLoop if isinstance(clock, VirtualClock) else None
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        yield runner.run


async def test_clock_is_that_of_the_loop_on_which_code_waits(clock: Clock) -> None:
    loop = asyncio.get_running_loop()
    for seconds in (0.0, 0.001, 0.002):
        before = loop.time()
        assert before <= clock.now() <= loop.time()
        await asyncio.sleep(seconds)


async def test_no_reading_goes_back(clock: Clock) -> None:
    readings: list[float] = []
    for seconds in (0.0, 0.001, 0.002):
        readings += [clock.now(), clock.now()]
        await asyncio.sleep(seconds)
    assert readings == sorted(readings)


async def test_wall_seconds_are_those_of_a_date_of_this_century(clock: Clock) -> None:
    assert 1_600_000_000 < clock.wall() < 4_000_000_000
