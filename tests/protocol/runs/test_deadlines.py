"""Deadlines that follow from what was measured."""

from __future__ import annotations

from shoal.protocol.ids import MemberId, PeerId
from shoal.protocol.runs.deadlines import CommitHolds, UsualTimes, choose_deadline


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


A, B = MemberId("a/1"), MemberId("b/1")


def hold_for(holds: CommitHolds, member: MemberId, begin: float, seconds: float) -> None:
    assert not holds.note_fetching({member: 1}, begin)
    assert holds.is_on
    assert not holds.note_fetching({}, begin + seconds)
    assert not holds.is_on


def test_run_waits_for_a_download_as_long_as_for_ten_usual_updates() -> None:
    holds = CommitHolds(floor_seconds=10.0)
    assert holds.most_seconds == 100.0

    for number in range(4):
        holds.note_commit(20.0 * number)
    assert holds.most_seconds == 200.0

    for number in range(10):
        holds.note_commit(1000.0 * number)
    assert holds.most_seconds == 600.0


def test_member_that_was_waited_for_is_not_for_ten_times_as_long() -> None:
    holds = CommitHolds(floor_seconds=10.0)

    hold_for(holds, A, 0.0, 5.0)

    assert holds.note_fetching({A: 1, B: 1}, 54.0) == {A}
    assert holds.note_fetching({B: 1}, 56.0) == set()
    assert holds.note_fetching({MemberId("a/2"): 1, B: 1}, 56.0) == set()


def test_one_peer_takes_an_eleventh_of_the_time_of_a_run_at_most_whatever_it_does() -> None:
    holds, held, now = CommitHolds(floor_seconds=10.0), 0.0, 0.0

    while now < 100_000.0:
        if not holds.note_fetching({A: 1}, now):
            held += 99.0
            holds.note_fetching({}, now + 99.0)  # just in time
            now += 98.0
        now += 1.0

    assert held <= 100_000.0 / 11 + 100.0


def test_member_that_takes_too_long_rests_while_another_one_is_waited_for() -> None:
    holds = CommitHolds(floor_seconds=10.0)
    assert not holds.note_fetching({A: 1}, 0.0)
    assert not holds.note_fetching({A: 1, B: 1}, 60.0)

    assert holds.note_fetching({A: 1, B: 1}, 100.0) == {A}
    assert holds.is_on
    assert holds.count_seconds(B, 100.0) == 40.0
    assert holds.find_rest_seconds(PeerId("a"), 100.0) == 1000.0
    assert holds.find_rest_seconds(PeerId("b"), 100.0) == 0.0


def test_member_without_a_byte_is_waited_for_three_floors() -> None:
    holds = CommitHolds(floor_seconds=10.0)

    assert not holds.note_fetching({A: 0, B: 0}, 0.0)
    assert not holds.note_fetching({A: 0, B: 1}, 29.0)
    assert holds.note_fetching({A: 0, B: 1}, 30.0) == {A}
