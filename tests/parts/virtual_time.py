"""Virtual time: a clock and an event loop on which waiting takes no real time."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import heapq
import math
import selectors
from collections.abc import Callable, Coroutine, Generator
from typing import Any, TypeVar

Result = TypeVar("Result")

VIRTUAL_EPOCH = 1_700_000_000.0
"""The virtual wall time at which loop time is zero (14 November 2023, 22:13:20 UTC)."""


class VirtualClock:
    """Reads the time of the virtual loop that it is called on; it has no state, so all instances
    agree.
    """

    def now(self) -> float:
        return _running_virtual_loop().time()

    def wall(self) -> float:
        return VIRTUAL_EPOCH + self.now()

    def hold(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which time stands still while the loop waits for another thread.

        See `VirtualEventLoop` for when that is needed.
        """
        return _running_virtual_loop().hold()

    def stall(self, seconds: float) -> None:
        """Advance time without running the loop, as if the process had been stopped."""
        _running_virtual_loop().stall(seconds)


class DeadlockError(RuntimeError):
    """Every task waits, and nothing can wake any of them."""


def run_virtual(coroutine: Coroutine[Any, Any, Result], *, start: float = 0.0) -> Result:
    """Run a coroutine to its end on a fresh virtual loop and return its result.

    `start` is the loop's first time in seconds. Hours of `asyncio.sleep` take no real time, and two
    runs with the same seeds behave identically. Raises DeadlockError instead of hanging.

    >>> async def nap() -> float:
    ...     await asyncio.sleep(3600)
    ...     return VirtualClock().now()
    >>> run_virtual(nap())
    3600.0
    """
    with asyncio.Runner(loop_factory=lambda: VirtualEventLoop(start)) as runner:
        return runner.run(coroutine)


class VirtualEventLoop(asyncio.SelectorEventLoop):
    """An asyncio loop whose time jumps to the next timer as soon as nothing else is ready.

    `asyncio.sleep`, `asyncio.timeout`, `call_later` and everything built on them follow it. Ready
    callbacks run first, at the present time; computing takes no virtual time.

    Threads: while a job of `run_in_executor` is under way, time stands still and the loop really
    waits for it. The loop cannot see any other thread that will report through
    `call_soon_threadsafe`, so time may jump past it: wrap that waiting in `hold()`. Real sockets
    and child processes work only while no timer is pending; do not mix them with virtual time.
    """

    def __init__(self, start: float = 0.0) -> None:
        self._virtual_now = start
        self._num_holds = 0
        self._num_timers = 0
        super().__init__(_JumpingSelector(self._pass_time))
        # Timers this near are due. asyncio's nanosecond vanishes in a float beyond 8e6 seconds,
        # and a timer that is never quite due would spin the loop forever.
        self._clock_resolution = max(1e-6, 4 * math.ulp(start))
        # The loop's own wake-up socket: with nothing else registered, no file can bring an event.
        self._num_own_files = len(self._own_selector().get_map())

    def time(self) -> float:
        return self._virtual_now

    def call_at(
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        """Do what asyncio does, but timers for the same time fire in the order of their calls."""
        self._num_timers += 1
        timer = _NumberedTimer(when, callback, args, self, context)
        timer.number = self._num_timers
        heapq.heappush(self._scheduled, timer)  # type: ignore[attr-defined]
        timer._scheduled = True  # type: ignore[attr-defined]
        return timer

    def stall(self, seconds: float) -> None:
        """Advance time while nothing runs: timers that were due meanwhile fire late."""
        self._virtual_now += seconds

    @contextlib.contextmanager
    def hold(self) -> Generator[None]:
        """Keep time from jumping while a thread is expected to call `call_soon_threadsafe`."""
        self._num_holds += 1
        try:
            yield
        finally:
            self._num_holds -= 1

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:
        future = super().run_in_executor(executor, func, *args)
        self._num_holds += 1
        future.add_done_callback(self._release)
        return future

    async def shutdown_default_executor(self, *args: Any) -> None:
        with self.hold():
            await super().shutdown_default_executor(*args)

    def _release(self, _: object) -> None:
        self._num_holds -= 1

    def _own_selector(self) -> _JumpingSelector:
        selector = self._selector  # type: ignore[attr-defined]
        assert isinstance(selector, _JumpingSelector)
        return selector

    def _pass_time(self, seconds: float | None) -> bool:
        """Let time pass where nothing is ready; return whether to wait for real events instead."""
        if self._num_holds:
            return True
        if seconds is not None:
            self._virtual_now += seconds
            return False
        if len(self._own_selector().get_map()) > self._num_own_files:
            return True
        raise DeadlockError(f"deadlock: no timer or event can wake up {self._describe_tasks()}")

    def _describe_tasks(self) -> str:
        lines: list[str] = []
        for task in asyncio.all_tasks(self):
            frames = task.get_stack(limit=1)
            where = f"{frames[0].f_code.co_filename}:{frames[0].f_lineno}" if frames else "its end"
            lines.append(f"{task.get_name()} at {where}")
        return "; ".join(sorted(lines)) or "the loop, which has no tasks"


class _NumberedTimer(asyncio.TimerHandle):
    """A timer with a place among those for the same time, whose order a heap does not keep."""

    number = 0

    def __lt__(self, other: asyncio.TimerHandle) -> bool:
        if self.when() == other.when() and isinstance(other, _NumberedTimer):
            return self.number < other.number
        return self.when() < other.when()


class _JumpingSelector(selectors.DefaultSelector):
    """A selector that asks the loop to let time pass instead of sleeping through it."""

    def __init__(self, pass_time: Callable[[float | None], bool]) -> None:
        super().__init__()
        self._pass_time = pass_time

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(0)
        if events or (timeout is not None and timeout <= 0):
            return events
        return super().select(None) if self._pass_time(timeout) else []


def _running_virtual_loop() -> VirtualEventLoop:
    loop = asyncio.get_running_loop()
    if not isinstance(loop, VirtualEventLoop):
        raise RuntimeError("VirtualClock works on a virtual loop only: start it with run_virtual()")
    return loop
