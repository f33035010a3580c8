"""How a compute thread ends, with work waiting or without."""

from __future__ import annotations

import asyncio
import threading

from compute_thread_scene import (
    FakeCache,
    NotingEngine,
    assert_refused,
    make_thread,
    make_work,
    on_loop,
)

from shoal.peer.engine.compute_thread import ComputeThread
from shoal.protocol.errors import ErrorCode


@on_loop()
async def test_what_comes_after_the_end_is_declined() -> None:
    engine = NotingEngine()
    posted: list[int] = []

    async with make_thread(engine) as compute:
        pass
    compute.post(lambda: posted.append(1))
    futures = compute.submit(make_work(FakeCache())), compute.call(lambda: posted.append(2))
    for result in await asyncio.gather(*futures, return_exceptions=True):
        assert isinstance(result, BaseException)
        assert_refused(result, ErrorCode.DRAINING)

    assert (engine.order, posted) == ([], [])


@on_loop()
async def test_end_with_work_waiting_declines_it_and_completes_what_runs() -> None:
    engine = NotingEngine()
    running = make_work(FakeCache(), 1)

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

    assert engine.order == [running]


@on_loop()
async def test_end_with_work_that_nobody_waits_for_any_more_leaves_no_unread_error() -> None:
    engine = NotingEngine()

    engine.gate.clear()
    async with make_thread(engine) as compute:
        compute.submit(make_work(FakeCache()))
        await engine.wait_entered()
        for _ in range(3):
            compute.submit(make_work(FakeCache()))
            compute.call(lambda: None)
        asyncio.get_running_loop().call_soon(engine.gate.set)


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
