"""Trying again: how long to wait after failures in a row, and until when to try at all.

Nothing here calls what is tried or catches an error: which failures are worth another attempt only
the caller knows. Read first: `Retry` for one thing in a loop, `Backoffs` for many things by key.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from .clock import Clock

Key = TypeVar("Key", bound=Hashable)

_MOST_DOUBLINGS = 64
"""Beyond that a float has had enough."""


@dataclass(frozen=True)
class Backoff:
    """Waits that double with every failure in a row.

    `jitter_fraction` is how much of a wait may be left out at random, so that many who were
    interrupted by the same failure do not come back at the same moment.
    """

    first_seconds: float
    longest_seconds: float
    jitter_fraction: float = 0.0

    def choose_seconds(self, num_failures: int, rng: random.Random | None = None) -> float:
        """Return how long to wait after so many failures in a row; not at all after none.

        >>> backoff = Backoff(first_seconds=1.0, longest_seconds=30.0)
        >>> [backoff.choose_seconds(n) for n in range(7)]
        [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0]
        """
        if num_failures < 1:
            return 0.0
        doublings = min(num_failures - 1, _MOST_DOUBLINGS)
        seconds = min(self.first_seconds * 2.0**doublings, self.longest_seconds)
        if rng is not None:
            seconds *= 1.0 - self.jitter_fraction * rng.random()
        return seconds


class Retry:
    """The attempts at one thing, one after the other, until a deadline.

    With a generator the waits have the jitter of the backoff.
    """

    def __init__(
        self,
        backoff: Backoff,
        clock: Clock,
        deadline: float = math.inf,
        rng: random.Random | None = None,
    ) -> None:
        self.num_failures = 0
        self.deadline = deadline
        self._backoff = backoff
        self._clock = clock
        self._rng = rng

    @property
    def remaining_seconds(self) -> float:
        """How long attempts may still begin; negative once the deadline has passed."""
        return self.deadline - self._clock.now()

    def note_failure(self) -> None:
        """Wait longer from now on."""
        self.num_failures += 1

    def wait_longest(self) -> None:
        """Wait as long as the backoff ever does: what failed will not do for some time."""
        self.num_failures = max(self.num_failures, _MOST_DOUBLINGS)

    def reset(self) -> None:
        """Begin anew: an attempt has succeeded."""
        self.num_failures = 0

    async def pause(self) -> None:
        """Wait before the next attempt, never beyond the deadline; not before the first one."""
        if self.num_failures == 0:
            return
        seconds = self._backoff.choose_seconds(self.num_failures, self._rng)
        await asyncio.sleep(max(0.0, min(seconds, self.remaining_seconds)))


class Backoffs(Generic[Key]):
    """Which of many things rest after failures in a row, and until when."""

    def __init__(self, backoff: Backoff, clock: Clock) -> None:
        self._backoff = backoff
        self._clock = clock
        self._num_failures: dict[Key, int] = {}
        self._until: dict[Key, float] = {}

    @property
    def resting(self) -> frozenset[Key]:
        """The keys that are to be left alone now."""
        now = self._clock.now()
        return frozenset(key for key, until in self._until.items() if now < until)

    def note_failure(self, key: Key) -> None:
        """Let it rest from now on, twice as long as after the failure before."""
        self._num_failures[key] = self.count_failures(key) + 1
        seconds = self._backoff.choose_seconds(self._num_failures[key])
        self._until[key] = self._clock.now() + seconds

    def note_success(self, key: Key) -> None:
        """Forget all failures."""
        self._num_failures.pop(key, None)
        self._until.pop(key, None)

    def may_try(self, key: Key) -> bool:
        """Return whether it does not rest."""
        return self._clock.now() >= self._until.get(key, -math.inf)

    def count_failures(self, key: Key) -> int:
        """Return how many there were since the last success."""
        return self._num_failures.get(key, 0)

    def forget_expired(self) -> None:
        """Forget what may be tried again for as long as the longest wait, and was not."""
        now = self._clock.now()
        for key, until in list(self._until.items()):
            if now > until + self._backoff.longest_seconds:
                self.note_success(key)
