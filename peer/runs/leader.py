"""Leads a run: has parts computed and summed, and updates committed.

It keeps nothing that counts: which parts are counted is asked of the members, and what is decided
is chosen by their majority. So another member goes on at any time, and two that lead at once cost
work, not correctness.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import secrets
from collections import Counter
from collections.abc import Collection, Sequence

from ...protocol.errors import LocalProtocolError
from ...protocol.ids import MemberId
from ...protocol.limits import MAX_RUN_MEMBERS
from ...protocol.messages.runs import (
    PartPass,
    PartPassed,
    PartsCounted,
    PartsFetch,
    Reduced,
    Reduction,
)
from ...protocol.net.tasks import cancel_all
from ...protocol.runs.commits import Commit, RefusedPart
from ...protocol.runs.decisions import Decision, Member
from ...protocol.runs.training_run import TrainingRun
from ...protocol.runs.update_parts import (
    PartOrder,
    UpdateParts,
    find_equal,
    pack_parts,
    unpack_parts,
)
from ..process.config import PeerEvent, Report, Waits
from .questions import FAILURES, make_question_id
from .run_decisions import RunDecisions

_logger = logging.getLogger(__name__)

_ATTEMPT_BYTES = 16

_PARTS_PER_MEMBER = 2
"""Parts under way per ready member: one that it computes, and one on its way or in a queue. Of the
time that a pipeline of four stages could use at most, 2 use 94 %, 3 use 95 % and 1 uses 83 % (64
parts, members that vary by 20 %). Members keep what belongs to a part until the commit in any case,
so more of them take no more memory but for graphs, which have a limit of their own.
"""

_Manifests = dict[MemberId, PartsCounted | None]


class Leader:
    """Leads a run as long as `run` runs."""

    def __init__(
        self,
        run: TrainingRun,
        num_stages: int,
        decisions: RunDecisions,
        pause_seconds: float,
        report: Report,
    ) -> None:
        self._run = run
        self._decisions = decisions
        self._num_stages = num_stages
        self._pause_seconds = pause_seconds
        self._report = report
        self._waits = Waits(report)
        self._leaving: set[MemberId] = set()
        """Members that want to leave."""
        self._rng = random.Random(decisions.member_id)
        self._joining: dict[MemberId, set[int]] = {}
        """Peers that want to become members, and the stages that they can hold."""

    def note_newcomer(self, member: MemberId, stages: set[int]) -> None:
        """Let a peer in at the next change of members, unless too many wait for it."""
        if len(self._joining) < MAX_RUN_MEMBERS:
            self._joining[member] = stages & set(range(self._num_stages))

    async def run(self) -> None:
        """Lead until we are no member any more, or one before us on the roster leads."""
        telling = asyncio.create_task(self._keep_telling())
        try:
            while self._decisions.stage is not None and not self._decisions.is_led:
                if not await self._step():
                    await asyncio.sleep(self._pause_seconds)
        finally:
            await cancel_all([telling])

    async def _keep_telling(self) -> None:
        """Show the members that somebody leads, however long an update takes."""
        while True:
            await asyncio.sleep(self._decisions.patience_seconds / 3)
            newest = self._decisions.newest
            question = PartsFetch(make_question_id(), newest.number)
            await asyncio.gather(*(self._ask_manifest(m, question) for m in newest.roster))

    @property
    def is_over(self) -> bool:
        """Whether all updates are committed."""
        commit = self._decisions.commit
        return commit.update >= self._run.num_updates or commit.refused is not None

    async def _step(self) -> bool:
        """Take one step; return whether the run came further by it."""
        before = self._decisions.newest
        manifests = await self._ask_manifests()
        self._leaving = _find_leaving(manifests)
        self._waits.note(None if self.is_over else self._find_lacking(before, manifests))
        if await self._change_members(manifests):
            return self._decisions.newest is not before
        stages = self._list_ready(manifests)
        if not all(stages):
            return False
        seconds = {m: told.part_seconds for m, told in manifests.items() if told is not None}
        parts = UpdateParts(self._run.parts_per_update, stages, self._leaving, seconds)
        for member, manifest in manifests.items():
            if manifest is not None:
                refused = unpack_parts(manifest.refused)
                parts.note(member, unpack_parts(manifest.parts), refused)
        update = self._decisions.commit.update
        if self.is_over:
            return False
        if (refused := parts.find_refused()) is not None:
            await self._stop(*refused)
            return False
        if not parts.is_complete:
            return await self._compute(update, parts)
        return await self._commit(update, parts)

    def _find_lacking(self, decision: Decision, manifests: _Manifests) -> str | None:
        """Return what the run waits for; None: it can go on."""
        answering = {member for member, manifest in manifests.items() if manifest is not None}
        held = {member.stage for member in decision.members if member.id in answering}
        if len(answering) < decision.majority:
            return f"a majority: {len(answering)} of {len(decision.members)} peers answer"
        lacking = [stage for stage in range(self._num_stages) if stage not in held]
        return f"a peer for stage {lacking[0]}" if lacking else None

    async def _stop(self, index: int, stage: int) -> None:
        """End the run for a part that all members of a stage refuse."""
        decision, commit = self._decisions.newest, self._decisions.commit
        refused = RefusedPart(index=index, stage=stage)
        stopped = commit.model_copy(update={"refused": refused})
        await self._decide(decision, decision.members, stopped)

    async def _ask_manifests(self) -> _Manifests:
        """Ask all members what they have counted; None: a member does not answer."""
        newest = self._decisions.newest
        question = PartsFetch(make_question_id(), newest.number)
        roster = newest.roster
        answers = await asyncio.gather(*(self._ask_manifest(m, question) for m in roster))
        manifests = dict(zip(roster, answers, strict=True))
        for member, manifest in manifests.items():
            if manifest is not None and manifest.number != newest.number:
                await self._decisions.send_newest(member)
        return manifests

    async def _ask_manifest(self, member: MemberId, question: PartsFetch) -> PartsCounted | None:
        try:
            answer = await self._decisions.members.ask(member, question)
            return answer.check_kind(PartsCounted)
        except FAILURES as error:
            _logger.info("%s does not tell what it has counted: %s", member, error)
            return None

    async def _change_members(self, manifests: _Manifests) -> bool:
        """Leave out members that do not answer, and take in those that wait.

        Returns whether the members have to change, or have changed.
        """
        decision = self._decisions.newest
        if set(manifests) != set(decision.roster):
            return True  # decided meanwhile
        left = self._choose_members(decision, manifests)
        for member in _find_accused(manifests).difference(each.id for each in left):
            self._report(PeerEvent("put_aside", {"member": member}))
        accused = _find_accused(manifests)  # put aside until the next update
        joined = [
            (newcomer, stages)
            for newcomer, stages in self._joining.items()
            if stages and newcomer not in {*decision.roster, *accused}
        ]
        self._joining.clear()
        if len(left) == len(decision.members) and not joined:
            return False
        for newcomer, stages in joined[: MAX_RUN_MEMBERS - len(left)]:
            left.append(Member(newcomer, _choose_stage(left, stages)))
        await self._decide(decision, left, self._decisions.commit)
        return True

    def _choose_members(self, decision: Decision, manifests: _Manifests) -> list[Member]:
        """Return the members that answer, and have the state that most of their stage have.

        Those that others accuse are left out, too.

        A stage keeps its members where none answers: what they hold would be lost without them.
        """
        chosen: list[Member] = []
        accused = _find_accused(manifests)
        for stage in range(self._num_stages):
            holders = [member for member in decision.members if member.stage == stage]
            states = {
                member.id: manifest.state
                for member in holders
                if (manifest := manifests[member.id]) is not None and manifest.is_ready
            }
            equal = find_equal(states) if states else set[MemberId]()
            good = [
                member
                for member in holders
                if manifests[member.id] is not None
                and (member.id in equal or member.id not in states)
            ]
            chosen += [one for one in good if one.id not in accused] or good or holders
        idle = {
            member
            for member in self._leaving
            if (manifest := manifests[member]) is not None and not unpack_parts(manifest.parts)
        }
        ready = {member for stage in self._list_ready(manifests) for member in stage}
        members = [member for member in decision.members if member in chosen]
        return _let_go(members, idle, ready - self._leaving)

    def _list_ready(self, manifests: _Manifests) -> list[list[MemberId]]:
        update = self._decisions.commit.update
        stages: list[list[MemberId]] = [[] for _ in range(self._num_stages)]
        for member in self._decisions.newest.members:
            manifest = manifests.get(member.id)
            if manifest is not None and manifest.is_ready and manifest.update == update:
                stages[member.stage].append(member.id)
        return stages

    async def _compute(self, update: int, parts: UpdateParts) -> bool:
        """Have parts computed until all are counted once, or something fails; return which."""
        most = _PARTS_PER_MEMBER * sum(map(len, parts.stages))
        under_way: dict[asyncio.Task[PartPassed], PartOrder] = {}
        has_failed = False
        try:
            while True:
                while not has_failed and not self._decisions.is_led and len(under_way) < most:
                    order = parts.choose_next(self._rng)
                    if order is None:
                        break
                    under_way[asyncio.create_task(self._order(update, order))] = order
                if not under_way:
                    return not has_failed
                done, _ = await asyncio.wait(under_way, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    order = under_way.pop(task)
                    try:
                        parts.note_passed(order, task.result().route)
                    except FAILURES as error:
                        _logger.info("part %d of update %d failed: %s", order.index, update, error)
                        has_failed = True
        finally:
            await cancel_all(under_way)

    async def _order(self, update: int, order: PartOrder) -> PartPassed:
        first, *route = order.route
        question = PartPass(
            make_question_id(),
            0,
            update,
            order.index,
            tuple(route),
            order.last_stage,
            order.without,
        )
        answer = await self._decisions.members.ask(first, question)
        return answer.check_kind(PartPassed)

    async def _commit(self, update: int, parts: UpdateParts) -> bool:
        """Have the gradients summed, and commit the update."""
        decision = self._decisions.newest
        attempt = secrets.token_bytes(_ATTEMPT_BYTES)
        stages = parts.stages
        tied = (*stages[0], *stages[-1]) if len(stages) > 1 else ()
        orders = {
            member: Reduction(
                make_question_id(), update, attempt, pack_parts(parts.list_parts(member)),
                tuple(mates), tied if stage in (0, len(stages) - 1) else (),
            )
            for stage, mates in enumerate(stages)
            for member in mates
        }  # fmt: skip
        reduced = await self._reduce(orders)
        if reduced is None:
            return False
        sums: list[str] = []
        norms: list[float] = []
        equal: set[MemberId] = set()
        for mates in stages:
            digests = {mate: reduced[mate].digest for mate in mates}
            chosen = find_equal(digests)
            equal |= chosen
            answer = reduced[next(mate for mate in mates if mate in chosen)]
            sums.append(answer.digest.hex())
            norms.append(answer.squared_norm)
        loss = sum(answer.loss for answer in reduced.values())
        squared_norm = math.fsum(norms)
        commit = self._decisions.commit.make_next(tuple(sums), squared_norm, loss)
        # Members that were not ready keep their place: they take the state from mates.
        members = [m for m in decision.members if m.id in equal or m.id not in orders]
        members = _let_go(members, self._leaving, equal - self._leaving)
        await self._decide(decision, members, commit)
        return self._decisions.newest is not decision

    async def _reduce(self, orders: dict[MemberId, Reduction]) -> dict[MemberId, Reduced] | None:
        """Have all members sum; None as soon as one fails, as the others wait for it."""

        async def order(member: MemberId) -> Reduced:
            answer = await self._decisions.members.ask(member, orders[member])
            return answer.check_kind(Reduced)

        tasks = {member: asyncio.create_task(order(member)) for member in orders}
        try:
            # Not gathered: a failure would be raised in place of our own cancellation.
            done, _ = await asyncio.wait(tasks.values(), return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
        except FAILURES as error:
            _logger.info("the gradients are not summed: %s", error)
            return None
        finally:
            await cancel_all(list(tasks.values()))
        return {member: task.result() for member, task in tasks.items()}

    async def _decide(self, before: Decision, members: Sequence[Member], commit: Commit) -> None:
        """Propose what follows a decision; nothing where another one has followed meanwhile."""
        try:
            await self._decisions.decide(before.make_next(members, commit.encode()))
        except LocalProtocolError as error:
            _logger.info("nothing was proposed: %s", error)
        for member in self._leaving.difference(self._decisions.newest.roster):
            await self._decisions.send_newest(member)  # it waits for that, and nobody asks it now


def _choose_stage(members: Sequence[Member], stages: Collection[int]) -> int:
    """Return which of these stages has the fewest members."""
    held = Counter(member.stage for member in members)
    return min(stages, key=lambda stage: (held[stage], stage))


def _find_leaving(manifests: _Manifests) -> set[MemberId]:
    """Return the members that want to leave."""
    told = manifests.items()
    return {member for member, manifest in told if manifest is not None and manifest.is_leaving}


def _find_accused(manifests: _Manifests) -> set[MemberId]:
    """Return the members that others accuse."""
    told = manifests.items()
    return {
        accused
        for member, manifest in told
        if manifest is not None
        for accused in manifest.accused
        if accused != member
    }


def _let_go(
    members: Sequence[Member], leaving: Collection[MemberId], staying: Collection[MemberId]
) -> list[Member]:
    """Return the members without those that leave a stage whose state somebody else keeps."""
    kept = {member.stage for member in members if member.id in staying}
    return [each for each in members if each.id not in leaving or each.stage not in kept]
