"""How long peers stay away from a run that have held it up."""

from __future__ import annotations

import pytest

from shoal.protocol.errors import ErrorCode, RefusedError
from shoal.protocol.ids import MemberId, PeerId
from shoal.protocol.runs.rests import FailedSums, Rests

PEER, OTHER = PeerId("peer"), PeerId("other")
A, B = MemberId("a/1"), MemberId("b/1")


def find_rest_seconds(rests: Rests, now: float, peer_id: PeerId = PEER) -> float | None:
    """Return how long a peer is told to stay away; None: it may come back."""
    try:
        rests.check(peer_id, now)
    except RefusedError as error:
        return error.retry_after_seconds
    return None


def test_peer_rests_ten_times_as_long_as_it_has_held_up_the_run() -> None:
    rests = Rests(floor_seconds=10.0)

    rests.note(PEER, "it was slow", 30.0, now=5.0)
    rests.note(OTHER, "it lied", 0.0, now=5.0)

    assert [find_rest_seconds(rests, now) for now in (5.0, 304.0, 305.0)] == [300.0, 1.0, None]
    assert find_rest_seconds(rests, 5.0, OTHER) == 100.0
    assert find_rest_seconds(rests, 5.0, PeerId("third")) is None


def test_refusal_says_why_and_when_the_peer_may_come_back() -> None:
    rests = Rests(floor_seconds=10.0)
    rests.note(PEER, "it was slow", 0.0, now=0.0)

    with pytest.raises(
        RefusedError, match=r"^put aside: it was slow; it may join again in 60 s$"
    ) as caught:
        rests.check(PEER, now=40.0)

    assert caught.value.code is ErrorCode.LEFT_OUT


def test_each_further_rest_is_twice_as_long_whatever_it_is_for() -> None:
    rests = Rests(floor_seconds=10.0)
    now, told = 0.0, list[float | None]()

    for number in range(8):
        rests.note(PEER, f"fault {number}", 0.0, now)
        told.append(find_rest_seconds(rests, now))
        now += told[-1] or 0.0

    assert told == [100.0, 200.0, 400.0, 800.0, 1600.0, 3200.0, 3600.0, 3600.0]


def test_rest_that_ended_an_hour_ago_is_forgotten() -> None:
    rests = Rests(floor_seconds=10.0)
    rests.note(PEER, "it was slow", 0.0, now=0.0)

    rests.note(PEER, "it was slow", 0.0, now=3699.0)
    assert find_rest_seconds(rests, 3699.0) == 200.0
    rests.note(PEER, "it was slow", 0.0, now=3899.0 + 3600.0)
    assert find_rest_seconds(rests, 3899.0 + 3600.0) == 100.0


def test_member_for_which_three_attempts_in_a_row_fail_is_failing() -> None:
    failed = FailedSums()
    for member in (A, A, B):
        failed.note_failed(member, 1.0)
    assert failed.failing == []

    failed.note_summed([B])
    failed.note_failed(A, 1.0)
    failed.note_failed(B, 1.0)
    assert (failed.failing, failed.seconds) == ([A], 5.0)

    failed.clear()
    assert (failed.failing, failed.seconds) == ([], 0.0)
