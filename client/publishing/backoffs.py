"""Whom, or what, not to try again before some time: the more failures in a row, the longer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import Generic, TypeVar

from ...protocol.net.clock import Clock

Key = TypeVar("Key", bound=Hashable)

_LONGEST_SECONDS = 3600.0


class Backoffs(Generic[Key]):
    """Failures in a row, and until when to wait after them."""

    def __init__(self, clock: Clock, first_seconds: float) -> None:
        self._clock = clock
        self._first_seconds = first_seconds
        self._num_failures: Counter[Key] = Counter()
        self._until: dict[Key, float] = {}

    def note_failure(self, key: Key) -> None:
        """Wait from now on, twice as long as after the failure before."""
        seconds = self._first_seconds * 2.0 ** min(self._num_failures[key], 16)
        self._num_failures[key] += 1
        self._until[key] = self._clock.now() + min(seconds, _LONGEST_SECONDS)

    def note_success(self, key: Key) -> None:
        """Forget all failures."""
        del self._num_failures[key]
        self._until.pop(key, None)

    def may_try(self, key: Key) -> bool:
        """Return whether nothing is to be waited for."""
        return self._clock.now() >= self._until.get(key, 0.0)

    def count_failures(self, key: Key) -> int:
        """Return how many there were since the last success."""
        return self._num_failures[key]

    def forget_expired(self) -> None:
        """Forget what failed long ago and was not tried again."""
        now = self._clock.now()
        for key in [key for key, until in self._until.items() if now > until + _LONGEST_SECONDS]:
            self.note_success(key)
