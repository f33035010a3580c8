"""The life of a peer in a run: it joins, follows what is decided, and leads if nobody else does."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Sequence, Set
from functools import partial

from torch import Tensor

from ...protocol.errors import (
    DirectoryError,
    ErrorCode,
    RefusedError,
    RemoteProtocolError,
    UnavailableError,
    UsageError,
)
from ...protocol.ids import MemberId, PeerId, find_peer_id
from ...protocol.messages.runs import (
    HeldOutPass,
    PartPass,
    PartsCounted,
    PartsFetch,
    Question,
    Reduction,
    RunJoin,
    StateFetch,
    StatePart,
    SumFetch,
    Vote,
)
from ...protocol.net.clock import Clock
from ...protocol.net.retry import Backoff
from ...protocol.runs.commits import Commit, found_run
from ...protocol.runs.update_parts import MemberManifest, pack_parts, unpack_parts
from ..process.config import PeerEvent, Report, Waits
from .leader import Leader
from .questions import MemberAnswer, make_busy, make_question_id
from .remote_members import RemoteMembers
from .run_decisions import PATIENCE_SECONDS, OtherChainError, RunDecisions, read_newest
from .run_resources import RunResources
from .stage import Stage
from .state_transfer import fetch_weights, list_layouts

_logger = logging.getLogger(__name__)

_LONGEST_REST_SECONDS = 300.0
"""The longest that we stay away when told to: a new leader does not know of our rest."""

_LONGEST_ALONE_SECONDS = 300.0
"""How long a peer that is no member looks for members, before it takes the run for ended."""

_NUM_QUICK = 5
"""How often a newcomer asks without waiting longer: the first tries come before all know it."""


class TrainingLoop:
    """Answers the other members of a run, and keeps the state of a stage up to date."""

    def __init__(
        self,
        member_id: MemberId,
        resources: RunResources,
        members: RemoteMembers,
        clock: Clock,
        report: Report,
    ) -> None:
        self.decisions: RunDecisions | None = None
        """The decisions of the run, once a member has told us the newest one."""
        self.stage: Stage | None = None
        """The stage that we hold; it may lag behind the newest decision."""
        self.leader: Leader | None = None
        """While we lead."""
        self._member_id = member_id
        self._resources = resources
        self._config = config = resources.config
        self._members = members
        self._clock = clock
        self._report = report
        self._rng = random.Random(member_id)
        self._open_decisions = partial(
            RunDecisions, member_id, members=members, clock=clock, num_stages=len(resources.spans)
        )
        self.is_over = asyncio.Event()
        """Set once all updates are applied here and nothing is left to measure, or the run has
        failed."""
        self._is_suspect = False
        self._is_leaving = False
        self._has_left = asyncio.Event()
        self._waits = Waits(report)
        self._run_waits = Waits(report)
        """What a leader waits for."""
        self._told_wait: tuple[int, str] | None = None
        """The same, as it was told last, and behind which decision."""
        self._joining = Backoff(config.pause_seconds, PATIENCE_SECONDS)
        self._num_asked = 0
        """How often in a row we have asked to be let in, and been told nothing new."""
        self._members_told: set[tuple[MemberId, int]] | None = None
        """The members that were reported last, and their stages."""
        self._applied: tuple[int, float] | None = None
        """The last update that was applied here, and when."""
        self._measured_update = 0
        """The last update whose held-out loss was reported."""
        self._alone_since: float | None = None
        """Since when no member announces the run, as long as we are none."""
        self.asked_at = clock.now()
        """When a member has asked for parts, sums or state last."""

    def find_input_bytes(self, question: PartPass | HeldOutPass, sender: MemberId) -> int:
        """Return how many bytes a part of a member may bring; none of anybody else."""
        stage, decisions = self.stage, self.decisions
        if stage is None or decisions is None or sender not in decisions.newest.roster:
            return 0
        parts = stage.parts
        return parts.input_bytes if isinstance(question, PartPass) else parts.held_out_bytes

    @property
    def is_ready(self) -> bool:
        """Whether the state of our stage is that of the newest decision."""
        stage, decisions = self.stage, self.decisions
        if stage is None or decisions is None or stage.index != decisions.stage:
            return False
        commit = decisions.commit
        return (stage.update, stage.num_restarts) == (commit.update, commit.num_restarts)

    @property
    def _is_cut_off(self) -> bool:
        """Whether we lead, and most members have been silent for long."""
        return self.leader is not None and self.leader.is_cut_off

    @property
    def _has_to_join(self) -> bool:
        """Whether we are no member, or one of those that cannot decide anything."""
        if self.decisions is None or self._is_cut_off:
            return True
        is_outside = self.decisions.stage is None
        return is_outside and self.failure is None and not self._is_complete

    @property
    def _is_complete(self) -> bool:
        """Whether all updates are committed and nothing is left to measure, as far as we know."""
        return self.decisions is not None and self.decisions.commit.is_last(self._config.run)

    async def answer(
        self, question: Question, payload: bytes | memoryview, sender: MemberId
    ) -> MemberAnswer:
        """Answer a question of another member, or of our own.

        Raises RefusedError or RemoteProtocolError; UnavailableError for what failed at others.
        """
        decisions, stage = self.decisions, self.stage
        if decisions is None:
            raise make_busy("this peer has not joined the run yet")
        match question:  # of these, the sender may be right that it is a member: we may lag
            case RunJoin():
                return self._answer_join(decisions, question, sender)
            case PartsFetch():
                return self._describe(decisions, question, sender)
            case Vote():
                return MemberAnswer(decisions.vote(question, sender))
            case _:
                pass
        is_member = sender in decisions.newest.roster
        if not is_member and not _is_for_all(question):
            raise RefusedError(ErrorCode.NOT_A_MEMBER, "this is no member of the run")
        if is_member:
            self.asked_at = self._clock.now()
        if stage is None:
            raise make_busy("this member has no stage yet")
        match question:
            case PartPass():
                return await stage.pass_part(question, payload)
            case HeldOutPass():
                return await stage.evaluate(question, payload)
            case Reduction():
                return await stage.reduce(question)
            case SumFetch():
                return await stage.read_sums(question)
            case StateFetch():
                if not self.is_ready and not stage.can_apply(decisions.commit):
                    raise make_busy("this member has not the state of the newest update itself")
                return await stage.read_state(question)

    def _answer_join(
        self, decisions: RunDecisions, question: RunJoin, sender: MemberId
    ) -> MemberAnswer:
        """Admit a peer at the next change of members if we lead; return the newest decision."""
        if question.member != sender:
            raise RemoteProtocolError("a member joins for itself only")
        newest = MemberAnswer(decisions.make_newest(question.question))
        if not question.compute_class:
            return newest
        if self._is_cut_off:
            raise make_busy("this member does not reach a majority of the run")
        if question.compute_class.hex() != decisions.commit.compute_class:
            detail = f"a peer of the run has {self._resources.machine}"
            raise RefusedError(ErrorCode.OTHER_COMPUTE_CLASS, detail)
        if self.leader is not None:
            self.leader.note_newcomer(sender, unpack_parts(question.stages))
        return newest

    def _describe(
        self, decisions: RunDecisions, question: PartsFetch, sender: MemberId
    ) -> MemberAnswer:
        decisions.note_leader(sender, question.decided)
        if self.leader is None and sender in decisions.newest.roster:
            told = question.decided.decision.number, question.waits_for
            if told == self._told_wait:  # twice: a decision may just have ended it
                self._run_waits.note(question.waits_for or None)
            self._told_wait = told
        if self._resources.compute.is_late:
            raise make_busy("this member computes without end")
        stage, manifest = self.stage, MemberManifest(0, is_ready=False)
        if stage is not None:
            manifest = MemberManifest(
                stage.update,
                is_ready=self.is_ready and not self._is_suspect,
                is_applying=stage.can_apply(decisions.commit) and not self._is_suspect,
                counted=stage.counted,
                audited=dict(stage.audited),
                refused=frozenset(stage.refused),
                state=stage.digest.whole,
                is_leaving=self._is_leaving,
                accused=tuple(sorted(stage.accused | stage.sums.accused)),
                unreachable=tuple(stage.sums.unreachable),
                part_seconds=stage.part_seconds,
                part_wait_seconds=stage.part_wait_seconds,
                fetched_bytes=stage.fetched_bytes,
                state_bytes=stage.state_bytes,
            )
        return MemberAnswer(PartsCounted(question.question, decisions.newest.number, manifest))

    @property
    def failure(self) -> str | None:
        """Why the run has ended before its last update; None: it has not."""
        return None if self.decisions is None else self.decisions.commit.failure

    async def leave(self) -> None:
        """Take no new parts, and leave the run behind the update that is under way.

        The last peer of a stage waits for another one.
        """
        decisions = self.decisions
        if decisions is None or decisions.stage is None or self.is_over.is_set():
            return
        num_stages = len(self._resources.spans)
        if not decisions.commit.update and not all(map(decisions.list_members, range(num_stages))):
            return  # the run has not begun
        self._is_leaving = True
        self._report(PeerEvent("leaving", {}))
        decisions.changed.set()
        await self._has_left.wait()
        # Those that remain can go on without us only when they know that we are out.
        await asyncio.gather(*(decisions.send_newest(one) for one in decisions.newest.roster))

    async def fetch_weights(self) -> tuple[dict[str, Tensor], str]:
        """Return the weights of all stages, by their names in a checkpoint, once all is over, and
        their digest. Raises UnavailableError where no member of a stage hands them over.
        """
        assert self.decisions is not None
        layouts, _ = await asyncio.to_thread(list_layouts, self._config.run)
        stages = [
            sorted(self.decisions.list_members(stage), key=lambda member: member != self._member_id)
            for stage in range(len(layouts))
        ]
        update = self._config.run.num_updates
        return await fetch_weights(self._members, stages, update, layouts, _logger.warning)

    async def close(self) -> None:
        """End what is under way for others, and drop what we hold."""
        if self.decisions is not None:
            await self.decisions.close()
        await self._drop_stage()

    async def _drop_stage(self) -> None:
        stage, self.stage = self.stage, None
        if stage is not None:
            await stage.close()

    async def follow(self) -> None:
        """Be a member, and keep our stage as far as the newest decision.

        Raises UsageError where the run does not take us.
        """
        while True:
            decisions = self.decisions
            if self._resources.compute.is_late:
                await asyncio.sleep(self._config.pause_seconds)
            elif self.failure is not None:
                self._report_failure()
                await asyncio.sleep(self._config.pause_seconds)
            elif decisions is None:
                await self._join()
            elif decisions.stage is None and self._is_leaving:
                self._has_left.set()
                await asyncio.sleep(self._config.pause_seconds)
            elif decisions.stage is None and self._is_complete:
                self._note_commit(decisions.commit)  # others have the weights
                await asyncio.sleep(self._config.pause_seconds)
            elif decisions.stage is None:
                if self.stage is not None and not self._is_suspect:
                    self._waits.note("a place in the run, which has gone on without this peer")
                self._is_suspect = self.stage is not None  # left out, maybe for what we hold
                await self._join()
            elif self._is_cut_off:
                await self._join()  # all others may have become other processes meanwhile
            else:
                self._num_asked = 0
                decisions.changed.clear()
                self._report_members(decisions)
                await self._members.forget_others(decisions.newest.roster)
                if self.stage is not None:
                    self.stage.sums.forget_others(decisions.newest.roster)
                await self._catch_up(decisions)
                if self.is_ready:
                    self._note_commit(decisions.commit)
                if self._is_leaving and decisions.stage is not None:
                    is_last = len(decisions.list_members(decisions.stage)) == 1
                    lacking = f"another peer for stage {decisions.stage}, to leave"
                    self._waits.note(lacking if is_last else None)
                await self._wait_for_decision(decisions, PATIENCE_SECONDS)

    async def _wait_for_decision(self, decisions: RunDecisions, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await decisions.changed.wait()

    def _report_failure(self) -> None:
        assert self.decisions is not None
        commit = self.decisions.commit
        assert commit.refused is not None
        if not self.is_over.is_set():
            facts = {
                "update": commit.update,
                "part": commit.refused.index,
                "stage": commit.refused.stage,
                "why": commit.failure,
            }
            self._report(PeerEvent("failed", facts))
            self.is_over.set()

    def _report_members(self, decisions: RunDecisions) -> None:
        """Report the members that have come since the last time, and those that are gone."""
        all_members = decisions.newest.members
        members = {(one.id, one.stage) for one in all_members if one.id != self._member_id}
        now = {"members_per_stage": self._count_members(decisions)}
        before = members if self._members_told is None else self._members_told
        self._members_told = members
        for name, those in ("member_left", before - members), ("member_joined", members - before):
            for member, stage in sorted(those):
                facts = {"peer": find_peer_id(member), "stage": stage, **now}
                self._report(PeerEvent(name, facts))

    def _report_update(self, decisions: RunDecisions, index: int, commit: Commit) -> None:
        now, speed = self._clock.now(), None
        if self._applied is not None and now > self._applied[1]:
            num_tokens = (commit.update - self._applied[0]) * self._config.run.tokens_per_update
            speed = num_tokens / (now - self._applied[1])
        # Before the first update, the run has waited for peers: nobody knows how long.
        self._applied = (commit.update, now) if commit.update else None
        facts = {
            "update": commit.update,
            "stage": index,
            "loss": commit.loss,
            "gradient_norm": commit.squared_norm**0.5,
            "tokens_per_second": None if speed is None else round(speed, 1),
            "averaging_seconds": round(commit.averaging_seconds, 4),
            "queue_seconds": [round(seconds, 4) for seconds in commit.queue_seconds],
            "parts_redone": commit.parts_redone,
            "members_per_stage": self._count_members(decisions),
        }
        self._report(PeerEvent("update", facts))

    def _count_members(self, decisions: RunDecisions) -> list[int]:
        stages = range(len(self._resources.spans))
        return [len(decisions.list_members(stage)) for stage in stages]

    def _note_commit(self, commit: Commit) -> None:
        """Report the held-out loss, and whether the run is over, once our state is this one, or
        nobody needs it.
        """
        run = self._config.run
        if commit.held_out_loss is not None and self._measured_update != commit.update:
            self._measured_update = commit.update
            self._applied = commit.update, self._clock.now()  # no tokens are trained meanwhile
            facts = {
                "update": commit.update,
                "loss": commit.held_out_loss,
                "entropy": run.corpus.entropy,
            }
            self._report(PeerEvent("held_out", facts))
        if commit.is_last(run):
            self.is_over.set()

    async def _catch_up(self, decisions: RunDecisions) -> None:
        """Take the state of the newest decision; report how far that is."""
        while (self._is_suspect or not self.is_ready) and (index := decisions.stage) is not None:
            commit, stage = decisions.commit, self.stage
            has_state = stage is not None and (stage.index, stage.update) == (index, commit.update)
            if stage is not None and has_state and not self._is_suspect:
                await stage.begin_again(commit.num_restarts)
                self._report(PeerEvent("begun_again", {"update": commit.update}))
                continue
            try:
                await self._take_state(decisions, index, commit)
            except UnavailableError as error:
                _logger.info("the state of the stage is not there yet: %s", error)
                if decisions.commit.update != commit.update:
                    continue  # another one is wanted
                self._waits.note(f"the state of stage {index} from another peer")
                await asyncio.sleep(self._config.pause_seconds)
                continue
            self._waits.note(None)
            self._report_update(decisions, index, commit)

    async def _take_state(self, decisions: RunDecisions, index: int, commit: Commit) -> None:
        """Bring our stage to a commit. Raises UnavailableError where no mate has that state."""
        stage = self.stage
        if stage is None or stage.index != index or stage.update > commit.update:
            await self._drop_stage()
            stage = await Stage.build(
                self._resources, index, self._member_id, self._members, decisions.list_members
            )
            self.stage = stage  # kept where no mate has the state yet: to build it takes long
        has_mates = len(decisions.list_members(index)) > 1
        if (self._is_suspect and has_mates) or (
            stage.update != commit.update and not await stage.apply(commit)
        ):
            await self._fetch_state(decisions, stage, commit)
        self._is_suspect = False

    async def _fetch_state(self, decisions: RunDecisions, stage: Stage, commit: Commit) -> None:
        """Take the state of a commit from a mate. Raises UnavailableError where none has it, or as
        soon as nobody has any use for it.
        """
        fetching = asyncio.create_task(stage.fetch_state(commit.update))
        try:
            while not fetching.done():
                if decisions.commit.update != commit.update or decisions.stage != stage.index:
                    raise UnavailableError(f"update {commit.update} is over for us")
                _, pending = await asyncio.wait((fetching,), timeout=self._config.pause_seconds)
                if pending:
                    percent = 10 * (10 * stage.fetched_bytes // max(stage.state_bytes, 1))
                    what = f"the state of stage {stage.index} from another peer"
                    self._waits.note(f"{what}, {percent} % are here")
        finally:
            fetching.cancel()
            await asyncio.wait((fetching,))
        await stage.load(fetching.result())

    async def _join(self) -> None:
        """Ask those that announce the run to let us in, or begin it.

        Raises UsageError where we are told that we never can.
        """
        config = self._config
        if self.decisions is None and config.founds_run:
            stage = self._resources.stages[0]
            compute_class = self._resources.compute_class
            first = found_run(config.record.run_id, self._member_id, stage, compute_class)
            self.decisions = self._open_decisions(first)
            return
        try:
            peers = await self._members.list_peers()
        except DirectoryError as error:
            _logger.info("nobody is known to train: %s", error)
            peers = []
        if not peers:
            self._waits.note("a peer of the run")
        self._rng.shuffle(peers)
        resources = self._resources
        compute_class, stages = bytes.fromhex(resources.compute_class), resources.stages
        before = None if self.decisions is None else self.decisions.newest
        question = RunJoin(make_question_id(), self._member_id, compute_class, pack_parts(stages))
        failures = await self._members.ask_peers(
            peers, question, self._learn, lambda: not self._has_to_join
        )
        refused = [one for one in failures if isinstance(one, RefusedError)]
        refusals = [one for one in refused if one.code is ErrorCode.OTHER_COMPUTE_CLASS]
        if self.decisions is None and refusals:
            raise UsageError(
                f"this machine has {self._resources.machine}, and does not compute the same "
                f"gradients as the run, bit for bit: {refusals[0]}. Use the same version of torch, "
                "the same --threads and the same family of processors"
            )
        others = [one for one in failures if isinstance(one, OtherChainError)]
        silent = [one for one in failures if isinstance(one, UnavailableError)]
        if others and len(others) + len(silent) == len(peers):  # nobody knows of our chain
            raise UsageError(
                f"{others[0]}; what this peer knows belongs to the beginning before, which has no "
                "majority any more: start this peer again, and it joins the new one"
            )
        if not self._has_to_join:
            return
        self._check_alone({peer.peer_id for peer in peers})
        has_news = self.decisions is not None and self.decisions.newest is not before
        self._num_asked = 1 if has_news else self._num_asked + 1
        left_out = [one for one in refused if one.code is ErrorCode.LEFT_OUT]
        if peers and not left_out and self._num_asked == _NUM_QUICK and not self._is_cut_off:
            self._waits.note("a place in the run")
        seconds = self._choose_pause(left_out)
        if self.decisions is None:
            await asyncio.sleep(seconds)
        else:
            self.decisions.changed.clear()
            await self._wait_for_decision(self.decisions, seconds)

    def _check_alone(self, peers: Set[PeerId]) -> None:
        """Raise UsageError where we are no member, and all members have been gone for long.

        We have asked these peers before, so that of a run that goes on we know the newest members.
        """
        now, decisions = self._clock.now(), self.decisions
        if decisions is None or decisions.stage is not None:
            return  # the run may not have begun, or have lost us
        if not peers.isdisjoint(map(find_peer_id, decisions.newest.roster)):
            self._alone_since = None
            return
        self._alone_since = now if self._alone_since is None else self._alone_since
        if now - self._alone_since >= _LONGEST_ALONE_SECONDS:
            run = self._config.run
            raise UsageError(
                f"the run {run.name} was at update {decisions.commit.update} of {run.num_updates}, "
                f"and none of its members was found for {_LONGEST_ALONE_SECONDS:.0f} s: all have "
                "ended, or cannot be reached; if they train again, start this peer again"
            )

    def _choose_pause(self, refusals: Sequence[RefusedError]) -> float:
        """Return how long to wait before we ask again to be let in; report why the run does not let
        us in yet.
        """
        seconds = self._joining.choose_seconds(max(1, self._num_asked - _NUM_QUICK))
        for refusal in refusals:
            self._waits.note(f"a place in the run: {refusal}")
            seconds = max(seconds, min(refusal.retry_after_seconds or 0.0, _LONGEST_REST_SECONDS))
        return seconds

    def _learn(self, answer: MemberAnswer) -> None:
        """Take the newest decision of a peer. Raises RemoteProtocolError for any other message."""
        newest = read_newest(answer)
        if self.decisions is None:
            self.decisions = self._open_decisions(newest)
        else:
            self.decisions.learn(newest)

    async def lead(self) -> None:
        """Lead whenever nobody before us does."""
        while True:
            await asyncio.sleep(self._config.pause_seconds)
            if self.decisions is None or not self.decisions.may_lead:
                continue
            _logger.info("leading the run")
            self.leader = Leader(self._config, self.decisions, self._clock, self._report)
            try:
                await self.leader.run()
            finally:
                self.leader = None


def _is_for_all(question: Question) -> bool:
    """Return whether every peer may ask this that the run admits: it reads the weights."""
    return isinstance(question, StateFetch) and question.part is not StatePart.ALL
