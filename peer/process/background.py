"""Background tasks of a peer, and the lag of its event loop."""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

from ...protocol.net.clock import Clock
from ...protocol.net.tasks import cancel_all

_logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")

_LAG_PERIOD_SECONDS = 0.25
_LAG_SMOOTHING = 0.1
"""Weight of the newest sample: the average looks back over some three seconds."""


class BackgroundTasks:
    """Background tasks of a peer: cancelled at the end, and nobody overlooks it if one fails."""

    def __init__(self) -> None:
        self._tasks: list[asyncio.Task[None]] = []

    def begin(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Do something in the background until the end."""
        self._tasks.append(asyncio.create_task(coroutine))

    async def __aenter__(self) -> "BackgroundTasks":
        return self

    async def __aexit__(self, *exception: object) -> None:
        await cancel_all(self._tasks)
        for task in self._tasks:
            if not task.cancelled() and task.exception() is not None:
                _logger.warning(
                    "a background task of the peer failed and is not restarted",
                    exc_info=task.exception(),
                )

    async def run_until(self, main: Coroutine[Any, Any, _Result]) -> _Result:
        """Return what a coroutine returns; raise what a task raises if one fails before."""
        running = asyncio.create_task(main)
        try:
            while not running.done():
                await asyncio.wait((running, *self._tasks), return_when=asyncio.FIRST_COMPLETED)
                for task in [task for task in self._tasks if task.done()]:
                    self._tasks.remove(task)  # what it raised is told here, and once
                    task.result()
            return running.result()
        finally:
            await cancel_all([running])


class LoopLag:
    """Measures how much later than asked the loop wakes a sleeper. Run `run()` in a task.

    It is the first thing that goes wrong when a peer is overloaded.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.mean_seconds = 0.0
        self.max_seconds = 0.0

    def __repr__(self) -> str:
        return f"<LoopLag {1000 * self.mean_seconds:.1f} ms, at most {1000 * self.max_seconds:.0f}>"

    async def run(self) -> None:
        """Sample until cancelled."""
        while True:
            due_at = self._clock.now() + _LAG_PERIOD_SECONDS
            await asyncio.sleep(_LAG_PERIOD_SECONDS)
            lag_seconds = max(0.0, self._clock.now() - due_at)
            self.mean_seconds += _LAG_SMOOTHING * (lag_seconds - self.mean_seconds)
            self.max_seconds = max(self.max_seconds, lag_seconds)
