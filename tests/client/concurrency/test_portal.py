"""The client's own event loop, seen from the threads that use it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import gc
import signal
import sys
import threading
from collections.abc import AsyncGenerator, Iterator

import pytest
import warm_python

from shoal.client.concurrency.portal import Portal
from shoal.protocol.errors import UnavailableError, UsageError

THREAD_NAME = "shoal client"
PATIENCE_SECONDS = 30.0
"""For waits that only a broken portal makes long."""


@pytest.fixture
def portal() -> Iterator[Portal]:
    with Portal() as portal:
        yield portal
    assert THREAD_NAME not in [thread.name for thread in threading.enumerate()]


async def double(number: int) -> int:
    await asyncio.sleep(0)
    return 2 * number


def interrupt_main_thread() -> None:
    """Do what Ctrl-C does."""
    identifier = threading.main_thread().ident
    assert identifier is not None
    signal.pthread_kill(identifier, signal.SIGINT)


def test_coroutine_runs_on_the_thread_of_the_portal(portal: Portal) -> None:
    async def name() -> str:
        return threading.current_thread().name

    assert portal.run(name()) == THREAD_NAME


@pytest.mark.parametrize("error", [UnavailableError("gone"), KeyError("x"), TimeoutError("late")])
def test_error_of_the_coroutine_is_raised_and_the_portal_goes_on(
    portal: Portal, error: Exception
) -> None:
    async def fail() -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        portal.run(fail())

    assert caught.value is error
    assert portal.run(double(1)) == 2


def test_coroutine_that_cancels_itself_does_not_look_like_a_closed_portal(portal: Portal) -> None:
    async def give_up() -> None:
        raise asyncio.CancelledError

    with pytest.raises(concurrent.futures.CancelledError):
        portal.run(give_up())


def test_threads_share_the_portal(portal: Portal) -> None:
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        results = list(threads.map(lambda number: portal.run(double(number)), range(100)))

    assert results == [2 * number for number in range(100)]


def test_interrupt_cancels_the_coroutine_and_waits_for_its_end(portal: Portal) -> None:
    trace: list[str] = []

    async def work() -> None:
        trace.append("begun")
        interrupt_main_thread()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            trace.append("cleaned up")

    with pytest.raises(KeyboardInterrupt):
        portal.run(work())

    assert trace == ["begun", "cleaned up"]
    assert portal.run(double(3)) == 6


@pytest.mark.parametrize("attempt", range(0, 30, 4))
def test_interrupt_at_any_moment_leaves_nothing_running(portal: Portal, attempt: int) -> None:
    """The signal comes from a third thread, while the coroutine is on its way or just begun."""
    is_over = threading.Event()
    go = threading.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            is_over.set()

    def interrupt() -> None:
        go.wait()
        for _ in range(attempt * 20):
            pass
        interrupt_main_thread()

    thread = threading.Thread(target=interrupt)
    thread.start()
    coroutine = work()

    def run_until_interrupted() -> None:
        go.set()
        portal.run(coroutine)

    with pytest.raises(KeyboardInterrupt):
        run_until_interrupted()
    thread.join()
    is_over.set()
    coroutine.close()  # not begun, or at its end: a running one would refuse

    async def count_tasks() -> int:
        return len(asyncio.all_tasks()) - 1

    assert portal.run(count_tasks()) == 0


def test_interrupt_does_not_replace_a_result_of_another_thread(portal: Portal) -> None:
    begun, leave = threading.Event(), asyncio.Event()

    async def work() -> str:
        begun.set()
        await leave.wait()
        return "done"

    async def let_go() -> None:
        leave.set()

    async def interrupt() -> None:
        interrupt_main_thread()
        await asyncio.Event().wait()

    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        other = threads.submit(portal.run, work())
        assert begun.wait(PATIENCE_SECONDS)
        with pytest.raises(KeyboardInterrupt):
            portal.run(interrupt())
        portal.run(let_go())
        assert other.result(PATIENCE_SECONDS) == "done"


def test_close_may_be_called_again_and_by_several_threads() -> None:
    portal = Portal()
    assert not portal.is_closed

    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        for future in [threads.submit(portal.close) for _ in range(4)]:
            future.result(PATIENCE_SECONDS)
    portal.close()

    assert portal.is_closed
    assert THREAD_NAME not in [thread.name for thread in threading.enumerate()]


def test_run_after_close_raises_and_the_coroutine_is_not_left_unawaited() -> None:
    portal = Portal()
    portal.close()

    with pytest.raises(UsageError, match="closed"):
        portal.run(double(1))

    gc.collect()  # a coroutine that was never awaited would warn, and warnings are errors here


def test_close_ends_what_still_runs_and_says_so_to_its_caller() -> None:
    portal = Portal()
    begun, cleaned_up = threading.Event(), threading.Event()

    async def work() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            cleaned_up.set()

    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        running = threads.submit(portal.run, work())
        assert begun.wait(PATIENCE_SECONDS)
        portal.close()
        assert cleaned_up.is_set()
        with pytest.raises(UsageError, match="closed"):
            running.result(PATIENCE_SECONDS)


def test_close_lets_go_of_a_caller_whose_coroutine_does_not_end() -> None:
    portal = Portal(grace_seconds=0.01)
    begun, may_end = threading.Event(), False

    async def ignore_cancellation() -> None:
        begun.set()
        while not may_end:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()

    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        running = threads.submit(portal.run, ignore_cancellation())
        assert begun.wait(PATIENCE_SECONDS)
        portal.close()
        with pytest.raises(UsageError, match="closed"):
            running.result(PATIENCE_SECONDS)
    may_end = True


def test_close_also_ends_tasks_that_a_coroutine_left_behind() -> None:
    portal = Portal()
    cleaned_up = threading.Event()

    async def linger() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cleaned_up.set()

    async def leave_behind() -> asyncio.Task[None]:
        task = asyncio.create_task(linger())
        await asyncio.sleep(0)
        return task

    task = portal.run(leave_behind())
    portal.close()

    assert task.cancelled()
    assert cleaned_up.is_set()


def test_close_ends_generators_that_a_coroutine_left_half_way() -> None:
    portal = Portal()
    trace: list[str] = []

    async def count() -> AsyncGenerator[int]:
        try:
            yield 1
            yield 2
        finally:
            await asyncio.sleep(0)  # only a running loop can end it
            trace.append("ended")

    numbers = count()

    async def take_one() -> int:
        return await anext(numbers)

    assert portal.run(take_one()) == 1
    assert trace == []
    portal.close()

    assert trace == ["ended"]


def test_shutdown_callback_runs_after_what_was_running_and_before_what_was_left_behind() -> None:
    portal = Portal()
    begun = threading.Event()
    trace: list[str] = []

    async def work(name: str) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            trace.append(name)

    async def leave_behind() -> asyncio.Task[None]:
        return asyncio.create_task(work("left behind"))

    async def shut_down() -> None:
        await asyncio.sleep(0)
        trace.append("shut down")
        raise OSError("this interests nobody")

    portal.run_at_close(shut_down)
    task = portal.run(leave_behind())
    begun.clear()
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        running = threads.submit(portal.run, work("running"))
        assert begun.wait(PATIENCE_SECONDS)
        portal.close()
        with pytest.raises(UsageError, match="closed"):
            running.result(PATIENCE_SECONDS)

    assert task.cancelled()
    assert trace == ["running", "shut down", "left behind"]


@pytest.mark.slow
def test_program_that_closes_nothing_ends_all_the_same() -> None:
    """As a script does whose last line is a generation: the interpreter goes, and with it all."""
    program = (
        "import asyncio, threading\n"
        "from shoal.client.concurrency.portal import Portal\n"
        "portal = Portal()\n"
        "async def linger():\n"
        "    try:\n"
        "        await asyncio.Event().wait()\n"
        "    finally:\n"
        "        print('cleaned up', flush=True)\n"
        "async def begin():\n"
        "    global task\n"
        "    task = asyncio.create_task(linger())\n"
        "    await asyncio.sleep(0)\n"
        "async def shut_down():\n"
        "    print('shut down', flush=True)\n"
        "portal.run_at_close(shut_down)\n"
        "portal.run(begin())\n"
    )

    done = warm_python.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=120
    )

    assert (done.returncode, done.stdout, done.stderr) == (0, "shut down\ncleaned up\n", "")
