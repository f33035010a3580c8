"""An event loop on a thread of its own, for callers that are not asynchronous."""

import asyncio
import atexit
import concurrent.futures
import contextlib
import threading
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Generic, TypeVar

from ..protocol.errors import UsageError

Result = TypeVar("Result")

_CLOSED = "the client is closed; join again"
_LAST_WORDS_SECONDS = 5.0
"""How long an interrupted coroutine may clean up before the interrupt goes on without it."""


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
        self._task: asyncio.Task[Result] | None = None

    def start(self) -> None:
        """Begin, unless cancelled already; called on the loop."""
        if self.outcome.done():
            return
        self._task = self._loop.create_task(self._coroutine)
        self._task.add_done_callback(self._settle)

    def refuse(self, error: Exception) -> None:
        """Fail without ever beginning; called instead of `start`, on any thread."""
        self._coroutine.close()
        self.outcome.set_exception(error)

    def cancel(self) -> None:
        """Cancel; called on the loop, also before `start` or instead of it."""
        if self._task is not None:
            self._task.cancel()
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

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._lock = threading.Lock()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="shoal client", daemon=True)
        self._thread.start()
        # Sessions that are still open at the end of a program close themselves later than daemon
        # threads stop running, and would wait for this one for ever.
        atexit.register(self.close)

    def __enter__(self) -> "Portal":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def is_closed(self) -> bool:
        """Return whether nothing can be run any more."""
        return self._is_closing

    def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine to its end and return its result.

        When the calling thread is interrupted meanwhile (Ctrl-C), the coroutine is cancelled and
        has ended, within reason, before the interrupt goes on. Raises UsageError when the portal
        is closed, before or meanwhile.
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
                    concurrent.futures.wait([run.outcome], timeout=_LAST_WORDS_SECONDS)
            raise

    def _start(self, run: _Run[Any]) -> None:
        with self._lock:
            if self._is_closing:
                run.refuse(UsageError(_CLOSED))
            else:
                self._loop.call_soon_threadsafe(run.start)

    def close(self) -> None:
        """Cancel what still runs and end the thread; safe to call twice."""
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
            tasks = asyncio.all_tasks(self._loop)
            for task in tasks:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        finally:
            self._loop.close()
