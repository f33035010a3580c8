"""Which parts are audited, and which members compute wrongly by what they tell of a part."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from shoal.protocol.ids import MemberId
from shoal.protocol.runs.audits import ASKED_AGAIN, UNSETTLED, Audits, DisputedPart, judge_part
from shoal.protocol.runs.commits import Commit
from shoal.protocol.runs.decisions import Decision, Member
from shoal.protocol.runs.manifests import Manifests
from shoal.protocol.runs.update_parts import Difference, MemberManifest, PartOrder, UpdateParts

A, B, C, D, E = (MemberId(name) for name in "abcde")
STAGES = {A: 0, B: 0, C: 1, D: 1, E: 1}
COMMIT = Commit(founder="a", compute_class="c1" * 32, update=3, sums=("0" * 64, "1" * 64))
X, Y, Z = b"digest x", b"digest y", b"digest z"


def tell(
    counted: dict[MemberId, bytes], audited: dict[MemberId, bytes], commit: Commit = COMMIT
) -> Manifests:
    """Return manifests of members of two stages that tell these digests of part 0."""
    ready = MemberManifest(commit.update, is_ready=True, state=b"state")
    told = {
        member: replace(
            ready,
            counted={0: counted[member]} if member in counted else {},
            audited={0: audited[member]} if member in audited else {},
        )
        for member in STAGES
    }
    members = tuple(Member(member, stage) for member, stage in STAGES.items())
    return Manifests(Decision(7, bytes(32), members, commit.encode()), 2, told)


def pass_part(parts: UpdateParts) -> PartOrder:
    order = PartOrder(0, (A, C), 1)
    parts.note_passed(order, (A, C))
    return order


def test_part_is_audited_at_each_stage_by_a_member_that_has_not_counted_it() -> None:
    parts = UpdateParts(1, [[A, B], [C, D, E]])

    Audits(1.0, random.Random(0)).draw(pass_part(parts), parts)

    first, second = parts.audits
    assert first == PartOrder(0, (B, C), 0, is_audit=True)
    assert second in [PartOrder(0, (A, one), 1, is_audit=True) for one in (D, E)]
    assert not parts.is_complete
    assert parts.choose_next(random.Random(0)) == first


def test_stage_that_hands_on_what_it_had_counted_is_not_audited_again() -> None:
    parts = UpdateParts(1, [[A], [B, C], [D, E]])
    order = PartOrder(0, (B, D), 2)
    parts.note(A, [0])
    parts.note_passed(order, (B, D))

    Audits(1.0, random.Random(0)).draw(order, parts)

    assert list(parts.audits) == [PartOrder(0, (B, E), 2, is_audit=True)]


def test_part_is_audited_by_the_member_that_has_then_computed_all_first() -> None:
    slow = {D: 9.0, E: 1.0}
    parts = UpdateParts(8, [[A], [C, D, E]], (), slow)
    parts.note(C, [0])
    parts.note(E, [1, 2])

    assert parts.list_auditors(1, 0) == [E, D]


def test_commit_waits_for_audits_of_disputes_alone() -> None:
    audits, parts = begin_dispute(Y, X)
    disputed = parts.audits.popleft()
    parts.audits.clear()
    drawn = PartOrder(0, (B, C), 0, is_audit=True)
    missing = UpdateParts(1, [[A, B], [C, D, E]])

    assert audits.choose_seconds(parts, [drawn], 1.5) == 3.0
    assert audits.choose_seconds(parts, [drawn, disputed], 1.5) is None
    assert audits.choose_seconds(parts, [drawn, PartOrder(0, (A, C), 1)], 1.5) is None
    assert audits.choose_seconds(missing, [drawn], 1.5) is None


def test_stage_of_one_member_is_not_audited() -> None:
    parts = UpdateParts(1, [[A], [C]])

    Audits(1.0, random.Random(0)).draw(pass_part(parts), parts)

    assert not parts.audits
    assert parts.is_complete


def test_as_many_parts_are_audited_as_wanted() -> None:
    num_parts, audits = 4096, Audits(0.02, random.Random(0))
    parts = UpdateParts(num_parts, [[A, B]])
    for index in range(num_parts):
        order = PartOrder(index, (A,), 0)
        parts.note_passed(order, (A,))
        audits.draw(order, parts)

    assert 0.01 < len(parts.audits) / num_parts < 0.03


def test_audit_counts_nothing_and_its_failure_blames_nobody() -> None:
    parts = UpdateParts(1, [[A, B], [C, D]])
    Audits(1.0, random.Random(0)).draw(pass_part(parts), parts)
    audit = parts.audits.popleft()

    parts.note_passed(audit, (B,))
    parts.note_failed(audit)

    assert parts.list_holders(0, 0) == [A]
    assert not parts.failures


def test_members_that_tell_the_same_are_not_asked_again() -> None:
    audits, parts = Audits(1.0, random.Random(0)), UpdateParts(1, [[A, B], [C, D, E]])
    manifests = tell({A: X, C: Y}, {B: X, D: Y})

    assert not audits.order_disputed(manifests, parts)
    assert audits.choose_aside(manifests) is None


def answer_audits(audits: Audits, parts: UpdateParts, *failing: MemberId) -> list[MemberId]:
    """Carry out the audits that are ordered; return who was asked."""
    asked: list[MemberId] = []
    while parts.audits:
        order = parts.audits.popleft()
        asked.append(order.auditor)
        audits.note_audit(order, has_passed=order.auditor not in failing)
    return asked


def begin_dispute(counted: bytes, audited: bytes) -> tuple[Audits, UpdateParts]:
    """Return audits with a dispute about part 0, which C has counted and D audited."""
    audits, parts = Audits(1.0, random.Random(0)), UpdateParts(1, [[A, B], [C, D, E]])
    pass_part(parts)
    audits.order_disputed(tell({A: X, C: counted}, {D: audited}), parts)
    return audits, parts


def list_open(found: list[DisputedPart]) -> list[tuple[int, int, str]]:
    return [(one.stage, one.index, one.follows) for one in found]


def test_all_replicas_compute_a_disputed_part_again_once() -> None:
    audits, parts = Audits(1.0, random.Random(0)), UpdateParts(1, [[A, B], [C, D, E]])
    pass_part(parts)
    manifests = tell({A: X, C: X}, {D: Y})

    assert audits.choose_aside(manifests) is None
    assert list_open(audits.order_disputed(manifests, parts)) == [(1, 0, ASKED_AGAIN)]
    assert answer_audits(audits, parts) == [C, D, E]

    aside = audits.choose_aside(tell({A: X, C: X}, {C: X, D: Y, E: Y}))
    assert aside is not None
    assert (aside.member, aside.others) == (C, (D, E))
    assert "the gradients of part 0" in aside.why
    assert not parts.audits


def test_member_that_tells_another_digest_once_it_is_caught_is_put_aside() -> None:
    audits, parts = begin_dispute(Y, X)
    answer_audits(audits, parts)

    aside = audits.choose_aside(tell({A: X, C: X}, {C: X, D: X, E: X}))

    assert aside is not None
    assert aside.member == C


def test_wrong_audit_of_a_part_that_is_counted_right_puts_nobody_aside() -> None:
    audits, parts = begin_dispute(X, Y)
    answer_audits(audits, parts)
    manifests = tell({A: X, C: X}, {C: X, D: X, E: X})

    assert audits.choose_aside(manifests) is None
    assert not audits.order_disputed(manifests, parts)
    assert not parts.audits


def test_disputed_part_is_judged_when_all_have_computed_it_again() -> None:
    audits, parts = begin_dispute(Y, X)
    answer_audits(audits, parts, E)
    manifests = tell({A: X, C: Y}, {C: Y, D: X})

    assert audits.choose_aside(manifests) is None
    assert not audits.order_disputed(manifests, parts)
    assert answer_audits(audits, parts) == [E]
    aside = audits.choose_aside(tell({A: X, C: Y}, {C: Y, D: X, E: X}))
    assert aside is not None
    assert aside.member == C


def test_tie_puts_nobody_aside_and_is_told_once() -> None:
    audits, parts = begin_dispute(Y, X)
    manifests, found = tell({A: X, C: Y}, {C: Y, D: X}), list[DisputedPart]()
    for _ in range(3):
        answer_audits(audits, parts, E)
        assert audits.choose_aside(manifests) is None
        found = audits.order_disputed(manifests, parts)

    assert not parts.audits
    assert list_open(found) == [(1, 0, UNSETTLED)]
    assert audits.choose_aside(manifests) is None
    assert not audits.order_disputed(manifests, parts)


def test_member_that_does_not_compute_again_is_judged_by_what_most_have() -> None:
    audits, parts = begin_dispute(Y, X)
    manifests = tell({A: X, C: Y}, {D: X, E: X})
    for _ in range(2):
        answer_audits(audits, parts, C)
        assert audits.choose_aside(manifests) is None
        audits.order_disputed(manifests, parts)
    answer_audits(audits, parts, C)

    aside = audits.choose_aside(manifests)

    assert aside is not None
    assert (aside.member, aside.others) == (C, (D, E))


def test_only_who_has_counted_a_part_leaves_wrong_numbers_when_it_goes_before_the_judgement() -> (
    None
):
    audits, _ = begin_dispute(Y, X)
    manifests = tell({A: X, C: Y}, {D: X})

    assert audits.has_in_dispute([C, A], manifests)
    assert not audits.has_in_dispute([A, D, E], manifests)
    again = tell({A: X, C: Y}, {D: X}, COMMIT.make_restarted())
    assert not audits.has_in_dispute([C], again)


def test_dispute_is_over_when_the_update_begins_again() -> None:
    audits, parts = Audits(1.0, random.Random(0)), UpdateParts(1, [[A, B], [C, D, E]])
    told = {A: X, C: X}, {D: Y}
    audits.order_disputed(tell(*told), parts)
    again = tell(*told, COMMIT.make_restarted())

    assert audits.choose_aside(again) is None
    assert list_open(audits.order_disputed(again, parts)) == [(1, 0, ASKED_AGAIN)]


@pytest.mark.parametrize(
    ("audited", "difference"),
    [
        # What most have is right, whether the one that counted the part has it or not.
        ({C: X, D: Y, E: X}, Difference((C, E), (D,), False)),
        ({C: X, D: Y, E: Y}, Difference((D, E), (C,), False)),
        # One that computes something else the second time was wrong the first time.
        ({C: Y, D: Y}, Difference((D,), (C,), False)),
        # Of two that insist, nothing shows which one is right.
        ({C: X, D: Y}, Difference((C,), (D,), True)),
        # Of two that differ again, the one that insists is right.
        ({C: Z, D: Y}, Difference((D,), (C,), False)),
    ],
)
def test_judgement_depends_on_digests_and_roster_alone(
    audited: dict[MemberId, bytes], difference: Difference
) -> None:
    assert judge_part(tell({C: X}, audited), 1, 0, {C: X}) == difference
    later = {A: X, **dict(reversed(audited.items()))}
    assert judge_part(tell({C: X}, later), 1, 0, {C: X}) == difference
