"""So many at once, of whom nobody keeps the others waiting for long."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import ExitStack, asynccontextmanager


class Places:
    """Places that are held for `seconds` at most.

    Whoever needs longer goes on beside those who come next, as long as there are no more than
    `most` in all. Who comes first has a place first.
    """

    def __init__(self, num_places: int, most: int, seconds: float) -> None:
        self._seconds = seconds
        self._free = asyncio.Semaphore(num_places)
        self._all = asyncio.Semaphore(most)

    @asynccontextmanager
    async def hold(self) -> AsyncGenerator[None]:
        """Wait for a place."""
        async with self._all:
            await self._free.acquire()
            place = ExitStack()
            place.callback(self._free.release)
            timer = asyncio.get_running_loop().call_later(self._seconds, place.close)
            try:
                yield
            finally:
                timer.cancel()
                place.close()
