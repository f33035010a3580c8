"""The decisions of a run as one member knows them, and its part in the next one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence

from ...protocol.errors import LocalProtocolError, RemoteProtocolError
from ...protocol.ids import MemberId, SessionId, find_peer_id
from ...protocol.messages.runs import Vote, Voted
from ...protocol.net.clock import Clock
from ...protocol.net.tasks import cancel_all
from ...protocol.runs.commits import Commit, read_commit
from ...protocol.runs.decisions import (
    Accept,
    Decided,
    Decision,
    DecisionLog,
    Member,
    Message,
    Outgoing,
    Prepare,
    Promise,
)
from .questions import FAILURES, MemberAnswer, Members, make_question_id

_logger = logging.getLogger(__name__)

PATIENCE_SECONDS = 3.0
"""How long a leader may be silent before the next member leads."""


class OtherChainError(RemoteProtocolError):
    """A peer follows other decisions than we do: somebody has begun the run again."""


class RunDecisions:
    """The roster of a run, its last commit, and its leader."""

    def __init__(
        self,
        member_id: MemberId,
        newest: Decision,
        members: Members,
        clock: Clock,
        num_stages: int,
    ) -> None:
        """Raises RemoteProtocolError where the newest one is no decision of such a run."""
        self.num_stages = num_stages
        self._founder = read_run_commit(newest, num_stages).founder
        self.members = members
        self.changed = asyncio.Event()
        """Set whenever there is a new decision."""
        self._log = DecisionLog(member_id, newest)
        self._clock = clock
        self._leader = member_id
        self._heard_at = clock.now()
        """When the leader has asked last, or something was decided."""
        self._sending: set[asyncio.Task[Outgoing]] = set()

    def __repr__(self) -> str:
        return f"<RunDecisions {self._log!r}>"

    @property
    def member_id(self) -> MemberId:
        """Our id."""
        return self._log.member_id

    @property
    def newest(self) -> Decision:
        """The newest decision that we know."""
        return self._log.newest

    @property
    def commit(self) -> Commit:
        """How far the run has come."""
        return read_commit(self._log.newest)

    @property
    def stage(self) -> int | None:
        """The stage that the newest decision lets us hold."""
        members = self.newest.members
        return next((member.stage for member in members if member.id == self.member_id), None)

    @property
    def is_led(self) -> bool:
        """Whether a member before us on the roster has led lately."""
        roster = self.newest.roster
        if self._leader not in roster or self.member_id not in roster:
            return False
        is_before = roster.index(self._leader) < roster.index(self.member_id)
        return is_before and self._clock.now() - self._heard_at < PATIENCE_SECONDS

    @property
    def may_lead(self) -> bool:
        """Whether all members before us on the roster have been silent for long enough.

        The later on the roster, the longer it takes, so that not all begin at once.
        """
        if not self._log.is_member:
            return False
        rank = self.newest.roster.index(self.member_id)
        return rank == 0 or self._clock.now() - self._heard_at > rank * PATIENCE_SECONDS

    def list_members(self, stage: int) -> Sequence[MemberId]:
        """Return the members that hold a stage."""
        return [member.id for member in self.newest.members if member.stage == stage]

    def note_leader(self, leader: MemberId, told: Decided) -> None:
        """Note that a member leads, and take its newest decision. Raises RemoteProtocolError."""
        self._check(told.decision)
        self._receive(leader, told)
        if told.decision.number >= self.newest.number and leader in self.newest.roster:
            self._heard_at, self._leader = self._clock.now(), leader

    def vote(self, question: Vote, sender: MemberId) -> Vote | Voted:
        """Answer a message of the chain. Raises RemoteProtocolError."""
        message = self._read(question)
        if not isinstance(message, Prepare | Accept | Decided):
            raise RemoteProtocolError(f"{type(message).__name__} is no question")
        for _, answer in self._receive(sender, message):
            return Vote.make(question.question, answer)
        return Voted(question.question)

    def _receive(self, sender: MemberId, message: Message) -> Outgoing:
        """Take what another member says; return what is answered. Raises RemoteProtocolError."""
        is_known = sender in self.newest.roster or self.stage is None
        if isinstance(message, Decided) and not is_known:
            return []  # members that we know will tell us
        return self._take(sender, message)

    def _take(self, sender: MemberId, message: Message) -> Outgoing:
        before = self.newest
        answers = self._log.receive(sender, message)
        self._note_decision(before)
        return answers

    def learn(self, told: Decision) -> None:
        """Take a newer decision of a peer that is no member as far as we know."""
        before = self.newest
        self._check(told)
        if told.number > before.number:
            # What we have promised was for a number that is decided: nothing of it counts now.
            self._log = DecisionLog(self.member_id, told)
        self._note_decision(before)

    async def follow(self, before: Decision, members: Sequence[Member], commit: Commit) -> None:
        """Propose what follows a decision; nothing where another one has followed meanwhile."""
        try:
            await self.decide(before.make_next(members, commit.encode()))
        except LocalProtocolError as error:
            _logger.info("nothing was proposed: %s", error)

    async def decide(self, decision: Decision) -> None:
        """Propose a decision, and carry what is said to and fro until there is nothing more.

        Another one may be chosen in its place, or none where a majority does not answer: look at
        the newest decision. Raises LocalProtocolError unless it follows that, and we are a member.
        """
        before = self.newest
        pending = self._post(self._log.propose(decision))
        self._note_decision(before)
        while pending and self.newest is before:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                pending |= self._post(task.result())

    def make_newest(self, question_id: SessionId) -> Vote:
        """Return the answer to a question that tells our newest decision."""
        return Vote.make(question_id, Decided(self.newest))

    async def send_newest(self, member: MemberId) -> None:
        """Send one member our newest decision, and take its own if that is newer."""
        await self._send(member, Decided(self.newest))

    def tell(self, outsiders: Iterable[MemberId]) -> None:
        """Send our newest decision to processes that it does not name, without waiting for them."""
        self._post([(one, Decided(self.newest)) for one in outsiders])

    async def close(self) -> None:
        """Send nothing any more."""
        await cancel_all(self._sending)

    def _post(self, outgoing: Outgoing) -> set[asyncio.Task[Outgoing]]:
        """Send messages of the chain at once, also to members that nobody waits for any more."""
        tasks = {asyncio.create_task(self._send(*each)) for each in outgoing}
        for task in tasks:
            self._sending.add(task)
            task.add_done_callback(self._sending.discard)
        return tasks

    async def _send(self, member: MemberId, message: Message) -> Outgoing:
        """Send a message of the chain; return the messages that follow from the answer."""
        question = Vote.make(make_question_id(), message)
        try:
            answer = (await self.members.ask(member, question)).message
            if not isinstance(answer, Vote):
                return []
            return self._take(member, self._read(answer))
        except FAILURES as error:
            _logger.info("%s does not vote: %s", member, error)
            return []

    def _read(self, vote: Vote) -> Message:
        """Return a message of the chain. Raises RemoteProtocolError for what is none of our run."""
        message = vote.content
        accepted = message.accepted if isinstance(message, Promise) else message
        if isinstance(accepted, Accept | Decided):
            self._check(accepted.decision)
        return message

    def _check(self, decision: Decision) -> None:
        commit = read_run_commit(decision, self.num_stages)
        if commit.founder != self._founder:
            founder = find_peer_id(MemberId(commit.founder))
            raise OtherChainError(
                f"the run was begun again by …{founder[-6:]}, and is at update {commit.update}"
            )

    def _note_decision(self, before: Decision) -> None:
        if self.newest is not before:
            self._heard_at = self._clock.now()
            self.changed.set()


def read_newest(answer: MemberAnswer) -> Decision:
    """Return the newest decision that a peer tells. Raises RemoteProtocolError."""
    decided = answer.check_kind(Vote).decided
    if decided is None:
        raise RemoteProtocolError("a peer did not answer with its newest decision")
    return decided.decision


def read_run_commit(decision: Decision, num_stages: int) -> Commit:
    """Return the commit in a decision. Raises RemoteProtocolError unless it fits so many stages."""
    commit = read_commit(decision)
    named = {member.stage for member in decision.members}
    if commit.refused is not None:
        named.add(commit.refused.stage)
    if max(named) >= num_stages:
        raise RemoteProtocolError("a decision names a stage that the run does not have")
    if len(commit.sums) != (num_stages if commit.update else 0):
        raise RemoteProtocolError("a decision does not name the sums of all stages")
    return commit
