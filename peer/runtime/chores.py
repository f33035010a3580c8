"""What a peer does in the background for as long as it runs."""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

_logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")


class Chores:
    """Background tasks of a peer: cancelled at the end, and nobody overlooks it if one fails."""

    def __init__(self) -> None:
        self._tasks: list[asyncio.Task[None]] = []

    def begin(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Do something in the background until the end."""
        self._tasks.append(asyncio.create_task(coroutine))

    async def __aenter__(self) -> "Chores":
        return self

    async def __aexit__(self, *exception: object) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        for task in self._tasks:
            if not task.cancelled() and task.exception() is not None:
                _logger.warning("a chore of the peer failed", exc_info=task.exception())

    async def run_until(self, main: Coroutine[Any, Any, _Result]) -> _Result:
        """Return what a coroutine returns; raise what a chore raised if one ends before."""
        running = asyncio.create_task(main)
        try:
            await asyncio.wait((running, *self._tasks), return_when=asyncio.FIRST_COMPLETED)
            for task in self._tasks:
                if task.done():
                    self._tasks.remove(task)  # what it raised is told here, and once
                    task.result()
            return running.result()
        finally:
            running.cancel()
            await asyncio.wait([running])
