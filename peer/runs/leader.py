"""Leads a run: has parts computed and summed, and updates committed.

A leader keeps nothing that a run could lose: it asks the members which parts they have counted, and
their majority chooses each decision. So another member can take over at any time, and two that lead
at once cost work, not correctness.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import secrets
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from ...protocol.errors import ErrorCode, RefusedError
from ...protocol.ids import MemberId, PeerId, find_peer_id
from ...protocol.messages.runs import (
    HeldOutPass,
    HeldOutPassed,
    PartPass,
    PartPassed,
    PartsCounted,
    PartsFetch,
    Reduced,
    Reduction,
)
from ...protocol.net.clock import Clock
from ...protocol.net.tasks import cancel_all
from ...protocol.runs.audits import ASKED_AGAIN, Audits
from ...protocol.runs.deadlines import CommitDelays
from ...protocol.runs.decisions import Decided, Member
from ...protocol.runs.manifests import (
    Aside,
    Manifests,
    choose_aside,
    choose_without_leaving,
)
from ...protocol.runs.rests import FailedSums, Rests
from ...protocol.runs.update_parts import (
    LEAST_PER_MEMBER,
    Difference,
    HeldOutLosses,
    LostParts,
    MemberManifest,
    PartOrder,
    TripTimes,
    UpdateParts,
    find_difference,
    pack_parts,
)
from ..process.config import PeerEvent, Report, Waits
from .questions import FAILURES, make_question_id
from .run_decisions import PATIENCE_SECONDS, RunDecisions
from .run_resources import RunPeerConfig

_logger = logging.getLogger(__name__)

_ATTEMPT_BYTES = 16

_MOST_NEWCOMERS = 256
"""How many peers wait to become members at the same time."""

_SHORTEST_SECONDS = 0.01
"""How long to wait before the first look whether there is something to do again."""


@dataclass(frozen=True)
class _Newcomer:
    """A process that wants to become a member, and the stages that it can hold."""

    id: MemberId
    stages: set[int]
    asking: asyncio.Task[MemberManifest | None]
    """Asks it for its manifest, as members are asked: one that does not answer is not let in."""


class Leader:
    """Leads a run as long as `run` runs."""

    def __init__(
        self,
        config: RunPeerConfig,
        decisions: RunDecisions,
        clock: Clock,
        report: Report,
    ) -> None:
        self._run = config.run
        self._decisions = decisions
        self._clock = clock
        self._pause_seconds = config.pause_seconds
        self._report = report
        self._waits = Waits(report)
        self._downloading = set[MemberId]()
        """Members that a commit waits for, which tell themselves how far they are."""
        self._rng = random.Random(decisions.member_id)
        self._joining: dict[PeerId, _Newcomer] = {}
        self._rests = Rests(config.silence_seconds)
        self._resting: dict[PeerId, MemberId] = {}
        """The newest process that we know of each peer that rests."""
        self._disputed: int | None = None
        """The update whose sums differ, as long as nothing shows which member is right."""
        self._failures = Counter[MemberId]()
        """Failed orders of this update, by member: see `UpdateParts`."""
        self._failed_sums = FailedSums()
        self._audits = Audits(config.audited_fraction, random.SystemRandom())
        self._delays = CommitDelays(config.silence_seconds, clock.now())
        self._silence_seconds = config.silence_seconds
        self._lost = LostParts()
        self._trips = TripTimes()
        self._held_out = HeldOutLosses(config.run.num_held_out_parts)
        self._begun_at = clock.now()
        self._heard_at: dict[MemberId, float] = {}
        """When members have answered last."""

    @property
    def is_cut_off(self) -> bool:
        """Whether no majority has answered for as long as one member may be silent."""
        since, newest = self._clock.now() - self._silence_seconds, self._decisions.newest
        heard = [self._heard_at.get(one, self._begun_at) for one in newest.roster]
        return sum(at >= since for at in heard) < newest.majority

    def note_newcomer(self, member: MemberId, stages: set[int]) -> None:
        """Let a peer in when its turn comes, if it can be reached.

        Of the processes of one peer, the last one that asks counts. Raises RefusedError for one
        that the run does not wait for again yet.
        """
        try:
            self._rests.check(find_peer_id(member), self._clock.now())
        except RefusedError:
            self._resting[find_peer_id(member)] = member
            raise
        if not self._delays.is_on:  # else it asks again
            self._let_wait(member, stages)

    def _let_wait(self, member: MemberId, stages: set[int]) -> None:
        peer_id = find_peer_id(member)
        known = self._joining.get(peer_id)
        if known is None and len(self._joining) >= _MOST_NEWCOMERS:
            return
        if known is None or known.id != member:
            self._forget_newcomer(peer_id)
            asking = asyncio.create_task(self._ask_manifest(member))
            self._joining[peer_id] = _Newcomer(member, stages, asking)

    def _forget_newcomer(self, peer_id: PeerId) -> None:
        """Let a peer wait no longer; it may ask again."""
        if (known := self._joining.pop(peer_id, None)) is not None:
            known.asking.cancel()

    def _let_rest(self, member: MemberId, why: str, held_up_seconds: float = 0.0) -> None:
        """Take a member's peer back only after a rest; until then it is told why."""
        peer_id = find_peer_id(member)
        self._forget_newcomer(peer_id)  # another process of it
        self._rests.note(peer_id, why, held_up_seconds, self._clock.now())
        self._resting[peer_id] = member

    async def run(self) -> None:
        """Lead until we are no member any more, or one before us on the roster leads."""
        telling = asyncio.create_task(self._keep_telling())
        pause_seconds = _SHORTEST_SECONDS
        try:
            while self._decisions.stage is not None and not self._decisions.is_led:
                if await self._step():
                    pause_seconds = _SHORTEST_SECONDS
                else:
                    await asyncio.sleep(pause_seconds)
                    pause_seconds = min(2 * pause_seconds, self._pause_seconds)
        finally:
            await cancel_all([telling, *(each.asking for each in self._joining.values())])

    async def _keep_telling(self) -> None:
        """Tell the members at intervals that we lead, however long an update takes."""
        asking: dict[MemberId, asyncio.Task[MemberManifest | None]] = {}
        try:
            while True:
                await asyncio.sleep(PATIENCE_SECONDS / 3)
                asking = {member: task for member, task in asking.items() if not task.done()}
                for member in self._decisions.newest.roster:
                    if member not in asking:
                        asking[member] = asyncio.create_task(self._ask_manifest(member))
        finally:
            await cancel_all(asking.values())

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to compute."""
        commit = self._decisions.commit
        return commit.refused is not None or commit.is_last(self._run)

    async def _step(self) -> bool:
        """Take one step; return whether the run came further by it."""
        own = await self._ask_manifest(self._decisions.member_id)
        is_applying = own is not None and own.is_applying
        if is_applying and self._delays.has_to_settle(is_applying, self._clock.now()):
            return False  # so do the others, which would have to be asked again
        manifests = await self._ask_manifests()
        lacking = None if self.is_over else manifests.find_lacking()
        if lacking:
            self._delays.pause(self._clock.now())
        if not manifests.commit.lacks_held_out_loss(self._run):
            self._held_out.failure = None  # it is measured, maybe by another leader
        if not self._delays.is_on:
            self._downloading.clear()
            failing = manifests.describe_failing(self._failed_sums.failing)
            self._waits.note(lacking or failing or self._held_out.failure)
        before = manifests.decision
        if await self._change_members(manifests):
            return self._decisions.newest is not before
        if self.is_over:  # else they would come back when nobody is here any more
            self._decisions.tell(self._resting.values())
            self._resting.clear()
        has_to_settle = self._delays.has_to_settle(manifests.is_settling, self._clock.now())
        if self.is_over or has_to_settle or not all(manifests.ready):
            self._delays.pause(self._clock.now())
            return False
        if manifests.commit.lacks_held_out_loss(self._run):
            self._delays.pause(self._clock.now())
            return await self._measure_held_out_loss(manifests)
        update = self._decisions.commit.update
        parts = manifests.list_parts(self._run.parts_per_update)
        parts.failures = self._failures
        self._lost.note(update, parts.counted)
        for found in self._audits.order_disputed(manifests, parts):
            what = f"gradients of part {found.index}"
            self._report_difference(what, update, found.stage, found.difference, found.follows)
        if (refused := parts.find_refused()) is not None:
            stopped = manifests.commit.make_stopped(*refused)
            await self._decisions.follow(before, before.members, stopped)
            return False
        if not parts.is_complete and await self._compute(update, parts):
            self._delays.pause(self._clock.now())
            return parts.is_complete
        if await self._delay(manifests) or not parts.is_complete:
            return False
        return await self._commit(update, parts, manifests)

    async def _measure_held_out_loss(self, manifests: Manifests) -> bool:
        """Have the held-out loss measured, and decide it; return whether it is decided.

        Where a member fails, no more parts are ordered: others may do it.
        """
        decision, commit, losses = manifests.decision, manifests.commit, self._held_out
        has_failed = False
        turns = asyncio.Semaphore(LEAST_PER_MEMBER * sum(map(len, manifests.ready)))

        async def measure(index: int, first: MemberId, *route: MemberId) -> None:
            nonlocal has_failed
            async with turns:
                if has_failed or self._decisions.is_led:
                    return
                question = HeldOutPass(make_question_id(), 0, commit.update, index, route)
                try:
                    answer = await self._decisions.members.ask(first, question)
                    losses.note(index, answer.check_kind(HeldOutPassed).loss)
                except FAILURES as error:
                    _logger.info("held-out part %d failed: %s", index, error)
                    passed = ", ".join(f"…{find_peer_id(one)[-8:]}" for one in (first, *route))
                    losses.failure = f"held-out part {index} to pass the peers {passed}"
                    has_failed = True

        losses.begin(commit.update)
        async with asyncio.TaskGroup() as tasks:
            for index, members in manifests.plan_routes(losses.missing, self._rng):
                tasks.create_task(measure(index, *members))
        if losses.mean is None:
            return False
        await self._decisions.follow(decision, decision.members, commit.make_measured(losses.mean))
        return self._decisions.newest is not decision

    async def _delay(self, manifests: Manifests) -> bool:
        """Return whether the commit has to wait for members that are not ready, as most of them
        download what it makes stale.

        Those that are late are left out, for a while.
        """
        decision, missing = manifests.decision, manifests.missing
        late = self._delays.note_missing(
            {one.id: told.has_begun for one, told in missing.items()}, self._clock.now()
        )
        if not late:
            if missing:
                self._downloading = {one.id for one in missing}
                self._waits.note(manifests.describe_missing())
            return bool(missing)
        members = [one for one in decision.members if one.id not in late]
        await self._decisions.follow(decision, members, self._decisions.commit)
        left = late.difference(self._decisions.newest.roster)
        for member in [one for one in missing if one.id in left]:
            seconds, had = self._delays.count_seconds(member.id), missing[member]
            why = (
                f"it had {had.describe_download()} of stage {member.stage}'s state after the run "
                f"had waited {seconds:.0f} s for it"
            )
            self._let_rest(member.id, why, seconds)
            facts = {"peer": find_peer_id(member.id), "stage": member.stage, "why": why}
            self._report(PeerEvent("too_slow", facts))
        return True

    async def _ask_manifests(self) -> Manifests:
        newest = self._decisions.newest
        answers = await asyncio.gather(*map(self._ask_manifest, newest.roster))
        told = dict(zip(newest.roster, answers, strict=True))
        return Manifests(newest, self._decisions.num_stages, told)

    async def _ask_manifest(self, member: MemberId) -> MemberManifest | None:
        """Tell a member what is decided, and ask it what it has counted; None: it does not answer.

        One that is silent is not waited for as long as for other things: see `RemoteMembers`.
        """
        newest = self._decisions.newest
        waits_for = "" if member in self._downloading else self._waits.what or ""
        question = PartsFetch(make_question_id(), Decided(newest), waits_for)
        try:
            answer = await self._decisions.members.ask(member, question)
            told = answer.check_kind(PartsCounted)
        except FAILURES as error:
            _logger.info("%s does not tell what it has counted: %s", member, error)
            return None
        if member in newest.roster:
            self._heard_at[member] = self._clock.now()
        if told.number > newest.number:
            await self._decisions.send_newest(member)  # it answers with its own
        return told.manifest

    async def _change_members(self, manifests: Manifests) -> bool:
        """Leave out members that do not answer, and take in those that wait and may.

        Returns whether the members have to change, or have changed.
        """
        decision = self._decisions.newest
        if manifests.decision is not decision:
            return True  # decided meanwhile
        commit, aside = self._decisions.commit, choose_aside(manifests, self._failed_sums.failing)
        wrong = self._audits.choose_aside(manifests) if aside is None else None
        aside = aside or wrong
        members = manifests.choose_members(aside.member if aside else None)
        lost = set(decision.roster).difference(one.id for one in members)
        if wrong is not None or self._audits.has_in_dispute(lost, manifests):
            commit = commit.make_restarted()
        members = self._let_in(manifests, members)
        if members == list(decision.members):
            return False
        await self._decisions.follow(decision, members, commit)
        gone = set(decision.roster).difference(self._decisions.newest.roster)
        if aside is not None and aside.member in gone:
            self._note_aside(aside, 0.0 if wrong else self._failed_sums.seconds)
        if gone:
            self._failed_sums.clear()  # others may have failed for these
        update, differences = manifests.commit.update, manifests.find_differences()
        self._leave_out_differing("states", update, differences, gone)
        return True

    def _may_commit(self, update: int, differences: Mapping[int, Difference]) -> bool:
        """Return False, and report it, where members have to sum once more, as it is open which of
        their sums are right.
        """
        if self._disputed == update or not any(one.is_tie for one in differences.values()):
            return True
        self._disputed = update
        for stage, difference in differences.items():
            self._report_difference("sums", update, stage, difference, ASKED_AGAIN)
        return False

    def _leave_out_differing(
        self,
        what: str,
        update: int,
        differences: Mapping[int, Difference],
        gone: Collection[MemberId],
    ) -> None:
        """Report replicas that differ, and let those rest that are gone for it."""
        for stage, difference in differences.items():
            if set(difference.others).issubset(gone):
                why = self._report_difference(what, update, stage, difference)
                for member in difference.others:
                    self._let_rest(member, why)

    def _report_difference(
        self, what: str, update: int, stage: int, difference: Difference, follows: str = ""
    ) -> str:
        """Report replicas that differ; return which they are, and what follows."""
        why = difference.describe(what, follows)
        facts = {
            "update": update,
            "stage": stage,
            "what": what,
            "counting": list(difference.equal),
            "others": list(difference.others),
            "is_tie": difference.is_tie,
            "why": why,
        }
        self._report(PeerEvent("replicas_differ", facts))
        _logger.warning("update %d, stage %d: %s", update, stage, why)
        return why

    def _note_aside(self, aside: Aside, held_up_seconds: float) -> None:
        self._let_rest(aside.member, aside.why, held_up_seconds)
        peer_id, others = find_peer_id(aside.member), [find_peer_id(one) for one in aside.others]
        facts = {"peer": peer_id, "others": others, "why": aside.why}
        self._report(PeerEvent("put_aside", facts))
        _logger.info("%s was put aside: %s", aside.member, aside.why)

    def _let_in(self, manifests: Manifests, members: list[Member]) -> list[Member]:
        """Return the members with those that wait, have answered, and can be let in now.

        Nobody is while a commit waits for a member: it would wait for the next one, too. Those that
        wait meanwhile have to ask again, as they may be gone when it ends.
        """
        if self._delays.is_on:
            for peer_id in list(self._joining):
                self._forget_newcomer(peer_id)
            return members
        for newcomer in list(self._joining.values()):
            if not newcomer.asking.done():
                continue
            del self._joining[find_peer_id(newcomer.id)]
            if newcomer.asking.result() is None or newcomer.id in manifests.decision.roster:
                continue
            grown = manifests.choose_with_newcomer(members, newcomer.id, newcomer.stages)
            if grown == members:
                self._let_wait(newcomer.id, newcomer.stages)
            members = grown
        return members

    async def _compute(self, update: int, parts: UpdateParts) -> bool:
        """Have parts computed until all are counted once, or a part fails or takes another route.

        Returns whether any part could be ordered.
        """
        under_way: dict[asyncio.Task[PartPassed], PartOrder] = {}
        has_changed = has_ordered = False
        try:
            while True:
                most = parts.choose_num_under_way(self._trips.usual_seconds)
                while not has_changed and not self._decisions.is_led and len(under_way) < most:
                    order = parts.choose_next(self._rng)
                    if order is None:
                        break
                    under_way[asyncio.create_task(self._order(update, order))] = order
                    has_ordered = True
                if not under_way:
                    return has_ordered
                usual_seconds = self._trips.usual_seconds or self._silence_seconds
                seconds = self._audits.choose_seconds(parts, under_way.values(), usual_seconds)
                done, _ = await asyncio.wait(
                    under_way, timeout=seconds, return_when=asyncio.FIRST_COMPLETED
                )
                if not done:  # nothing but audits, which nobody waits for any longer
                    parts.audits.clear()
                    return has_ordered
                for task in done:
                    order = under_way.pop(task)
                    try:
                        has_changed |= not parts.note_passed(order, task.result().route)
                        self._audits.note_audit(order, has_passed=True)
                        self._audits.draw(order, parts)
                    except FAILURES as error:
                        _logger.info("part %d of update %d failed: %s", order.index, update, error)
                        parts.note_failed(order)
                        self._audits.note_audit(order, has_passed=False)
                        has_changed |= not order.is_audit
        finally:
            self._lost.note(update, parts.counted)
            await cancel_all(under_way)

    async def _order(self, update: int, order: PartOrder) -> PartPassed:
        first, *route = order.route
        question = PartPass(
            make_question_id(), 0, update, order.index, tuple(route), order.last_stage,
            order.without, is_audit=order.is_audit,
            num_restarts=self._decisions.commit.num_restarts,
        )  # fmt: skip
        begun_at = self._clock.now()
        answer = await self._decisions.members.ask(first, question)
        passed = answer.check_kind(PartPassed)
        is_whole = len(order.route) == order.last_stage + 1 == self._decisions.num_stages
        if is_whole and not order.is_audit:
            self._trips.note(update, first, self._clock.now() - begun_at)
        return passed

    async def _commit(self, update: int, parts: UpdateParts, manifests: Manifests) -> bool:
        decision, leaving = manifests.decision, manifests.leaving
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
        begun_at = self._clock.now()
        reduced = await self._reduce(orders)
        if reduced is None:
            return False
        seconds = self._clock.now() - begun_at
        # The norm as well: it decides how far the gradients of all stages are clipped.
        told = [
            {mate: (reduced[mate].digest, reduced[mate].squared_norm) for mate in mates}
            for mates in stages
        ]
        compared = [find_difference(answers) for answers in told]
        differences = {stage: one for stage, one in enumerate(compared) if one.others}
        if not self._may_commit(update, differences):
            return False
        equal = {member for one in compared for member in one.equal}
        chosen = [reduced[one.equal[0]] for one in compared]
        commit = self._decisions.commit.make_next(
            sums=tuple(one.digest.hex() for one in chosen),
            squared_norm=math.fsum(one.squared_norm for one in chosen),
            loss=sum(reduced[member].loss for member in stages[-1]),
            averaging_seconds=seconds,
            queue_seconds=manifests.list_queue_seconds(),
            parts_redone=self._lost.num,
        )
        # Members that were not ready keep their place: they take the state from mates.
        members = [m for m in decision.members if m.id in equal or m.id not in orders]
        members = choose_without_leaving(members, leaving, equal)
        await self._decisions.follow(decision, members, commit)
        if self._decisions.commit.update > update:
            self._delays.note_commit(self._clock.now())
        gone = set(decision.roster).difference(self._decisions.newest.roster)
        self._leave_out_differing("sums", update, differences, gone)
        self._failures.clear()  # a link may be back
        return self._decisions.newest is not decision

    async def _reduce(self, orders: dict[MemberId, Reduction]) -> dict[MemberId, Reduced] | None:
        """Have all members sum; None if one fails.

        Where it fails at a mate, the others come to their end, too: so each finds out all mates
        that it cannot read from. Else they would wait for it.
        """

        async def order(member: MemberId) -> Reduced:
            answer = await self._decisions.members.ask(member, orders[member])
            return answer.check_kind(Reduced)

        tasks = {member: asyncio.create_task(order(member)) for member in orders}
        reduced: dict[MemberId, Reduced] = {}
        failed: MemberId | None = None
        """The first member that failed by itself; where none did, the first one that failed."""
        pending, begun_at = set(tasks.values()), self._clock.now()
        try:
            while pending:
                # Not gathered: a failure would be raised in place of our own cancellation.
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for member in [each for each, task in tasks.items() if task in done]:
                    try:
                        reduced[member] = tasks[member].result()
                    except FAILURES as error:
                        _logger.info("%s does not sum the gradients: %s", member, error)
                        if not self._is_for_mates(member, error):
                            failed = member
                            return None
                        failed = failed or member
        finally:
            await cancel_all(tasks.values())
            self._failed_sums.note_summed(reduced)
            if failed is not None:
                self._failed_sums.note_failed(failed, self._clock.now() - begun_at)
        if failed is not None:
            return None
        self._failed_sums.clear()
        return reduced

    def _is_for_mates(self, member: MemberId, error: Exception) -> bool:
        """Return whether a member has begun to sum, and failed at its mates."""
        if isinstance(error, RefusedError):
            return error.code is ErrorCode.NEXT_UNREACHABLE
        return member == self._decisions.member_id
