"""What the members of a run tell its leader, and who stays a member by it: pure decisions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from ..ids import MemberId, find_peer_id
from ..limits import MAX_RUN_MEMBERS
from .commits import Commit, read_commit
from .decisions import Decision, Member
from .update_parts import UpdateParts, find_equal


@dataclass(frozen=True)
class MemberManifest:
    """A member's account of its current update: state, counted and refused parts."""

    update: int
    is_ready: bool
    """Whether it has the state of the newest decision that it knows."""
    is_applying: bool = False
    """Whether it will have it soon, as it has the sums."""
    parts: frozenset[int] = frozenset()
    """Those that it has counted."""
    refused: frozenset[int] = frozenset()
    """Those of which it computes numbers that are not finite."""
    state: bytes = b""
    """Digest of weights and optimizer before the update, equal at all members of a stage."""
    is_leaving: bool = False
    accused: Collection[MemberId] = ()
    """Members that have sent it what no honest one sends."""
    part_seconds: float = 0.0
    """How long it computes for a part; 0: not known yet."""
    fetched_bytes: int = 0
    state_bytes: int = 0
    """The size of the state of its stage that it downloads, of which it has so much; 0: none."""


@dataclass(frozen=True)
class Manifests:
    """What the members of a decision tell. None: a member did not answer in time.

    >>> a, b = Member(MemberId("a"), 0), Member(MemberId("b"), 1)
    >>> commit = Commit(compute_class="c1" * 32, update=0)
    >>> decision = Decision(0, bytes(32), (a, b), commit.encode())
    >>> manifests = Manifests(decision, 2, {a.id: MemberManifest(0, is_ready=True), b.id: None})
    >>> manifests.ready, manifests.find_lacking()
    ([['a'], []], 'a majority: 1 of 2 peers answer')
    """

    decision: Decision
    num_stages: int
    told: Mapping[MemberId, MemberManifest | None]

    @cached_property
    def answering(self) -> dict[MemberId, MemberManifest]:
        """What is told by those that answer."""
        return {member: each for member, each in self.told.items() if each is not None}

    @cached_property
    def leaving(self) -> set[MemberId]:
        """Members that want to leave."""
        return {member for member, told in self.answering.items() if told.is_leaving}

    @cached_property
    def accused(self) -> set[MemberId]:
        """Members that others accuse."""
        named = [(by, accused) for by, told in self.answering.items() for accused in told.accused]
        return {accused for by, accused in named if accused != by}

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

    @property
    def is_settling(self) -> bool:
        """Whether a member still applies the last update."""
        return any(told.is_applying for told in self.answering.values())

    @cached_property
    def fetching(self) -> dict[Member, MemberManifest]:
        """Members that download the state of their stage."""
        told = [(one, self.answering.get(one.id)) for one in self.decision.members]
        return {one: each for one, each in told if each and each.state_bytes and not each.is_ready}

    def find_lacking(self) -> str | None:
        """Return what the run waits for; None: it can go on."""
        decision, answering = self.decision, self.answering
        if len(answering) < decision.majority:
            return f"a majority: {len(answering)} of {len(decision.members)} peers answer"
        held = {member.stage for member in decision.members if member.id in answering}
        lacking = [stage for stage in range(self.num_stages) if stage not in held]
        return f"a peer for stage {lacking[0]}" if lacking else None

    def list_parts(self, num_parts: int) -> UpdateParts:
        """Return what is counted of the update, and what is left to do."""
        ready = {member for stage in self.ready for member in stage}
        growing = {
            member.stage
            for member in self.decision.members
            if member.id in self.answering and member.id not in ready
        }
        seconds = {member: told.part_seconds for member, told in self.answering.items()}
        parts = UpdateParts(num_parts, self.ready, self.leaving, seconds, growing)
        for member, told in self.answering.items():
            parts.note(member, told.parts, told.refused)
        return parts

    def choose_members(self) -> list[Member]:
        """Return the members that answer, and have the state that most of their stage have.

        Those that others accuse are left out, too, and those that leave once their parts are
        counted by nobody. A stage keeps its members where none answers: what they hold would be
        lost without them.
        """
        chosen: set[MemberId] = set()
        for stage in range(self.num_stages):
            holders = [one.id for one in self.decision.members if one.stage == stage]
            answering = [one for one in holders if one in self.answering]
            states = {
                one: self.answering[one].state for one in answering if self.answering[one].is_ready
            }
            equal = find_equal(states) if states else set[MemberId]()
            good = [one for one in answering if one in equal or one not in states]
            chosen.update([one for one in good if one not in self.accused] or good or holders)
        idle = {member for member in self.leaving if not self.answering[member].parts}
        ready = {member for stage in self.ready for member in stage}
        members = [member for member in self.decision.members if member.id in chosen]
        return choose_without_leaving(members, idle, ready)

    def choose_with_newcomer(
        self, members: Sequence[Member], newcomer: MemberId, stages: set[int]
    ) -> list[Member]:
        """Return the members with a newcomer, in that of its stages that has the fewest.

        It has to wait while its peer has another process among them, except for one that does not
        answer, and while too many have no state yet: if all these ended at once, the others have to
        be a majority. Before the first update nothing would be lost.
        """
        peer_id, ready = find_peer_id(newcomer), {one for stage in self.ready for one in stage}
        gone = {one for one, told in self.told.items() if told is None}
        others = [one for one in members if one.id not in gone or find_peer_id(one.id) != peer_id]
        is_known = any(find_peer_id(one.id) == peer_id for one in others)
        num_ready = sum(one.id in ready for one in others)
        num_new = sum(one.id not in ready and one.id not in gone for one in others)
        is_safe = not self.commit.update or not num_new or num_ready > (len(others) + 1) // 2
        able = stages & set(range(self.num_stages))
        is_full = len(others) >= MAX_RUN_MEMBERS
        if is_known or is_full or not is_safe or not able or newcomer in self.accused:
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
