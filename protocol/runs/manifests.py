"""The answers of members to the leader of a run, and which members it keeps: pure decisions."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean

from ..ids import MemberId, find_peer_id
from ..limits import MAX_RUN_MEMBERS
from .commits import Commit, read_commit
from .decisions import Decision, Member
from .update_parts import (
    Difference,
    MemberManifest,
    UpdateParts,
    find_difference,
)


@dataclass(frozen=True)
class Manifests:
    """The manifests of all members of a decision. None: a member did not answer in time.

    >>> a, b = Member(MemberId("a"), 0), Member(MemberId("b"), 1)
    >>> commit = Commit(founder="a", compute_class="c1" * 32, update=0)
    >>> decision = Decision(0, bytes(32), (a, b), commit.encode())
    >>> manifests = Manifests(decision, 2, {a.id: MemberManifest(0, is_ready=True), b.id: None})
    >>> manifests.ready, manifests.find_lacking().partition(",")[0]
    ([['a'], []], 'a majority: 1 of 2 peers answer')
    """

    decision: Decision
    num_stages: int
    told: Mapping[MemberId, MemberManifest | None]

    @cached_property
    def answering(self) -> dict[MemberId, MemberManifest]:
        """The manifests of members that answer."""
        return {member: each for member, each in self.told.items() if each is not None}

    @cached_property
    def leaving(self) -> set[MemberId]:
        """Members that want to leave."""
        return {member for member, told in self.answering.items() if told.is_leaving}

    @cached_property
    def commit(self) -> Commit:
        """How far the run has come."""
        return read_commit(self.decision)

    @cached_property
    def ready(self) -> list[list[MemberId]]:
        """Of each stage, the members that compute parts of the update that is under way."""
        update = self.commit.update
        told = self.answering.items()
        good = {one for one, each in told if each.is_ready and each.update == update}
        return [
            [
                member.id
                for member in self.decision.members
                if member.stage == stage and member.id in good
            ]
            for stage in range(self.num_stages)
        ]

    @cached_property
    def all_ready(self) -> set[MemberId]:
        """The ready members of all stages."""
        return {member for stage in self.ready for member in stage}

    @cached_property
    def last_ready(self) -> set[MemberId]:
        """Members that are the only ready ones of their stage."""
        return {stage[0] for stage in self.ready if len(stage) == 1}

    @property
    def is_settling(self) -> bool:
        """Whether a member that is not ready still applies the last update."""
        return any(told.is_applying for told in self.missing.values())

    @cached_property
    def missing(self) -> dict[Member, MemberManifest]:
        """Members that answer and are not ready: most download the state of their stage."""
        told = [(one, self.answering.get(one.id)) for one in self.decision.members]
        return {one: each for one, each in told if each and one.id not in self.all_ready}

    def find_lacking(self) -> str | None:
        """Return what the run waits for; None: it can go on."""
        members, answering = self.decision.members, self.answering
        if len(answering) < (least := self.decision.majority):
            answer = f"a majority: {len(answering)} of {len(members)} peers answer, {least} have to"
            return f"{answer}; unless others still run, the run is lost"
        has_begun = self.commit.update > 0  # before, a newcomer can compute each state
        able = {one for one, told in answering.items() if told.is_ready or told.is_applying}
        held = {one.stage for one in members if one.id in (able if has_begun else answering)}
        lacking = [stage for stage in range(self.num_stages) if stage not in held]
        if lacking and not has_begun:
            return f"a peer for stage {' and one for stage '.join(map(str, lacking))}"
        if lacking:
            holders = [one.id for one in members if one.stage == lacking[0]]
            silent = [f"…{find_peer_id(one)[-8:]}" for one in holders if one not in answering]
            loss = f": unless {' or '.join(silent)} still runs, the run is lost" if silent else ""
            return f"a peer that has the state of stage {lacking[0]}{loss}"
        for one in sorted(self.last_ready):  # neither can be left out
            for other in self.last_ready.intersection(self.answering[one].unreachable):
                names = f"…{find_peer_id(one)[-8:]} and …{find_peer_id(other)[-8:]}"
                return f"a connection between the peers {names}"
        return None

    def describe_missing(self) -> str | None:
        """Return which member a commit waits for that is not ready; None: it waits for none."""
        for member, told in self.missing.items():
            had = told.describe_download()
            return f"a peer of stage {member.stage} to get its state: it has {had}"
        return None

    def describe_failing(self, failing: Collection[MemberId]) -> str | None:
        """Return what the run waits for where such a member cannot be put aside: `choose_aside`."""
        for one in sorted(self.last_ready.intersection(failing)):
            return f"the peer …{find_peer_id(one)[-8:]} to sum its gradients, or one in its place"
        return None

    def list_parts(self, num_parts: int) -> UpdateParts:
        """Return what is counted of the update, and what is left to do."""
        growing = {member.stage for member in self.missing}
        seconds = {member: told.part_seconds for member, told in self.answering.items()}
        parts = UpdateParts(num_parts, self.ready, self.leaving, seconds, growing)
        for member, told in self.answering.items():
            parts.note(member, told.counted, told.refused)
        return parts

    def list_queue_seconds(self) -> tuple[float, ...]:
        """Return how long a part waits at each stage, on average over its ready members."""
        waits = [[self.answering[one].part_wait_seconds for one in stage] for stage in self.ready]
        return tuple(fmean(stage) if stage else 0.0 for stage in waits)

    def plan_routes(
        self, indices: Iterable[int], rng: random.Random
    ) -> list[tuple[int, list[MemberId]]]:
        """Return a ready member of each stage for each of these held-out parts, all in turn.

        They are paired by lot: of two that do not reach each other, others get the part next time.
        """
        mates = [rng.sample(stage, len(stage)) for stage in self.ready]
        return [(index, [stage[index % len(stage)] for stage in mates]) for index in indices]

    def choose_members(self, aside: MemberId | None = None) -> list[Member]:
        """Return the members that answer, and have the state that most of their stage have.

        One that is put aside is left out, too, and those that leave once their parts are counted by
        nobody. A stage keeps its members where none that answers has its state, which would be lost
        without them.
        """
        chosen: set[MemberId] = set()
        for stage in range(self.num_stages):
            holders = [one.id for one in self.decision.members if one.stage == stage]
            states = self._list_states(stage)
            if not states:
                chosen.update(holders)
                continue
            able = {*find_difference(states).equal, *(self.answering.keys() - states.keys())}
            good = [one for one in holders if one in able]
            chosen.update([one for one in good if one != aside] or good)
        idle = {member for member in self.leaving if not self.answering[member].counted}
        members = [member for member in self.decision.members if member.id in chosen]
        return choose_without_leaving(members, idle, self.all_ready)

    def find_differences(self) -> dict[int, Difference]:
        """Return the stages whose members have other states, which should be equal."""
        found = ((stage, self._list_states(stage)) for stage in range(self.num_stages))
        compared = {stage: find_difference(states) for stage, states in found}
        return {stage: one for stage, one in compared.items() if one.others}

    def _list_states(self, stage: int) -> dict[MemberId, bytes]:
        """Return the digests that members of a stage tell, in the order of the roster."""
        return {
            one.id: told.state
            for one in self.decision.members
            if one.stage == stage and (told := self.told[one.id]) and told.is_ready
        }

    def choose_with_newcomer(
        self, members: Sequence[Member], newcomer: MemberId, stages: set[int]
    ) -> list[Member]:
        """Return the members with a newcomer, in that of its stages that has the fewest.

        It has to wait while its peer has another process among them, except for one that does not
        answer, and while too many have no state yet: if all these ended at once, the others have to
        be a majority. Before the first update nothing would be lost.
        """
        peer_id, ready = find_peer_id(newcomer), self.all_ready
        gone = {one for one, told in self.told.items() if told is None}
        others = [one for one in members if one.id not in gone or find_peer_id(one.id) != peer_id]
        is_known = any(find_peer_id(one.id) == peer_id for one in others)
        num_ready = sum(one.id in ready for one in others)
        num_new = sum(one.id not in ready and one.id not in gone for one in others)
        is_safe = not self.commit.update or not num_new or num_ready > (len(others) + 1) // 2
        able = stages & set(range(self.num_stages))
        is_full = len(others) >= MAX_RUN_MEMBERS
        if is_known or is_full or not is_safe or not able:
            return list(members)
        held = Counter(one.stage for one in others)
        stage = min(able, key=lambda each: (held[each], each))
        return [*others, Member(newcomer, stage)]


def choose_without_leaving(
    members: Sequence[Member], leaving: Collection[MemberId], holders: Collection[MemberId]
) -> list[Member]:
    """Return the members without those that leave, but for one of each stage that nobody else
    holds the state of.
    """
    keepers = dict[int | None, MemberId]()
    for member in sorted(members, key=lambda each: each.id in leaving):
        if member.id in holders:
            keepers.setdefault(member.stage, member.id)
    return [
        each
        for each in members
        if each.id not in leaving or keepers.get(each.stage, each.id) == each.id
    ]


@dataclass(frozen=True)
class Aside:
    """A member to put aside."""

    member: MemberId
    others: tuple[MemberId, ...]
    """Those that complain about it, or that it complains about."""
    why: str


def choose_aside(manifests: Manifests, failing: Collection[MemberId] = ()) -> Aside | None:
    """Return a member that has to go, by what ready members complain about each other; where nobody
    does, one of those that are `failing`: attempts to sum fail for them again and again.

    A member that complains is no better a witness than the other: of two that cannot read from each
    other, either may be the one without a network, and one that accuses may lie. So a complaint
    counts for both. The member with complaints of and about most others goes; of equal ones the
    accused, else the later one. The last ready member of a stage never goes: of two that cannot
    read from each other, the other one goes in its place.
    """
    ready, last_ready, told = manifests.all_ready, manifests.last_ready, manifests.answering
    ranks = {member: rank for rank, member in enumerate(manifests.decision.roster)}
    accusations = {(by, one) for by in ready for one in told[by].accused if one in ready - {by}}
    cuts = {(by, one) for by in ready for one in told[by].unreachable if one in ready - {by}}
    accused = {about for _, about in accusations}
    others = defaultdict[MemberId, set[MemberId]](set)
    for by, about in (*accusations, *cuts):
        others[by].add(about)
        others[about].add(by)

    def rate(member: MemberId) -> tuple[int, bool, int]:
        return len(others[member]), member in accused, ranks[member]

    losers = {max(pair, key=rate) for pair in accusations}
    for first, last in (sorted(pair, key=rate) for pair in cuts):
        losers.add(first if last in last_ready else last)
    if not losers:
        losers = ready.intersection(failing)
    chosen = max(losers - last_ready, key=rate, default=None)
    if chosen is None:
        return None
    named = sorted(others[chosen], key=lambda one: ranks[one])
    names = ", ".join(f"…{find_peer_id(other)[-8:]}" for other in named)
    if not named:
        why = "again and again, it did not sum its gradients"
    elif not any(chosen in pair for pair in accusations):
        why = f"it and {names} cannot read from each other"
    elif chosen in accused:
        why = f"it sent numbers that are no gradients, as {names} told"
    else:
        why = f"it complains about more peers than any other: {names}"
    return Aside(chosen, tuple(named), why)
