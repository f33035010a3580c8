"""An event loop on a thread of its own, for callers that are not asynchronous."""

import asyncio
import atexit
import contextlib
import logging
import os
import threading
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import CancelledError, Future, wait
from functools import partial
from typing import Any, TypeVar

from ...protocol.errors import UsageError

Result = TypeVar("Result")

_logger = logging.getLogger(__name__)

_CLOSED = "the client is closed; join again"
_FORKED = "this client belongs to the process before the fork; join again in this one"
_SHUTDOWN_SECONDS = 10.0
"""How long the last coroutine may take; a directory that ends in good order takes four."""


class Portal:
    """Runs coroutines for other threads. Owned by one `Client`; close it to end the thread."""

    def __init__(self, grace_seconds: float = 5.0) -> None:
        """`grace_seconds` is how long cancelled tasks may clean up; then they are left."""
        self._grace_seconds = grace_seconds
        self._loop = asyncio.new_event_loop()
        self._lock = threading.Lock()
        self._running: dict[Future[Any], asyncio.Task[Any]] = {}
        """The tasks of the callers' coroutines, by what the callers wait for."""
        self._at_close: Callable[[], Coroutine[Any, Any, None]] | None = None
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

    def run_at_close(self, shutdown: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run a coroutine when the portal closes, after all others have ended."""
        self._at_close = shutdown

    def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine to its end and return its result.

        When the calling thread is interrupted meanwhile (Ctrl-C), the coroutine is cancelled and
        has ended, within reason, before the interrupt goes on. Raises UsageError when the portal
        is closed, before or meanwhile, and in a process that was forked.
        """
        # Done when the coroutine has really ended. The future of `run_coroutine_threadsafe` is done
        # as soon as it is cancelled, while the coroutine still cleans up.
        outcome: Future[Result] = Future()
        try:
            # Inside, because the interrupt may come as soon as the coroutine is on its way.
            self._start(coroutine, outcome)
            return outcome.result()
        except CancelledError:
            if self._is_closing:
                raise UsageError(_CLOSED) from None
            raise
        except BaseException:
            if not outcome.done():
                with contextlib.suppress(RuntimeError):  # closed meanwhile
                    self._loop.call_soon_threadsafe(self._interrupt, coroutine, outcome)
                    wait([outcome], timeout=self._grace_seconds)
            raise

    def _start(self, coroutine: Coroutine[Any, Any, Result], outcome: Future[Result]) -> None:
        """Put a coroutine on its way, or fail without ever beginning with it."""
        error = _FORKED
        if not self._is_forked:  # or else somebody may have held the lock for ever
            error = _CLOSED
            with self._lock:
                if not self._is_closing:
                    self._loop.call_soon_threadsafe(self._begin, coroutine, outcome)
                    return
        coroutine.close()
        outcome.set_exception(UsageError(error))

    def _begin(self, coroutine: Coroutine[Any, Any, Result], outcome: Future[Result]) -> None:
        task = self._running[outcome] = self._loop.create_task(coroutine)
        task.add_done_callback(partial(self._settle, outcome))

    def _interrupt(self, coroutine: Coroutine[Any, Any, Any], outcome: Future[Any]) -> None:
        """Cancel a coroutine that runs, has ended, or never came to begin."""
        if outcome in self._running:
            self._running[outcome].cancel()
        elif not outcome.done():
            coroutine.close()
            _settle_cancelled(outcome)

    def _settle(self, outcome: Future[Result], task: asyncio.Task[Result]) -> None:
        del self._running[outcome]
        if task.cancelled():
            _settle_cancelled(outcome)
        elif (error := task.exception()) is not None:
            outcome.set_exception(error)
        else:
            outcome.set_result(task.result())

    def close(self) -> None:
        """Cancel all coroutines, run that of `run_at_close`, end the thread; safe to call twice."""
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
            for outcome in self._running:  # of coroutines that ignore cancellation
                outcome.set_exception(UsageError(_CLOSED))
            self._loop.close()

    async def _end(self) -> None:
        """Cancel the callers' coroutines, run that of `run_at_close`, cancel what is left."""
        await self._cancel(self._running.values())
        if self._at_close is not None:
            try:
                async with asyncio.timeout(_SHUTDOWN_SECONDS):
                    await self._at_close()
            except Exception as error:  # noqa: BLE001 - no caller is left to handle it
                _logger.debug("the client did not close cleanly: %r", error)
        await self._cancel(asyncio.all_tasks() - {asyncio.current_task()})

    async def _cancel(self, tasks: Iterable[asyncio.Task[Any]]) -> None:
        """Cancel tasks and wait for their end, within reason."""
        cancelled = [task for task in tasks if task.cancel()]
        if cancelled:
            ending = asyncio.gather(*cancelled, return_exceptions=True)
            await asyncio.wait([ending], timeout=self._grace_seconds)


def _settle_cancelled(outcome: Future[Any]) -> None:
    outcome.cancel()
    outcome.set_running_or_notify_cancel()  # or `wait` would not notice
