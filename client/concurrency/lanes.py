"""One after the other for each key, and nothing kept of keys that nobody uses."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Hashable
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


class Lanes(Generic[Key]):
    """A lock for each key, there as long as somebody has it or waits for it."""

    def __init__(self) -> None:
        self._locks: dict[Key, asyncio.Lock] = {}
        self._num_users: Counter[Key] = Counter()

    def __repr__(self) -> str:
        return f"<Lanes, {len(self._locks)} in use>"

    @asynccontextmanager
    async def hold(self, key: Key) -> AsyncGenerator[None]:
        """Have a lane alone; who comes first has it first."""
        # Counted, because a released lock is not locked until whoever waits for it runs.
        self._num_users[key] += 1
        try:
            async with self._locks.setdefault(key, asyncio.Lock()):
                yield
        finally:
            self._num_users[key] -= 1
            if not self._num_users[key]:
                del self._num_users[key], self._locks[key]
