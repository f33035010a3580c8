"""An event loop on a thread of its own, for callers that are not asynchronous."""

import asyncio
import atexit
import concurrent.futures
import contextlib
import logging
import os
import threading
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Generic, TypeVar

from ...protocol.errors import UsageError

Result = TypeVar("Result")

_logger = logging.getLogger(__name__)

_CLOSED = "the client is closed; join again"
_FORKED = "this client belongs to the process before the fork; join again in this one"
_FAREWELL_SECONDS = 10.0
"""How long the last coroutine may take; a directory that ends in good order takes four."""


class _Run(Generic[Result]):
    """One coroutine on its way: `outcome` is done when the coroutine has really ended.

    The future of `asyncio.run_coroutine_threadsafe` is done as soon as it is cancelled, while the
    coroutine still cleans up.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, Result]
    ) -> None:
        self.outcome: concurrent.futures.Future[Result] = concurrent.futures.Future()
        self._loop = loop
        self._coroutine = coroutine
        self.task: asyncio.Task[Result] | None = None

    def start(self) -> None:
        """Begin, unless cancelled already; called on the loop."""
        if self.outcome.done():
            return
        self.task = self._loop.create_task(self._coroutine)
        self.task.add_done_callback(self._settle)

    def refuse(self, error: Exception) -> None:
        """Fail without ever beginning; called instead of `start`, on any thread."""
        self._coroutine.close()
        self.outcome.set_exception(error)

    def give_up(self, error: Exception) -> None:
        """Fail while the coroutine clings to life; called once the loop stands still for good."""
        if not self.outcome.done():
            self.outcome.set_exception(error)

    def cancel(self) -> None:
        """Cancel; called on the loop, also before `start` or instead of it."""
        if self.task is not None:
            self.task.cancel()
        elif not self.outcome.done():
            self._coroutine.close()
            self._settle_cancelled()

    def _settle(self, task: asyncio.Task[Result]) -> None:
        if task.cancelled():
            self._settle_cancelled()
        elif (error := task.exception()) is not None:
            self.outcome.set_exception(error)
        else:
            self.outcome.set_result(task.result())

    def _settle_cancelled(self) -> None:
        self.outcome.cancel()
        self.outcome.set_running_or_notify_cancel()  # or `wait` would not notice


class Portal:
    """Runs coroutines for other threads. Owned by one `Client`; close it to end the thread."""

    def __init__(self, last_words_seconds: float = 5.0) -> None:
        """`last_words_seconds` is how long what was cancelled may clean up; then it is left."""
        self._last_words_seconds = last_words_seconds
        self._loop = asyncio.new_event_loop()
        self._lock = threading.Lock()
        self._runs: set[_Run[Any]] = set()
        self._farewell: Callable[[], Coroutine[Any, Any, None]] | None = None
        self._is_closing = False
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._run, name="shoal client", daemon=True)
        self._thread.start()
        # Sessions that are still open at the end of a program close themselves later than daemon
        # threads stop running, and would wait for this one for ever.
        atexit.register(self.close)

    def __enter__(self) -> "Portal":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def is_closed(self) -> bool:
        """Return whether nothing can be run any more."""
        return self._is_closing or self._is_forked

    @property
    def _is_forked(self) -> bool:
        """Return whether this is a child process, into which no fork brings the thread."""
        return os.getpid() != self._process

    def run_last(self, farewell: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run a coroutine when the portal closes, after all others have ended."""
        self._farewell = farewell

    def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine to its end and return its result.

        When the calling thread is interrupted meanwhile (Ctrl-C), the coroutine is cancelled and
        has ended, within reason, before the interrupt goes on. Raises UsageError when the portal
        is closed, before or meanwhile, and in a process that was forked.
        """
        run = _Run(self._loop, coroutine)
        try:
            # Inside, because the interrupt may come as soon as the coroutine is on its way.
            self._start(run)
            return run.outcome.result()
        except concurrent.futures.CancelledError:
            if self._is_closing:
                raise UsageError(_CLOSED) from None
            raise
        except BaseException:
            if not run.outcome.done():
                with contextlib.suppress(RuntimeError):  # closed meanwhile
                    self._loop.call_soon_threadsafe(run.cancel)
                    concurrent.futures.wait([run.outcome], timeout=self._last_words_seconds)
            raise

    def _start(self, run: _Run[Any]) -> None:
        if self._is_forked:
            return run.refuse(UsageError(_FORKED))  # somebody may have held the lock for ever
        with self._lock:
            if self._is_closing:
                run.refuse(UsageError(_CLOSED))
            else:
                self._loop.call_soon_threadsafe(self._begin, run)

    def _begin(self, run: _Run[Any]) -> None:
        self._runs.add(run)
        run.outcome.add_done_callback(lambda _: self._runs.discard(run))
        run.start()

    def close(self) -> None:
        """Cancel what still runs, say the farewell and end the thread; safe to call twice."""
        if self._is_forked:
            return
        with self._lock:
            if not self._is_closing:
                self._is_closing = True
                self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        atexit.unregister(self.close)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            self._loop.run_until_complete(self._end())
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        finally:
            for run in list(self._runs):
                run.give_up(UsageError(_CLOSED))
            self._loop.close()

    async def _end(self) -> None:
        """Cancel the callers' coroutines, say the farewell, cancel what others left behind."""
        await self._cancel([run.task for run in self._runs])
        if self._farewell is not None:
            try:
                async with asyncio.timeout(_FAREWELL_SECONDS):
                    await self._farewell()
            except Exception as error:  # noqa: BLE001 - nobody is left who could do anything
                _logger.debug("the client did not close cleanly: %r", error)
        await self._cancel(asyncio.all_tasks() - {asyncio.current_task()})

    async def _cancel(self, tasks: Iterable[asyncio.Task[Any] | None]) -> None:
        """Cancel tasks and wait for their end, within reason."""
        cancelled = [task for task in tasks if task is not None and task.cancel()]
        if cancelled:
            ending = asyncio.gather(*cancelled, return_exceptions=True)
            await asyncio.wait([ending], timeout=self._last_words_seconds)
