"""Several things at once: all needed, none of them waited for, or few at a time for each key."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Coroutine, Hashable, Iterable
from contextlib import asynccontextmanager
from typing import Any, Generic, Protocol, TypeVar

from ...protocol.net.tasks import cancel_all

Result = TypeVar("Result")
Key = TypeVar("Key", bound=Hashable)

_logger = logging.getLogger(__name__)


async def run_all(coroutines: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Return all results in order; the first failure ends the others."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await cancel_all(tasks)


class Closable(Protocol):
    """Anything with a close() that never raises."""

    async def close(self) -> None:
        """End it."""
        ...


class Background:
    """Tasks that run beside others; what they raise is logged. `cancel` them or `finish` them."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
        """Begin with something; return its task."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._note_end)
        return task

    def begin_closing(self, *streams: Closable) -> list[asyncio.Task[None]]:
        """Close streams in tasks of their own.

        A caller that hangs up may be cancelled at any moment; by then nobody else holds the stream,
        and its peer would keep what belongs to it.
        """
        return [self.start(stream.close()) for stream in streams]

    async def close(self, *streams: Closable) -> None:
        """Close streams and wait for that; they are closed even when the wait is cancelled."""
        if tasks := self.begin_closing(*streams):
            await asyncio.shield(asyncio.gather(*tasks))

    async def cancel(self) -> None:
        """Cancel all tasks."""
        await cancel_all(self._tasks)

    async def finish(self) -> None:
        """Wait for all tasks, which end by themselves: closing a stream takes a second at most."""
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _note_end(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _logger.error("a background task of the client failed", exc_info=error)


class KeyedSemaphores(Generic[Key]):
    """A semaphore for each key, kept only while a task holds it or waits for it."""

    def __init__(self, limit: int = 1) -> None:
        self._limit = limit
        self._semaphores: dict[Key, asyncio.Semaphore] = {}
        self._num_users: Counter[Key] = Counter()

    def __repr__(self) -> str:
        return f"<KeyedSemaphores, {len(self._semaphores)} in use>"

    def __len__(self) -> int:
        return len(self._semaphores)

    @asynccontextmanager
    async def hold(self, key: Key) -> AsyncGenerator[None]:
        """Be one of `limit` holders of a key; the first that waits is the next holder."""
        # Counted, because a released semaphore is not locked until the next holder runs.
        self._num_users[key] += 1
        try:
            if key not in self._semaphores:
                self._semaphores[key] = asyncio.Semaphore(self._limit)
            async with self._semaphores[key]:
                yield
        finally:
            self._num_users[key] -= 1
            if not self._num_users[key]:
                del self._num_users[key], self._semaphores[key]
