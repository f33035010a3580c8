"""How many uploads share the line of a client at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

_LEAST_PLACES = 2
_MOST_PLACES = 8
_MOST_UPLOADS = 16
"""With those that were let in for a trial."""

_SHARE_BYTES_PER_SECOND = 256 * 2**10
"""What each upload is to have of a line: connections that share less of it starve each other."""

_SMALL_BYTES = 64 * 2**10
"""How long so little takes tells of round trips only."""

_TRIAL_SECONDS = 20.0
_MOST_TRIAL_SECONDS = 300.0
"""Or twice as long as the last upload took, up to so long: what arrives slowly arrives."""


class UploadPlaces:
    """Places for as many uploads as a line carries, as far as it has shown.

    Every upload that has arrived tells for how many there was room: two at least, and one more
    than before at most. One under way tells nothing: the line may be slow, or whoever takes it. So
    if nobody came in for a while, one more is let in, and another one after twice as long: who
    takes little keeps the others waiting no longer. Who comes first has a place first.
    """

    def __init__(self) -> None:
        self._free = asyncio.Semaphore(_LEAST_PLACES)
        self._num_places = _LEAST_PLACES  # those that are free, and those that are taken
        self._num_taken = 0
        self._num_waiting = 0
        self._num_fitting = _LEAST_PLACES
        self._num_trials = 0
        self._trial_seconds = _TRIAL_SECONDS
        self._trial: asyncio.TimerHandle | None = None

    @asynccontextmanager
    async def hold(self, num_bytes: int) -> AsyncGenerator[None]:
        """Wait for a place for so many bytes, which have arrived at the end unless that raises."""
        await self._take()
        loop = asyncio.get_running_loop()
        began_at = loop.time()
        try:
            yield
            self._note_arrival(num_bytes, loop.time() - began_at)
        finally:
            self._num_taken -= 1
            self._num_places -= 1
            self._offer()

    async def _take(self) -> None:
        self._num_waiting += 1
        if self._trial is None:
            self._plan_trial()
        try:
            await self._free.acquire()
            self._num_taken += 1
        finally:
            self._num_waiting -= 1
            self._plan_trial()

    def _note_arrival(self, num_bytes: int, seconds: float) -> None:
        share_seconds = num_bytes / _SHARE_BYTES_PER_SECOND
        num_fitting = min(self._num_fitting + 1, _MOST_PLACES)
        if num_bytes > _SMALL_BYTES and seconds > 0:
            num_fitting = min(num_fitting, int(self._num_taken * share_seconds / seconds))
        self._num_fitting = max(_LEAST_PLACES, num_fitting)
        self._trial_seconds = min(max(_TRIAL_SECONDS, 2 * seconds), _MOST_TRIAL_SECONDS)

    def _offer(self) -> None:
        while self._num_places < min(self._num_fitting + self._num_trials, _MOST_UPLOADS):
            self._num_places += 1
            self._free.release()

    def _plan_trial(self) -> None:
        """Let one more in if nobody comes in for a while from now on."""
        if self._trial is not None:
            self._trial.cancel()
            self._trial = None
        if not self._num_waiting:
            self._num_trials = 0
            return
        seconds = self._trial_seconds * 2.0**self._num_trials
        self._trial = asyncio.get_running_loop().call_later(seconds, self._begin_trial)

    def _begin_trial(self) -> None:
        self._num_trials = min(self._num_trials + 1, _MOST_UPLOADS)
        self._offer()
        self._plan_trial()
