"""How long to wait after failures in a row."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.client.publishing.backoffs import Backoffs


@dataclass
class HandClock:
    seconds: float = 0.0

    def now(self) -> float:
        return self.seconds

    def wall(self) -> float:
        return self.seconds


def test_each_failure_doubles_the_wait_up_to_an_hour_and_a_success_ends_it() -> None:
    clock = HandClock()
    backoffs = Backoffs[str](clock, 100.0)
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
    backoffs = Backoffs[str](clock, 100.0)
    backoffs.note_failure("a")
    backoffs.forget_expired()
    assert backoffs.count_failures("a") == 1
    clock.seconds += 3701.0
    backoffs.forget_expired()
    assert backoffs.count_failures("a") == 0
