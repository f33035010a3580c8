"""Deadlines that follow from what was measured."""

from __future__ import annotations

from shoal.protocol.runs.deadlines import UsualTimes, choose_deadline


def test_deadline_follows_what_is_usual_and_not_a_straggler() -> None:
    usual = choose_deadline([1.0, 1.1, 1.2] * 5, 10.0)

    assert choose_deadline([1.0, 1.1, 1.2] * 5 + [500.0], 10.0) < usual + 1.0
    assert choose_deadline([100.0, 110.0, 120.0] * 5, 10.0) > 110.0 + 10.0


def test_deadline_doubles_while_all_are_late() -> None:
    times = UsualTimes(10.0)
    times.note(2.0)

    times.note_late()
    times.note_late()

    assert times.deadline_seconds == 4 * 12.0
    times.note(2.0)
    assert times.deadline_seconds == 12.0


def test_only_what_was_measured_lately_counts() -> None:
    times = UsualTimes(10.0)
    for seconds in [1000.0] * 50 + [1.0] * 50:
        times.note(seconds)

    assert times.deadline_seconds == 11.0
