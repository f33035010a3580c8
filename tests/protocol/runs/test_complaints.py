"""Who is put aside when members complain about each other."""

from __future__ import annotations

import pytest

from shoal.protocol.ids import MemberId
from shoal.protocol.runs.commits import Commit
from shoal.protocol.runs.decisions import Decision, Member
from shoal.protocol.runs.manifests import Manifests, choose_aside
from shoal.protocol.runs.update_parts import MemberManifest

COMMIT = Commit(founder="a", compute_class="c1" * 32, update=0)
Told = dict[str, str]
"""Whom members complain about, by their letters."""


def tell(*stages: str, new: str = "", **complaints: Told) -> Manifests:
    """Return manifests of members named by letters, stage by stage; the roster is alphabetical.

    `complaints` are about `links` or `accused` members.
    """
    links, accused = complaints.get("links", {}), complaints.get("accused", {})
    members = sorted(Member(name(each), number) for number, s in enumerate(stages) for each in s)
    told = {
        member.id: MemberManifest(
            0,
            is_ready=member.id not in map(name, new),
            unreachable=tuple(map(name, links.get(member.id[0], ""))),
            accused=tuple(map(name, accused.get(member.id[0], ""))),
        )
        for member in members
    }
    return Manifests(Decision(0, bytes(32), tuple(members), COMMIT.encode()), len(stages), told)


def tell_of(kind: str, stage: str, **complaints: str) -> Manifests:
    links, accused = (complaints, {}) if kind == "links" else ({}, complaints)
    return tell(stage, links=links, accused=accused)


def name(letter: str) -> MemberId:
    return MemberId(f"{letter}/1")


def choose(manifests: Manifests) -> str:
    aside = choose_aside(manifests)
    return "" if aside is None else aside.member.removesuffix("/1")


def test_nobody_is_put_aside_without_a_complaint() -> None:
    assert choose(tell("ab", "c")) == ""


@pytest.mark.parametrize("links", [{"a": "b"}, {"b": "a"}, {"a": "b", "b": "a"}])
@pytest.mark.parametrize("mates", ["ab", "abc"])
def test_later_one_of_two_that_cannot_talk_is_put_aside(mates: str, links: Told) -> None:
    assert choose(tell(mates, links=links)) == "b"


@pytest.mark.parametrize(
    "links", [{"a": "bc"}, {"b": "a", "c": "a"}, {"a": "bc", "b": "a", "c": "a"}]
)
def test_member_that_most_cannot_talk_to_is_put_aside(links: Told) -> None:
    assert choose(tell("abc", links=links)) == "a"


def test_last_ready_member_of_a_stage_stays_and_the_other_one_goes() -> None:
    assert choose(tell("ab", "c", links={"a": "c"})) == "a"
    assert choose(tell("a", "cd", links={"a": "c"})) == "c"
    assert choose(tell("a", "cd", links={"c": "a"}, new="d")) == ""
    assert choose(tell("a", "c", links={"a": "c"})) == ""


def test_complaints_of_and_about_members_without_the_state_do_not_count() -> None:
    assert choose(tell("abc", links={"c": "ab"}, new="c")) == ""
    assert choose(tell("abc", links={"a": "c"}, new="c")) == ""
    assert choose(tell("ab", links={"a": "ax"})) == ""


def test_accused_member_is_put_aside_unless_it_is_the_last_of_its_stage() -> None:
    assert choose(tell("a", "bc", accused={"a": "b"})) == "b"
    assert choose(tell("a", "bc", accused={"b": "c", "c": "b"})) == "c"
    assert choose(tell("ad", "b", accused={"a": "b"})) == ""


@pytest.mark.parametrize("kind", ["links", "accused"])
def test_member_that_complains_about_all_its_mates_is_put_aside_itself(kind: str) -> None:
    assert choose(tell_of(kind, "abcd", a="bcd")) == "a"
    assert choose(tell_of(kind, "abcd", d="abc")) == "d"


def test_reason_names_the_others() -> None:
    for manifests, why in (
        (tell("abc", links={"a": "bc"}), "it and …b, …c cannot read from each other"),
        (tell("abc", accused={"b": "a"}), "it sent numbers that are no gradients, as …b told"),
        (
            tell("abc", accused={"a": "bc"}),
            "it complains about more peers than any other: …b, …c",
        ),
    ):
        aside = choose_aside(manifests)
        assert aside is not None
        assert (aside.member, aside.why) == ("a/1", why)
