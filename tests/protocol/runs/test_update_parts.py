"""What is left to do in an update, from what its members have counted."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from shoal.protocol.ids import MemberId
from shoal.protocol.runs.audits import ASKED_AGAIN
from shoal.protocol.runs.update_parts import (
    Difference,
    PartOrder,
    TripTimes,
    UpdateParts,
    find_difference,
    pack_parts,
    unpack_digests,
    unpack_parts,
)

A, B, C, D, E = (MemberId(name) for name in "abcde")


def make_parts(num_parts: int, **counted: list[int]) -> UpdateParts:
    """Return an update of three stages: a and b, c, d and e."""
    parts = UpdateParts(num_parts, [[A, B], [C], [D, E]])
    for member, indices in counted.items():
        parts.note(MemberId(member), indices)
    return parts


def test_part_that_is_counted_nowhere_begins_at_the_first_stage() -> None:
    order = make_parts(1).choose_next(random.Random(0))

    assert order is not None
    assert (order.index, order.last_stage, order.without) == (0, 2, None)
    assert order.route[0] in (A, B)
    assert order.route[1] == C
    assert order.route[2] in (D, E)


def test_part_that_one_stage_lacks_begins_at_the_stage_before() -> None:
    lost = make_parts(1, b=[0], e=[0]).choose_next(random.Random(0))

    assert lost == PartOrder(0, (B, C, E), 1)


def test_part_that_the_last_stage_lacks_is_computed_there_alone() -> None:
    lost = make_parts(1, a=[0], c=[0]).choose_next(random.Random(0))

    assert lost is not None
    assert lost.route[0] == C
    assert lost.route[1] in (D, E)
    assert len(lost.route) == 2


def test_part_that_the_first_stage_lacks_goes_to_those_that_have_counted_it() -> None:
    lost = make_parts(1, c=[0], d=[0]).choose_next(random.Random(0))

    assert lost is not None
    assert lost.route[1:] == (C, D)
    assert lost.last_stage == 0


def test_part_that_two_members_have_counted_is_taken_out_of_one() -> None:
    doubled = make_parts(1, a=[0], c=[0], d=[0], e=[0]).choose_next(random.Random(0))

    assert doubled == PartOrder(0, (C, E), 2, without=E)


def test_part_goes_to_members_that_have_not_refused_it() -> None:
    parts = make_parts(1)
    parts.note(A, [], refused=[0])
    parts.note(D, [], refused=[0])

    order = parts.choose_next(random.Random(0))
    assert order is not None
    assert order.route == (B, C, E)
    assert parts.find_refused() is None


@pytest.mark.parametrize(("refusing", "stage"), [([A, B], 0), ([C], 1), ([A, D, E], 2)])
def test_part_is_refused_when_all_members_of_a_stage_refuse_it(
    refusing: list[MemberId], stage: int
) -> None:
    parts = make_parts(2)
    for member in refusing:
        parts.note(member, [0], refused=[1])

    assert parts.find_refused() == (1, stage)


def test_mate_computes_what_a_member_cannot_hand_on() -> None:
    parts = make_parts(1, a=[0])
    rng = random.Random(0)

    orders = [first := parts.choose_next(rng)]
    assert first is not None
    parts.note_failed(first)
    parts = UpdateParts(1, parts.stages, failures=parts.failures)  # as manifests tell anew
    parts.note(A, [0])
    for _ in range(3):
        if (order := parts.choose_next(rng)) is not None:
            parts.note_passed(order, order.route)
            orders.append(order)

    last = first.route[2]
    other = E if last == D else D
    assert orders == [
        PartOrder(0, (A, C, last), 2),
        PartOrder(0, (B, C, other), 2),
        PartOrder(0, (B, C, other), 0, without=B),
    ]
    assert parts.is_complete
    assert parts.list_parts(A) == {0}


def test_member_without_a_mate_hands_on_again() -> None:
    parts = make_parts(1, a=[0], c=[0])
    parts.failures[C] = 1

    order = parts.choose_next(random.Random(0))

    assert order is not None
    assert order.route[0] == C


def test_parts_under_way_are_not_ordered_again() -> None:
    parts = make_parts(2)

    orders = [parts.choose_next(random.Random(0)) for _ in range(3)]

    assert [order and order.index for order in orders] == [0, 1, None]


def test_members_of_a_stage_get_as_many_parts_each() -> None:
    parts = make_parts(12, a=[0, 1, 2, 3], c=[0, 1, 2, 3], d=[0, 1, 2], e=[3])
    rng = random.Random(0)

    orders = [parts.choose_next(rng) for _ in range(8)]

    routes = Counter(member for order in orders if order is not None for member in order.route)
    assert routes == {A: 2, B: 6, C: 8, D: 3, E: 5}


def test_member_gets_parts_by_how_fast_it_computes() -> None:
    stages = [[A, B, C], [D, E]]
    parts = UpdateParts(28, stages, part_seconds={A: 1.0, B: 3.0, D: 0.5})  # of C, E is not known
    rng = random.Random(0)

    orders = [parts.choose_next(rng) for _ in range(28)]

    routes = Counter(member for order in orders if order is not None for member in order.route)
    assert routes == {A: 16, B: 5, C: 7, D: 14, E: 14}


def test_slowest_stage_computes_for_as_long_as_an_order_is_on_its_way() -> None:
    parts = UpdateParts(64, [[A, B], [C], [D]], (), {A: 1.0, B: 1.0, C: 1.0, D: 0.5})

    nums = [parts.choose_num_under_way(seconds) for seconds in (None, 2.5, 7.5, 1000.0)]

    # Of four members: at least two for each, and at most eight.
    assert nums == [8, 8, 4 + 8, 32]


def test_members_whose_times_are_not_known_do_not_decide_how_many_parts_are_under_way() -> None:
    nothing_known = UpdateParts(64, [[A, B], [C]])
    one_known = UpdateParts(64, [[A, B], [C]], (), {A: 0.0, C: 0.5})

    assert nothing_known.choose_num_under_way(100.0) == 2 * 3
    assert one_known.choose_num_under_way(3.0) == 3 + 6


def test_trip_is_usual_by_each_first_member_of_the_newest_two_updates() -> None:
    trips = TripTimes()
    assert trips.usual_seconds is None

    for update, first, seconds in ((0, A, 90.0), (1, A, 5.0), (1, A, 1.0), (1, B, 2.0)):
        trips.note(update, first, seconds)
    assert trips.usual_seconds == (90.0 + 1.0 + 2.0) / 3
    trips.note(2, A, 3.0)

    assert trips.usual_seconds == (1.0 + 2.0 + 3.0) / 3


def test_member_with_which_orders_fail_gets_parts_only_where_nobody_else_may() -> None:
    parts, rng = UpdateParts(8, [[A, B], [C]]), random.Random(0)
    passed = PartOrder(1, (B, C), 1)
    parts.note_failed(PartOrder(0, (A, C), 1))
    parts.note_failed(passed)
    parts.note_passed(passed, passed.route)

    orders = [parts.choose_next(rng) for _ in range(7)]

    assert {order.route for order in orders if order is not None} == {(B, C)}
    assert parts.failures == {A: 1}
    alone = UpdateParts(1, [[A], [C]], failures=parts.failures)
    assert alone.choose_next(rng) == PartOrder(0, (A, C), 1)


def test_each_part_is_planned_once_and_looked_at_once_more() -> None:
    class Watched(UpdateParts):
        num_looked_at = 0

        def list_holders(self, stage: int, index: int) -> list[MemberId]:
            self.num_looked_at += 1
            return super().list_holders(stage, index)

    parts = Watched(100, [[A], [B]])
    rng = random.Random(0)
    while (order := parts.choose_next(rng)) is not None:
        parts.note_passed(order, order.route)

    assert parts.num_looked_at == 100 * 2 * len(parts.stages)


def test_update_is_complete_when_each_part_is_counted_once_at_each_stage() -> None:
    parts = make_parts(2, a=[0], b=[1], c=[0, 1], d=[0, 1])

    assert parts.is_complete
    parts.note(E, [1])
    assert not parts.is_complete


def test_orders_lead_to_a_complete_update_whatever_was_counted() -> None:
    for seed in range(100):
        rng = random.Random(seed)
        counted = {m: [i for i in range(4) if rng.random() < 0.4] for m in "abcde"}
        parts = make_parts(4, **counted)
        for _ in range(100):
            order = parts.choose_next(rng)
            if order is None:
                break
            parts.note_passed(order, order.route)
        assert parts.is_complete, seed


@pytest.mark.parametrize("indices", [set[int](), {0}, {7}, {8}, {0, 4095}])
def test_sets_of_parts_are_packed_into_bits(indices: set[int]) -> None:
    assert unpack_parts(pack_parts(indices)) == indices


@pytest.mark.parametrize("data", [bytes(9), bytes(11), bytes(20)], ids=["cut", "more", "twice"])
def test_bytes_that_are_no_digests_of_parts_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="bytes are no digests, or of one part twice"):
        unpack_digests(data)


def test_most_frequent_digest_is_taken_for_right() -> None:
    assert find_difference({A: b"x", B: b"y", C: b"y"}).equal == (B, C)
    assert find_difference({A: b"x", B: b"y"}).equal == (A,)
    assert find_difference({A: (b"x", 1e300), B: (b"x", 1.0), C: (b"x", 1.0)}).equal == (B, C)


def test_difference_tells_who_counts_and_whether_that_is_open() -> None:
    assert find_difference({A: b"x", B: b"x"}).others == ()
    assert find_difference({}) == Difference((), (), is_tie=False)
    tie, most = find_difference({A: b"x", B: b"y"}), find_difference({A: b"x", B: b"y", C: b"y"})
    assert (tie, most) == (Difference((A,), (B,), True), Difference((B, C), (A,), False))
    assert tie.describe("sums", ASKED_AGAIN).endswith("all compute them again")
    assert tie.describe("sums").endswith("nothing shows that they are right")
    assert most.describe("states") == (
        f"the states of …{A} differ from those of …{B}, …{C}, which count, as most have them"
    )


def test_part_that_all_ready_members_refuse_waits_for_others() -> None:
    parts = UpdateParts(2, [[A], [B]], growing=[1])
    parts.note(B, [], refused=[0])

    order = parts.choose_next(random.Random(0))

    assert order is not None
    assert order.index == 1
    assert parts.choose_next(random.Random(0)) is None


def test_member_that_stood_in_for_a_ready_one_is_noticed() -> None:
    parts = make_parts(2)
    orders = [parts.choose_next(random.Random(0)) for _ in range(2)]
    first, second = (order for order in orders if order is not None)

    assert parts.note_passed(first, first.route)
    assert not parts.note_passed(second, (A, C, MemberId("x")))
