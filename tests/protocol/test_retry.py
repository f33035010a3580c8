"""The retry loop, on virtual time."""

import asyncio
import random

import pytest

from shoal.protocol.errors import (
    CacheFullError,
    RefusedError,
    RemoteProtocolError,
    ShoalError,
    UnavailableError,
)
from shoal.protocol.net.clock import run_virtual
from shoal.protocol.net.retry import Backoff, retry

STEADY = Backoff(first_seconds=1.0, factor=2.0, most_seconds=5.0, jitter_fraction=0.0)


class Attempts:
    """Fails with the errors given, one after the other, then succeeds; notes the times."""

    def __init__(self, *errors: ShoalError) -> None:
        self._errors = list(errors)
        self.times: list[float] = []

    async def __call__(self) -> str:
        self.times.append(asyncio.get_running_loop().time())
        if self._errors:
            raise self._errors.pop(0)
        return "done"


def test_retry_waits_longer_each_time_up_to_a_most() -> None:
    attempts = Attempts(*[UnavailableError("no")] * 5)

    result = run_virtual(retry(attempts, backoff=STEADY, deadline=100.0))

    assert (result, attempts.times) == ("done", [0, 1, 3, 7, 12, 17])


def test_retry_raises_the_last_error_when_the_next_attempt_would_be_too_late() -> None:
    attempts = Attempts(*[UnavailableError(f"no {i}") for i in range(9)])

    with pytest.raises(UnavailableError, match="no 2"):
        run_virtual(retry(attempts, backoff=STEADY, deadline=6.0))
    assert attempts.times == [0, 1, 3]


def test_retry_cancels_an_attempt_at_the_deadline() -> None:
    async def hang() -> None:
        await asyncio.sleep(1000)

    async def test() -> float:
        with pytest.raises(UnavailableError, match="deadline"):
            await retry(hang, backoff=STEADY, deadline=6.0)
        return asyncio.get_running_loop().time()

    assert run_virtual(test()) == 6.0


def test_retry_passes_other_errors_on_at_once() -> None:
    attempts = Attempts(RemoteProtocolError("liar"))

    with pytest.raises(RemoteProtocolError):
        run_virtual(retry(attempts, backoff=STEADY, deadline=100.0))
    assert attempts.times == [0]


def test_retry_waits_as_long_as_a_refusal_asks() -> None:
    attempts = Attempts(CacheFullError("full", 4.0), CacheFullError("full", 0.5))

    run_virtual(retry(attempts, backoff=STEADY, deadline=100.0, retry_on=RefusedError))

    assert attempts.times == [0, 4, 6]


def test_jitter_shortens_waits_by_its_fraction_and_follows_the_seed() -> None:
    def draw() -> list[float]:
        backoff = Backoff(1.0, 1.0, 1.0, jitter_fraction=0.5, generator=random.Random(7))
        return [backoff.choose_wait_seconds(1) for _ in range(100)]

    waits = draw()

    assert waits == draw()
    assert 0.5 <= min(waits) < 0.6
    assert 0.9 < max(waits) <= 1.0
