"""The decisions that steer a training run: a chain in which each is chosen by a majority.

A decision commits an update or changes the members. Number k is chosen by single-decree Paxos
(Lamport, "Paxos Made Simple", 2001, section 2), whose acceptors are the members that decision k - 1
names: the roster. So a change of members is a decision like any other, and of two halves of a run
at most one goes on. One of two members is no majority: to survive a kill, a run needs three members
or more, of any stages. A member acts on a message as follows:

    number of the message   from                action
    other than ours         anybody             tell it our newest decision, or learn a newer one
    ours                    not on the roster   RemoteProtocolError
    ours                    a member            Paxos, if we are on the roster ourselves
    a newer decision        the roster, or      take it, and forget what belongs to older numbers
                            whom it names

*Nothing is on disk.* An acceptor that forgets a promise would let a second decision through. None
can: a process that comes back after a crash has another member id, and is no acceptor before a
decision names it, so a crash is a member that stays silent for good. Where a majority crashes, the
chain ends, and the run has to begin another one. Where a decision removes members, they
have to stay until a majority of those it names knows it.

*Members crash, pause and are cut off, and the network loses, repeats and reorders messages; but
nobody lies.* That is why one member's word is enough to skip to the newest decision, however many
were missed, and why only the newest is kept: its value has to say all that a laggard needs. A
member may be named by decisions that we have missed, so we take its word that they exist, and
cannot tell it from a stranger that names itself. The caller hands over messages only of this
chain, under the ids that the transport has proved, and of processes that may take part in the run.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from .. import limits
from ..errors import LocalProtocolError, RemoteProtocolError
from ..ids import MemberId

DIGEST_BYTES = 32


class Member(NamedTuple):
    """One process of a run."""

    id: MemberId
    stage: int
    """The stage that it holds."""


@dataclass(frozen=True, slots=True)
class Decision:
    """One entry of the chain.

    >>> first = Decision(0, bytes(32), (Member(MemberId("a"), 0), Member(MemberId("b"), 1)), b"")
    >>> second = first.make_next(first.members, b"update 1")
    >>> second.number, second.previous == first.digest, second.majority
    (1, True, 2)
    """

    number: int
    previous: bytes
    """Digest of the decision before it; of the first one, whatever names the run."""
    members: tuple[Member, ...]
    """The members that choose the next one: the holders of all stages."""
    value: bytes

    def __post_init__(self) -> None:
        if not 0 <= self.number <= limits.MAX_DECISIONS:
            raise ValueError(f"{self.number} is no number of a decision")
        if len(self.previous) != DIGEST_BYTES:
            raise ValueError(f"a digest has {DIGEST_BYTES} bytes, not {len(self.previous)}")
        if not 1 <= len(self.members) <= limits.MAX_RUN_MEMBERS:
            raise ValueError(f"a run cannot have {len(self.members)} members")
        if len(set(self.roster)) < len(self.members):
            raise ValueError("a run has each member once")
        for member in self.members:
            check_member_id(member.id)
            if not 0 <= member.stage < limits.MAX_BLOCKS:
                raise ValueError(f"{member.stage} is no stage")
        if len(self.value) > limits.MAX_DECISION_VALUE_BYTES:
            raise ValueError(f"a decision cannot hold {len(self.value)} bytes")

    @property
    def roster(self) -> tuple[MemberId, ...]:
        """The ids of the members."""
        return tuple(member.id for member in self.members)

    @property
    def majority(self) -> int:
        """How many members make the smallest quorum: any two quorums have one in common."""
        return len(self.members) // 2 + 1

    @property
    def digest(self) -> bytes:
        """The sha256 of all fields, and so of the whole chain."""
        fields = [self.number, self.previous.hex(), self.members, self.value.hex()]
        return hashlib.sha256(json.dumps(fields, separators=(",", ":")).encode()).digest()

    def make_next(self, members: Sequence[Member], value: bytes) -> "Decision":
        """Return a decision to propose for the next number."""
        return Decision(self.number + 1, self.digest, tuple(members), value)


@dataclass(frozen=True, order=True, slots=True)
class Ballot:
    """One attempt of one member to have a decision chosen. The higher one prevails."""

    attempt: int
    proposer: MemberId

    def __post_init__(self) -> None:
        if not 1 <= self.attempt <= limits.MAX_BALLOT_ATTEMPTS:
            raise ValueError(f"{self.attempt} is no attempt of a ballot")
        check_member_id(self.proposer)


@dataclass(frozen=True, slots=True)
class Prepare:
    """A proposer asks for promises, and for what was accepted before. (Phase 1a.)"""

    number: int
    ballot: Ballot


@dataclass(frozen=True, slots=True)
class Accept:
    """A proposer that has the promises of a majority asks to accept its decision. (Phase 2a.)"""

    ballot: Ballot
    decision: Decision

    @property
    def number(self) -> int:
        return self.decision.number


@dataclass(frozen=True, slots=True)
class Promise:
    """An acceptor will take part in no lower ballot. (Phase 1b.)"""

    number: int
    ballot: Ballot
    accepted: Accept | None
    """What it accepted last, which the proposer has to carry on."""


@dataclass(frozen=True, slots=True)
class Accepted:
    """An acceptor has accepted the decision of a ballot. (Phase 2b.)"""

    number: int
    ballot: Ballot


@dataclass(frozen=True, slots=True)
class Refusal:
    """An acceptor has promised a higher ballot: the proposer has to outbid that one."""

    number: int
    promised: Ballot


@dataclass(frozen=True, slots=True)
class Decided:
    """The newest decision that its sender knows. Whoever knows a newer one answers with that."""

    decision: Decision


_Balloting = Prepare | Promise | Accept | Accepted | Refusal
Message = _Balloting | Decided
Outgoing = list[tuple[MemberId, Message]]
"""Messages, and the members that they go to."""


@dataclass(slots=True)
class _Proposal:
    """Our own attempt to have a decision chosen."""

    ballot: Ballot
    wanted: Decision
    promises: dict[MemberId, Accept | None] = field(default_factory=dict[MemberId, Accept | None])
    accept: Accept | None = None
    """The request to accept that went to the roster once a majority had promised."""
    quorum: set[MemberId] = field(default_factory=set[MemberId])
    """Those that have accepted it."""


@dataclass(slots=True)
class _Undecided:
    """The messages of a member about the next number, until that is decided."""

    promised: Ballot | None = None
    accepted: Accept | None = None
    highest_attempt: int = 0
    proposal: _Proposal | None = None


class DecisionLog:
    """What one member of a run knows of its decisions, and its part in the next one.

    Owned by whoever sends its messages and reads a clock. A newcomer's log begins with the newest
    decision that it was told. There is one log for a member id, ever: see above.
    """

    def __init__(self, member_id: MemberId, newest: Decision) -> None:
        self.member_id = member_id
        self.newest = newest
        """The newest decision known here; the caller looks whether it has changed."""
        self._undecided = _Undecided()

    def __repr__(self) -> str:
        state = "member" if self.is_member else "outside"
        return f"<DecisionLog {self.member_id} ({state}), decision {self.newest.number}>"

    @property
    def number(self) -> int:
        """The number that is to be decided next."""
        return self.newest.number + 1

    @property
    def is_member(self) -> bool:
        """Whether we are on the roster: not yet, or not any more, as far as we know."""
        return self.member_id in self.newest.roster

    def propose(self, decision: Decision) -> Outgoing:
        """Begin a ballot, or a higher one, for a decision with the next number.

        Another one may be chosen in its place, also one that was proposed before: look at `newest`.
        When no decision comes, propose again after a deadline, which differs between members or
        has a random part: proposers that always outbid each other decide nothing.

        Raises LocalProtocolError when the decision is no successor of the newest, or we are not
        on the roster.
        """
        if not self.is_member:
            raise LocalProtocolError(f"decision {self.newest.number} names others than us")
        if not self._is_next(decision):
            raise LocalProtocolError(
                f"decision {decision.number} does not follow decision {self.newest.number}"
            )
        promised = self._undecided.promised
        attempt = max(self._undecided.highest_attempt, promised.attempt if promised else 0) + 1
        ballot = Ballot(attempt, self.member_id)
        self._undecided.proposal = _Proposal(ballot, decision)
        return self._take_own(self._to_roster(Prepare(self.number, ballot)))

    def receive(self, sender: MemberId, message: Message) -> Outgoing:
        """Take a message and return the answers to it; the sender's id has been proved.

        Raises RemoteProtocolError when the sender may not send it; nothing was changed.
        """
        if isinstance(message, Decided):
            return self._handle_decided(sender, message.decision)
        if message.number != self.number:
            is_late_answer = not isinstance(message, Prepare | Accept)
            return [] if is_late_answer else [(sender, Decided(self.newest))]
        if sender not in self.newest.roster:
            raise RemoteProtocolError(
                f"{sender} is no member that decision {self.newest.number} names"
            )
        if not self.is_member:
            return []
        return self._take_own(self._handle(sender, message))

    def _handle_decided(self, sender: MemberId, decision: Decision) -> Outgoing:
        if decision.number < self.newest.number:
            return [(sender, Decided(self.newest))]
        if decision.number == self.newest.number:
            if decision != self.newest:
                raise RemoteProtocolError(f"{sender} has another decision {decision.number}")
            return []
        if sender in self.newest.roster or sender in decision.roster:
            if decision.number == self.number:
                self._check_next(sender, decision)
            self._learn(decision)
        return []  # others may have been members between: not at fault, but nobody we know

    def _handle(self, sender: MemberId, message: _Balloting) -> Outgoing:
        """Do what Paxos does with a message of the next number, from a member."""
        match message:
            case Prepare():
                return self._handle_prepare(sender, message)
            case Accept():
                return self._handle_accept(sender, message)
            case Promise():
                return self._handle_promise(sender, message)
            case Accepted():
                return self._handle_accepted(sender, message)
            case Refusal():
                highest = max(self._undecided.highest_attempt, message.promised.attempt)
                self._undecided.highest_attempt = highest
                return []

    def _handle_prepare(self, sender: MemberId, prepare: Prepare) -> Outgoing:
        refusal = self._bid(sender, prepare.ballot)
        if refusal is not None:
            return [(sender, refusal)]
        return [(sender, Promise(self.number, prepare.ballot, self._undecided.accepted))]

    def _handle_accept(self, sender: MemberId, accept: Accept) -> Outgoing:
        self._check_next(sender, accept.decision)
        refusal = self._bid(sender, accept.ballot)
        if refusal is not None:
            return [(sender, refusal)]
        self._undecided.accepted = accept
        return [(sender, Accepted(self.number, accept.ballot))]

    def _bid(self, sender: MemberId, ballot: Ballot) -> Refusal | None:
        """Promise a ballot, the same one again too, unless a higher one is promised."""
        if ballot.proposer != sender:
            raise RemoteProtocolError(f"{sender} sent a ballot of {ballot.proposer}")
        promised = self._undecided.promised
        if promised is not None and ballot < promised:
            return Refusal(self.number, promised)
        self._undecided.promised = ballot
        return None

    def _handle_promise(self, sender: MemberId, promise: Promise) -> Outgoing:
        if promise.accepted is not None:
            self._check_next(sender, promise.accepted.decision)
        proposal = self._undecided.proposal
        if proposal is None or proposal.ballot != promise.ballot or proposal.accept is not None:
            return []
        proposal.promises[sender] = promise.accepted
        if len(proposal.promises) < self.newest.majority:
            return []
        # What was accepted in the highest ballot may have been chosen already.
        accepted = [each for each in proposal.promises.values() if each is not None]
        newest = max(accepted, key=lambda each: each.ballot, default=None)
        decision = proposal.wanted if newest is None else newest.decision
        proposal.accept = Accept(proposal.ballot, decision)
        return self._to_roster(proposal.accept)

    def _handle_accepted(self, sender: MemberId, accepted: Accepted) -> Outgoing:
        proposal = self._undecided.proposal
        if proposal is None or proposal.ballot != accepted.ballot or proposal.accept is None:
            return []
        proposal.quorum.add(sender)
        if len(proposal.quorum) < self.newest.majority:
            return []
        decision = proposal.accept.decision
        concerned = dict.fromkeys((*self.newest.roster, *decision.roster))
        self._learn(decision)
        told = Decided(decision)
        return [(member, told) for member in concerned if member != self.member_id]

    def _learn(self, decision: Decision) -> None:
        """Go on to the number after a decision. What was promised belonged to the one before."""
        self.newest = decision
        self._undecided = _Undecided()

    def _is_next(self, decision: Decision) -> bool:
        return decision.number == self.number and decision.previous == self.newest.digest

    def _check_next(self, sender: MemberId, decision: Decision) -> None:
        if not self._is_next(decision):
            raise RemoteProtocolError(
                f"{sender} sent a decision that does not follow our number {self.newest.number}"
            )

    def _to_roster(self, message: Message) -> Outgoing:
        return [(member, message) for member in self.newest.roster]

    def _take_own(self, outgoing: Outgoing) -> Outgoing:
        """Handle what we send to ourselves and the answers to it; return what goes to others."""
        to_others: Outgoing = []
        while outgoing:
            receiver, message = outgoing.pop(0)
            if receiver == self.member_id:
                assert not isinstance(message, Decided)  # the sender knows it already
                outgoing += self._handle(receiver, message)
            else:
                to_others.append((receiver, message))
        return to_others


def check_member_id(member_id: str) -> None:
    """Raise ValueError for what is no id of a member."""
    if not 1 <= len(member_id) <= limits.MAX_MEMBER_ID_CHARACTERS or not member_id.isprintable():
        raise ValueError("a malformed member id")
