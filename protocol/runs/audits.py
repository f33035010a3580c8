"""Audits: parts that a second replica of their stage computes as well, and what that shows.

A member tells digests of all parts that it has computed, and does not know which of them are
audited: the leader draws these at random, once they are counted. Where digests differ, all replicas
of the stage compute the part again, those that have done so as well, as a fault of memory does not
come twice. What most of them have then is right; of equally many, what the first one on the roster
has. So nothing depends on the order in which anything arrives.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence

from ..ids import MemberId
from .manifests import Aside, Manifests
from .update_parts import Difference, PartOrder, UpdateParts, find_equal


class Audits:
    """The audits of the update under way; owned by the leader of the run."""

    def __init__(self, fraction: float, rng: random.Random) -> None:
        """Audit this fraction of the parts of each stage. Members cannot foretell `rng`."""
        self._fraction = fraction
        self._rng = rng
        self._begun: tuple[int, int] | None = None
        """The update, and how often that was begun again."""
        self._disputed = set[tuple[int, int]]()
        """The stages and parts that all replicas were asked to compute again."""

    def draw(self, order: PartOrder, parts: UpdateParts) -> None:
        """Order audits of a part that was just counted, at stages that are drawn."""
        if order.is_audit or order.without is not None:
            return
        first_stage = len(parts.stages) - len(order.route)
        for stage in range(first_stage, order.last_stage + 1):
            if self._rng.random() < self._fraction:
                for auditor in parts.list_auditors(stage, order.index)[:1]:
                    parts.order_audit(stage, order.index, auditor)

    def order_disputed(self, manifests: Manifests, parts: UpdateParts) -> list[tuple[int, int]]:
        """Have all replicas compute again, once, what they have computed differently.

        Returns the stages and parts that they have not been asked for before.
        """
        if self._begun != _find_begun(manifests):
            self._begun = _find_begun(manifests)
            self._disputed.clear()
        disputed = [one for one in _list_disputed(manifests) if one not in self._disputed]
        self._disputed.update(disputed)
        for stage, index in disputed:
            for member in manifests.ready[stage]:
                parts.order_audit(stage, index, member)
        return disputed

    def choose_aside(self, manifests: Manifests) -> Aside | None:
        """Return a member that has to go, as it computes other gradients than it should.

        What it has sent to other stages is wrong as well, so the update has to begin again.
        """
        if self._begun != _find_begun(manifests):
            return None
        for stage, index in _list_disputed(manifests):
            if (stage, index) in self._disputed:
                difference = judge_part(manifests, stage, index)
                others = [one for one in difference.others if one not in manifests.last_ready]
                if others:
                    why = difference.describe(f"gradients of part {index}", False)
                    return Aside(others[-1], difference.equal, why)
        return None


def judge_part(manifests: Manifests, stage: int, index: int) -> Difference:
    """Return which members of a stage tell the right digest of a part, and which have told others.

    Of each member, the one that it has computed last counts as its vote.
    """
    told = _list_digests(manifests, manifests.ready[stage])[index]
    votes = {member: digests[-1] for member, digests in told.items()}
    equal = find_equal(votes)
    right = next(digest for member, digest in votes.items() if member in equal)
    wrong = tuple(member for member, digests in told.items() if set(digests) != {right})
    good = tuple(member for member in votes if member in equal and member not in wrong)
    answers = list(votes.values())
    is_tie = any(answers.count(other) == len(equal) for other in set(answers) - {right})
    return Difference(good or tuple(equal), wrong, is_tie)


def _find_begun(manifests: Manifests) -> tuple[int, int]:
    return manifests.commit.update, manifests.commit.num_restarts


def _list_disputed(manifests: Manifests) -> list[tuple[int, int]]:
    """Return the stages and parts of which ready members tell more than one digest."""
    return [
        (stage, index)
        for stage, members in enumerate(manifests.ready)
        for index, told in sorted(_list_digests(manifests, members).items())
        if len({digest for digests in told.values() for digest in digests}) > 1
    ]


def _list_digests(
    manifests: Manifests, members: Sequence[MemberId]
) -> dict[int, dict[MemberId, list[bytes]]]:
    """Return, for each part, the digests that these members tell: of the audit comes last."""
    told = defaultdict[int, dict[MemberId, list[bytes]]](dict)
    for member in members:
        manifest = manifests.answering[member]
        for digests in (manifest.digests, manifest.audited):
            for index, digest in digests.items():
                told[index].setdefault(member, []).append(digest)
    return told
