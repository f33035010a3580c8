"""An event loop on a thread of its own, for callers that are not asynchronous."""

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, TypeVar

from ..protocol.errors import UsageError

Result = TypeVar("Result")


class Portal:
    """Runs coroutines for other threads. Owned by one `Client`; close it to end the thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="shoal client", daemon=True)
        self._thread.start()

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
        """Return whether the thread has ended."""
        return not self._thread.is_alive()

    def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine to its end and return its result.

        When the calling thread is interrupted meanwhile (Ctrl-C), the coroutine is cancelled and
        has ended before the interrupt goes on. Raises UsageError when the portal is closed.
        """
        if self.is_closed:
            coroutine.close()
            raise UsageError("the client is closed; join again")
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            if not future.done():
                future.cancel()
                concurrent.futures.wait([future], timeout=5.0)
                self._wait_for_tasks()
            raise

    def close(self) -> None:
        """Cancel what still runs and end the thread; safe to call twice."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    def _wait_for_tasks(self) -> None:
        """Wait until cancelled coroutines have cleaned up, which takes turns of the loop."""
        turn = asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self._loop)
        concurrent.futures.wait([turn], timeout=5.0)

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
