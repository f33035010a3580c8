"""How long to wait after failures in a row, and until when."""

from __future__ import annotations

import random

import pytest
from hand_clock import HandClock
from virtual_time import VirtualClock

from shoal.protocol.net.retry import Backoff, Backoffs, Retry

HOURLY = Backoff(100.0, 3600.0)


def test_each_failure_doubles_the_wait_up_to_an_hour_and_a_success_ends_it() -> None:
    clock = HandClock()
    backoffs = Backoffs[str](HOURLY, clock)
    assert backoffs.may_try("a")
    for wait_seconds in (100.0, 200.0, 400.0, 800.0, 1600.0, 3200.0, 3600.0, 3600.0):
        backoffs.note_failure("a")
        clock.seconds += wait_seconds - 1
        assert not backoffs.may_try("a")
        assert backoffs.may_try("b")
        clock.seconds += 1
        assert backoffs.may_try("a")
    assert backoffs.count_failures("a") == 8

    backoffs.note_success("a")
    assert backoffs.count_failures("a") == 0
    backoffs.note_failure("a")
    clock.seconds += 100.0
    assert backoffs.may_try("a")


def test_failure_of_long_ago_is_forgotten() -> None:
    clock = HandClock()
    backoffs = Backoffs[str](HOURLY, clock)
    backoffs.note_failure("a")
    backoffs.forget_expired()
    assert backoffs.count_failures("a") == 1
    clock.seconds += 3701.0
    backoffs.forget_expired()
    assert backoffs.count_failures("a") == 0


def test_everything_that_rests_is_listed() -> None:
    clock = HandClock()
    backoffs = Backoffs[str](HOURLY, clock)
    backoffs.note_failure("a")
    clock.seconds += 50.0
    backoffs.note_failure("b")
    assert backoffs.resting == {"a", "b"}
    clock.seconds += 50.0
    assert backoffs.resting == {"b"}


async def test_pauses_double_and_begin_anew_after_a_success() -> None:
    retry, paused = Retry(Backoff(0.1, 1.0), VirtualClock()), list[float]()

    for number in range(8):
        began_at = VirtualClock().now()
        await retry.pause()
        paused.append(VirtualClock().now() - began_at)
        retry.note_failure()
        if number == 6:
            retry.reset()

    assert paused == pytest.approx([0.0, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 0.0])


async def test_no_pause_goes_beyond_the_deadline() -> None:
    retry = Retry(Backoff(1.0, 60.0), VirtualClock(), deadline=2.5)
    for expected in (1.0, 2.5, 2.5):
        assert retry.remaining_seconds == 2.5 - VirtualClock().now()
        retry.note_failure()
        await retry.pause()
        assert VirtualClock().now() == pytest.approx(expected)


def test_jitter_leaves_out_a_part_of_a_wait_at_random() -> None:
    backoff, rng = Backoff(8.0, 8.0, jitter_fraction=0.25), random.Random(0)

    waits = [backoff.choose_seconds(1, rng) for _ in range(200)]

    assert 6.0 <= min(waits) < 6.2
    assert 7.8 < max(waits) <= 8.0
    assert backoff.choose_seconds(1) == 8.0
    assert backoff.choose_seconds(0, rng) == 0.0


def test_wait_stays_finite_after_any_number_of_failures() -> None:
    assert HOURLY.choose_seconds(100_000) == 3600.0
