"""Audits: parts that a second replica of their stage computes as well, and what that shows.

A member tells digests of all parts that it has computed, and does not know which of them are
audited: the leader draws these at random, once they are counted. Where digests differ, all replicas
of the stage compute the part again, those that have done so as well, as a fault of memory does not
come twice. The digest of most of them is right. At a tie, only members that told the same digest
both times count; if it is a tie still, nothing shows which member is wrong, and none is put aside.
So the order in which answers arrive decides nothing.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ..ids import MemberId
from .manifests import Aside, Manifests
from .update_parts import Difference, PartOrder, UpdateParts, find_difference

_MOST_TRIES = 3
"""How many audits of a disputed part may fail at a member before it is judged without that one."""

_AUDIT_TRIPS = 2
"""Once all parts are counted, an audit may take so many times as long as a part takes through all
stages: the slower of two replicas may need more than the usual time for one stage.
"""

ASKED_AGAIN = "one of which is wrong: all compute them again"
UNSETTLED = "and nothing shows which of them are right: the update counts as it is"


@dataclass(frozen=True)
class DisputedPart:
    """What members of a stage tell differently of a part, and what follows."""

    stage: int
    index: int
    difference: Difference
    follows: str


@dataclass
class _Dispute:
    """A part that all replicas of a stage compute again."""

    counted: Mapping[MemberId, bytes]
    """What those told that had counted it when the dispute began. One that sees that it is caught
    may tell another digest later.
    """
    answered: set[MemberId] = field(default_factory=set[MemberId])
    """Those that have computed it again."""
    failures: Counter[MemberId] = field(default_factory=Counter[MemberId])
    is_over: bool = False
    """Whether it has ended without anybody that has to go."""

    def list_missing(self, members: Sequence[MemberId]) -> list[MemberId]:
        """Return those that still have to compute the part."""
        tried = self.answered.union(one for one, num in self.failures.items() if num >= _MOST_TRIES)
        return [one for one in members if one not in tried]


class Audits:
    """The audits of the update under way; owned by the leader of the run."""

    def __init__(self, fraction: float, rng: random.Random) -> None:
        """Audit this fraction of the parts of each stage. Members cannot foretell `rng`."""
        self._fraction = fraction
        self._rng = rng
        self._begun: tuple[int, int] | None = None
        """The update, and how often that was begun again."""
        self._disputes: dict[tuple[int, int], _Dispute] = {}
        """Those of this update, by stage and part."""

    def draw(self, order: PartOrder, parts: UpdateParts) -> None:
        """Order audits of a part that was just counted, at stages that are drawn."""
        if order.is_audit or order.without is not None:
            return
        first_stage = len(parts.stages) - len(order.route)
        if first_stage:
            first_stage += 1  # the one before hands on what it had counted
        for stage in range(first_stage, order.last_stage + 1):
            if self._rng.random() < self._fraction:
                for auditor in parts.list_auditors(stage, order.index)[:1]:
                    parts.order_audit(stage, order.index, auditor)

    def order_disputed(self, manifests: Manifests, parts: UpdateParts) -> list[DisputedPart]:
        """Have all replicas compute again what they have computed differently, as far as they have
        not done so.

        Returns what differs and was not known, and what has ended with nobody that has to go: call
        `choose_aside` with the same manifests before.
        """
        if self._begun != _find_begun(manifests):
            self._begun = _find_begun(manifests)
            self._disputes.clear()
        found: list[DisputedPart] = []
        for stage, index in _list_disputed(manifests):
            if (stage, index) not in self._disputes:
                told = {one: manifests.answering[one].counted for one in manifests.ready[stage]}
                counted = {one: each[index] for one, each in told.items() if index in each}
                self._disputes[stage, index] = _Dispute(counted)
                difference = judge_part(manifests, stage, index, counted)
                found.append(DisputedPart(stage, index, difference, ASKED_AGAIN))
        for (stage, index), dispute in self._disputes.items():
            if dispute.is_over:
                continue
            missing = dispute.list_missing(manifests.ready[stage])
            for member in missing:
                parts.order_audit(stage, index, member)
            if not missing:
                dispute.is_over = True
                difference = judge_part(manifests, stage, index, dispute.counted)
                if difference.others:
                    found.append(DisputedPart(stage, index, difference, UNSETTLED))
        return found

    def note_audit(self, order: PartOrder, has_passed: bool) -> None:
        """Note that an order was carried out, or failed; what is no audit of a dispute is nothing
        here.
        """
        dispute = self._disputes.get((order.last_stage, order.index))
        if order.is_audit and dispute is not None:
            if has_passed:
                dispute.answered.add(order.auditor)
            else:
                dispute.failures[order.auditor] += 1

    def choose_seconds(
        self, parts: UpdateParts, under_way: Collection[PartOrder], usual_seconds: float
    ) -> float | None:
        """Return how long to wait for the next of these orders; None: for as long as it takes.

        Audits that were drawn must not hold up a commit, whoever computes them. `usual_seconds` is
        how long a part takes through all stages.
        """
        # Orders come first: while there are others, nobody has to look at thousands of parts.
        is_other = any(
            not order.is_audit or (order.last_stage, order.index) in self._disputes
            for order in (*under_way, *parts.audits)
        )
        return None if is_other or not parts.is_counted else _AUDIT_TRIPS * usual_seconds

    def has_in_dispute(self, members: Iterable[MemberId], manifests: Manifests) -> bool:
        """Return whether one of these members has counted a part that is not judged yet. If it
        goes, what it has sent to other stages must not stay.
        """
        gone = set(members)
        return self._begun == _find_begun(manifests) and any(
            not dispute.is_over and gone.intersection(dispute.counted)
            for dispute in self._disputes.values()
        )

    def choose_aside(self, manifests: Manifests) -> Aside | None:
        """Return a member that has to go, as it computes other gradients than it should.

        What it has sent to other stages is wrong as well, so the update has to begin again. Nobody
        has to before all have computed the part again, as far as they can, and nobody where nothing
        shows who is wrong.
        """
        if self._begun != _find_begun(manifests):
            return None
        for (stage, index), dispute in self._disputes.items():
            members = manifests.ready[stage]
            if dispute.is_over or not members or dispute.list_missing(members):
                continue
            difference = judge_part(manifests, stage, index, dispute.counted)
            is_known = dispute.answered.issuperset(members) or (
                2 * len(difference.equal) > len(members)  # whatever the others would tell
            )
            others = [one for one in difference.others if one not in manifests.last_ready]
            if others and is_known and not difference.is_tie:
                why = difference.describe(f"gradients of part {index}")
                return Aside(others[-1], difference.equal, why)
        return None


def judge_part(
    manifests: Manifests, stage: int, index: int, counted: Mapping[MemberId, bytes]
) -> Difference:
    """Return which members of a stage tell the right digest of a part, and which have told others.

    Of each member, the one that it has computed last counts as its vote; of equally many, only
    those count that have told no other. `counted` is what members told when they had counted it.
    """
    told = dict[MemberId, list[bytes]]()
    for member in manifests.ready[stage]:
        manifest = manifests.answering[member]
        each = counted.get(member), manifest.counted.get(index), manifest.audited.get(index)
        if digests := [digest for digest in each if digest is not None]:
            told[member] = digests
    votes = {member: digests[-1] for member, digests in told.items()}
    difference = find_difference(votes)
    if difference.is_tie:
        votes = {one: vote for one, vote in votes.items() if len(set(told[one])) == 1} or votes
        difference = find_difference(votes)
    if not votes:
        return difference
    right = votes[difference.equal[0]]
    wrong = tuple(member for member, digests in told.items() if set(digests) != {right})
    good = tuple(member for member in difference.equal if member not in wrong)
    return Difference(good or difference.equal, wrong, difference.is_tie)


def _find_begun(manifests: Manifests) -> tuple[int, int]:
    return manifests.commit.update, manifests.commit.num_restarts


def _list_disputed(manifests: Manifests) -> list[tuple[int, int]]:
    """Return the stages and parts of which ready members tell more than one digest."""
    disputed: list[tuple[int, int]] = []
    for stage, members in enumerate(manifests.ready):
        digests = defaultdict[int, set[bytes]](set)
        for told in map(manifests.answering.__getitem__, members):
            for index, digest in (*told.counted.items(), *told.audited.items()):
                digests[index].add(digest)
        disputed += [(stage, index) for index in sorted(digests) if len(digests[index]) > 1]
    return disputed
