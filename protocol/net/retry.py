"""The one retry loop: exponential back-off with jitter, until a deadline."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from ..errors import RefusedError, ShoalError, UnavailableError

Result = TypeVar("Result")


@dataclass(frozen=True)
class Backoff:
    """How long to wait between attempts: `first_seconds`, then `factor` times more, up to a most.

    Each wait is shortened by a random part of up to `jitter_fraction`, so that many who failed at
    one moment do not come back at one moment.
    """

    first_seconds: float = 0.1
    factor: float = 2.0
    most_seconds: float = 5.0
    jitter_fraction: float = 0.5
    generator: random.Random = field(default_factory=random.Random)

    def choose_wait_seconds(self, num_failures: int) -> float:
        """Draw the wait after this many failures in a row (from 1)."""
        longest = self.first_seconds * self.factor ** min(num_failures - 1, 64)
        return min(longest, self.most_seconds) * (
            1.0 - self.jitter_fraction * self.generator.random()
        )


async def retry(
    attempt: Callable[[], Awaitable[Result]],
    *,
    backoff: Backoff,
    deadline: float,
    retry_on: type[ShoalError] | tuple[type[ShoalError], ...] = UnavailableError,
) -> Result:
    """Call `attempt` until it succeeds, and return its result.

    `deadline` is a time of the running loop. An error of `retry_on` leads to another attempt if
    its wait ends before the deadline, and is raised otherwise; any other error is raised at once.
    A refusal that says when to come back is waited for at least that long. Raises
    UnavailableError when the deadline passes within an attempt, which is then cancelled.
    """
    loop = asyncio.get_running_loop()
    num_failures = 0
    last_error: ShoalError | None = None
    while True:
        limit = asyncio.timeout_at(deadline)
        try:
            async with limit:
                return await attempt()
        except TimeoutError as error:
            if not limit.expired():
                raise
            detail = "no attempt succeeded before the deadline"
            raise UnavailableError(f"{detail}: {last_error}" if last_error else detail) from error
        except retry_on as error:
            last_error = error
            num_failures += 1
            wait_seconds = backoff.choose_wait_seconds(num_failures)
            if isinstance(error, RefusedError):
                wait_seconds = max(wait_seconds, error.retry_after_seconds or 0.0)
            if loop.time() + wait_seconds >= deadline:
                raise
        await asyncio.sleep(wait_seconds)
