"""Deadlines that follow from what was measured."""

from __future__ import annotations

from shoal.protocol.ids import MemberId
from shoal.protocol.runs.deadlines import CommitDelays, UsualTimes, choose_deadline


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


def test_deadlines_of_one_member_follow_from_its_own_times_once_there_are_any() -> None:
    alike = UsualTimes(10.0)
    slow, quick = UsualTimes(10.0, alike), UsualTimes(10.0, alike)
    quick.note(2.0)
    assert slow.deadline_seconds == 12.0

    slow.note_late()
    quick.note(2.0)
    assert slow.deadline_seconds == 24.0
    slow.note(20.0)

    assert [slow.deadline_seconds, quick.deadline_seconds] == [30.0, 12.0]


def test_only_what_was_measured_lately_counts() -> None:
    times = UsualTimes(10.0)
    for seconds in [1000.0] * 50 + [1.0] * 50:
        times.note(seconds)

    assert times.deadline_seconds == 11.0


A, B = MemberId("a/1"), MemberId("b/1")


def make_delays() -> CommitDelays:
    return CommitDelays(floor_seconds=10.0, begun_at=0.0)


def test_run_waits_for_a_download_as_long_as_for_ten_usual_updates() -> None:
    delays = make_delays()
    assert delays.most_seconds == 100.0

    for number in range(4):
        delays.note_commit(20.0 * number)
    assert delays.most_seconds == 200.0

    for number in range(10):
        delays.note_commit(1000.0 * number)
    assert delays.most_seconds == 600.0


def test_what_a_commit_waits_for_members_does_not_count_as_usual() -> None:
    delays = make_delays()

    for number in range(4):
        delays.note_commit(120.0 * number)
        delays.note_missing({A: True}, 120.0 * number + 20.0)

    assert delays.most_seconds == 200.0


def test_clock_of_a_member_stands_while_the_commit_waits_for_something_else() -> None:
    delays = make_delays()
    assert not delays.note_missing({A: True}, 0.0)
    delays.pause(60.0)
    assert not delays.is_on

    assert not delays.note_missing({A: False}, 500.0)  # between two tries of its download
    assert not delays.note_missing({A: True}, 539.0)

    assert delays.is_on
    assert delays.note_missing({A: True}, 540.0) == {A}
    assert delays.count_seconds(A) == 100.0


def test_each_member_has_a_clock_of_its_own_that_begins_again_once_it_was_ready() -> None:
    delays = make_delays()
    delays.note_missing({A: True}, 0.0)
    delays.note_missing({A: True, B: True}, 60.0)

    assert delays.note_missing({A: True, B: True}, 100.0) == {A}
    assert [delays.count_seconds(one) for one in (A, B)] == [100.0, 40.0]

    delays.note_missing({B: True}, 100.0)
    delays.note_missing({A: True, B: True}, 100.0)
    assert delays.count_seconds(A) == 0.0


def test_members_that_come_in_turn_take_a_tenth_of_the_time_of_a_run_and_one_wait_at_most() -> None:
    delays, delayed, now = make_delays(), 0.0, 0.0

    for number in range(1000):
        newcomer = MemberId(f"new{number}/1")
        while not delays.note_missing({newcomer: True}, now):
            delayed, now = delayed + 1.0, now + 1.0
        delays.note_missing({}, now)
        delays.note_commit(now)
        now += 10.0

    assert 0.9 * now / 10 < delayed <= now / 10 + 101.0


def test_member_that_has_nothing_is_waited_for_three_floors() -> None:
    delays = make_delays()

    assert not delays.note_missing({A: False, B: False}, 0.0)
    assert not delays.note_missing({A: False, B: True}, 29.0)
    assert delays.note_missing({A: False, B: True}, 30.0) == {A}
