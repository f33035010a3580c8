"""Time as an argument: the interface and the clocks of this machine; and timeouts that do not count
time in which the process stood still.
"""

from __future__ import annotations

import asyncio
import time
from types import TracebackType
from typing import Protocol, Self

from ..errors import SilentError


class Clock(Protocol):
    """Two readings of time. Code waits with asyncio, on a loop that follows the same clock."""

    def now(self) -> float:
        """Return monotonic seconds: for deadlines and durations, meaningless across processes."""
        ...

    def wall(self) -> float:
        """Return seconds since the Unix epoch: for expiry dates that others must understand."""
        ...


class SystemClock:
    """The clocks of this machine."""

    def now(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()


_STANDSTILL_SECONDS = 0.5
"""A timer that comes so much too late says that this process stood still: it was stopped (Ctrl-Z),
or the machine slept. The answer may have come meanwhile, and nobody has looked."""


class SuspendAwareTimeout:
    """A timeout for use in an `async with`; time in which this process stood still does not count.

    Like `asyncio.timeout`, it raises TimeoutError. When it finds that it comes far too late, it
    begins anew: whoever is waited for has had no chance to be heard.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._timeout = asyncio.timeout(None)
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Self:
        await self._timeout.__aenter__()
        self.restart(self._seconds)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        assert self._timer is not None
        self._timer.cancel()
        return await self._timeout.__aexit__(kind, error, trace)

    @property
    def has_expired(self) -> bool:
        """Whether this timeout has ended its block, and not another one inside."""
        return self._timeout.expired()

    def restart(self, seconds: float) -> None:
        """Count so many seconds from now."""
        if self._timer is not None:
            self._timer.cancel()
        self._seconds = seconds
        self._timer = asyncio.get_running_loop().call_later(seconds, self._end)

    def _end(self) -> None:
        assert self._timer is not None
        now = asyncio.get_running_loop().time()
        if now - self._timer.when() > _STANDSTILL_SECONDS:
            self.restart(self._seconds)
        else:
            self._timeout.reschedule(now)


class AnswerTimeout(SuspendAwareTimeout):
    """The timeout of what a peer has to do: it raises SilentError, with the complaint given."""

    def __init__(self, seconds: float, complaint: str) -> None:
        super().__init__(seconds)
        self._complaint = complaint

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        try:
            return await super().__aexit__(kind, error, trace)
        except TimeoutError as late:
            raise SilentError(self._complaint) from late
