"""Who stays a member of a run, and who becomes one, by what the members tell."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shoal.protocol.ids import MemberId
from shoal.protocol.runs.commits import Commit
from shoal.protocol.runs.decisions import Decision, Member
from shoal.protocol.runs.manifests import Manifests
from shoal.protocol.runs.update_parts import Difference, MemberManifest

UPDATE = 3
COMMIT = Commit(founder="a", compute_class="c1" * 32, update=UPDATE, sums=("0" * 64, "1" * 64))
READY = MemberManifest(UPDATE, is_ready=True, state=b"state")
FETCHING = MemberManifest(0, is_ready=False)


def tell(commit: Commit = COMMIT, **told: MemberManifest | None) -> Manifests:
    """Return manifests of members that are named by a letter and their stage: a0, b1, …"""
    members = tuple(Member(MemberId(f"{name}/1"), int(name[-1])) for name in told)
    decision = Decision(7, bytes(32), members, commit.encode())
    by_id = {member.id: one for member, one in zip(members, told.values(), strict=True)}
    return Manifests(decision, 2, by_id)


def name_good(manifests: Manifests) -> list[str]:
    return [member.id.removesuffix("/1") for member in manifests.choose_members()]


def let_in(manifests: Manifests, newcomer: str, *stages: int) -> list[str]:
    """Return who has come, and at which stage, and who had to go."""
    before = manifests.choose_members()
    after = manifests.choose_with_newcomer(before, MemberId(newcomer), set(stages or (0, 1)))
    come = [f"+{one.id} {one.stage}" for one in after if one not in before]
    return come + [f"-{one.id}" for one in before if one not in after]


def test_members_that_do_not_answer_are_left_out() -> None:
    assert name_good(tell(a0=READY, b1=READY, c0=None, d1=READY)) == ["a0", "b1", "d1"]


def test_last_members_of_a_stage_are_kept() -> None:
    assert name_good(tell(a0=READY, b1=None, c0=READY, d1=None)) == ["a0", "b1", "c0", "d1"]


def test_only_holder_of_a_state_is_kept_while_its_mate_downloads() -> None:
    manifests = tell(a0=None, b0=FETCHING, c1=READY)

    assert name_good(manifests) == ["a0", "b0", "c1"]
    lacking = "a peer that has the state of stage 0: unless …a0 still runs, the run is lost"
    assert manifests.find_lacking() == lacking


def test_member_whose_state_differs_is_left_out_and_one_without_a_state_is_not() -> None:
    other = replace(READY, state=b"other")

    assert name_good(tell(a0=READY, b1=READY, c0=READY, d0=other)) == ["a0", "b1", "c0"]
    assert name_good(tell(a0=READY, b1=READY, c0=FETCHING)) == ["a0", "b1", "c0"]


def test_stages_whose_members_have_other_states_are_told() -> None:
    other = replace(READY, state=b"other")

    manifests = tell(a0=READY, b1=other, c1=READY, d0=READY, e1=FETCHING, f0=None)

    names = MemberId("b1/1"), MemberId("c1/1")
    assert manifests.find_differences() == {1: Difference(names[:1], names[1:], is_tie=True)}


def test_member_that_is_put_aside_is_left_out() -> None:
    manifests = tell(a0=READY, b1=READY, c1=READY)

    assert [one.id for one in manifests.choose_members(MemberId("b1/1"))] == ["a0/1", "c1/1"]


def test_all_but_one_of_a_stage_may_leave_at_once() -> None:
    leaving = replace(READY, is_leaving=True)

    assert name_good(tell(a0=leaving, b1=leaving, c0=leaving, d1=READY, e0=leaving)) == ["a0", "d1"]


@pytest.mark.parametrize(
    ("leaving", "mate", "good"),
    [
        (READY, READY, ["a0", "b1"]),
        (replace(READY, counted={1: bytes(8)}), READY, ["a0", "b1", "c0"]),
        (READY, FETCHING, ["a0", "b1", "c0"]),
    ],
    ids=["at once", "not with parts that it has counted", "not before a mate has the state"],
)
def test_member_that_leaves_goes(
    leaving: MemberManifest, mate: MemberManifest, good: list[str]
) -> None:
    manifests = tell(a0=mate, b1=READY, c0=replace(leaving, is_leaving=True))

    assert name_good(manifests) == good


def test_run_lacks_a_majority_or_a_stage() -> None:
    assert tell(a0=READY, b1=replace(FETCHING, is_applying=True)).find_lacking() is None
    assert tell(a0=READY, b1=FETCHING).find_lacking() == "a peer that has the state of stage 1"
    lost = tell(a0=READY, b0=READY, c1=None, d0=READY, e1=None).find_lacking()
    text = "a peer that has the state of stage 1: unless …c1 or …e1 still runs, the run is lost"
    assert lost == text
    few = "a majority: 1 of 3 peers answer, 2 have to; unless others still run, the run is lost"
    assert tell(a0=READY, b1=None, c0=None).find_lacking() == few


def test_run_lacks_a_connection_between_members_of_which_neither_can_be_left_out() -> None:
    cut_off = replace(READY, unreachable=(MemberId("b1/1"),))

    lacking = tell(a0=cut_off, b1=READY).find_lacking()
    assert lacking == "a connection between the peers …a0 and …b1"
    assert tell(a0=cut_off, b1=READY, c1=READY).find_lacking() is None


def test_member_that_has_the_sums_is_about_to_be_ready() -> None:
    applying = MemberManifest(UPDATE - 1, is_ready=False, is_applying=True)

    manifests = tell(a0=READY, b1=applying)

    assert manifests.is_settling
    assert manifests.ready == [["a0/1"], []]
    assert not tell(a0=READY, b1=FETCHING).is_settling
    assert not tell(a0=READY, b1=replace(READY, is_applying=True)).is_settling


def test_members_that_answer_and_are_not_ready_are_missing() -> None:
    idle, begun = replace(READY, is_ready=False), replace(FETCHING, state=b"old", fetched_bytes=1)

    manifests = tell(a0=READY, b0=None, c1=idle, d1=begun, e1=FETCHING)

    missing = {one.id: told.has_begun for one, told in manifests.missing.items()}
    assert missing == {"c1/1": False, "d1/1": True, "e1/1": True}


def test_newcomer_gets_that_of_its_stages_which_has_the_fewest_members() -> None:
    manifests = tell(a0=READY, b1=READY, c0=READY)

    assert let_in(manifests, "new/1", 0) == ["+new/1 0"]
    assert let_in(manifests, "new/1") == ["+new/1 1"]
    assert let_in(manifests, "new/1", 0, 1) == ["+new/1 1"]
    assert let_in(manifests, "new/1", 5) == []


def test_peer_is_a_member_once() -> None:
    manifests = tell(a0=READY, b1=READY, c0=READY)

    assert let_in(manifests, "a0/2", 1) == []
    assert let_in(manifests, "a0/1", 1) == []


def test_peer_that_was_started_again_replaces_the_process_that_has_ended() -> None:
    last_of_its_stage = tell(a0=READY, b0=READY, c1=None)

    assert let_in(last_of_its_stage, "c1/2", 1) == ["+c1/2 1", "-c1/1"]


def test_members_with_a_state_are_a_majority_whoever_comes() -> None:
    assert let_in(tell(a0=READY), "new/1") == ["+new/1 1"]
    assert let_in(tell(a0=READY, b1=FETCHING), "new/1") == []
    assert let_in(tell(a0=READY, b1=READY, c0=FETCHING), "new/1") == []
    assert let_in(tell(a0=READY, b1=READY, c0=READY, d1=FETCHING), "new/1") == ["+new/1 0"]


def test_all_newcomers_are_let_in_before_the_first_update() -> None:
    begun = Commit(founder="a", compute_class="c1" * 32, update=0)

    assert let_in(tell(begun, a0=MemberManifest(0, is_ready=True), b1=FETCHING), "new/1") == [
        "+new/1 0"
    ]


def test_part_is_refused_when_no_member_of_the_stage_is_left_that_may_compute_it() -> None:
    refusing = replace(READY, refused=frozenset([2]))
    alone = tell(a0=READY, b1=refusing)
    with_a_dead_one = tell(a0=READY, b1=refusing, c1=None)
    with_a_mate = tell(a0=READY, b1=refusing, c1=READY)
    with_a_newcomer = tell(a0=READY, b1=refusing, c1=FETCHING)

    found = [
        each.list_parts(4).find_refused()
        for each in (alone, with_a_dead_one, with_a_mate, with_a_newcomer)
    ]

    assert found == [(2, 1), (2, 1), None, None]
