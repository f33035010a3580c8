"""Messages of the chain of decisions to their form on the wire, and back."""

from __future__ import annotations

from dataclasses import replace

from ...protocol.errors import RemoteProtocolError
from ...protocol.ids import SessionId
from ...protocol.messages.runs import Vote, VoteKind, WireBallot, WireDecision, WireMember
from ...protocol.runs.decisions import (
    Accept,
    Accepted,
    Ballot,
    Decided,
    Decision,
    Member,
    Message,
    Prepare,
    Promise,
    Refusal,
)


def write_vote(question: SessionId, message: Message) -> Vote:
    """Return a message of the chain as it travels."""
    match message:
        case Prepare(number, ballot):
            return Vote(question, VoteKind.PREPARE, number, _write_ballot(ballot))
        case Promise(number, ballot, accepted):
            vote = Vote(question, VoteKind.PROMISE, number, _write_ballot(ballot))
            if accepted is None:
                return vote
            decision = _write_decision(accepted.decision)
            return replace(vote, accepted=_write_ballot(accepted.ballot), decision=decision)
        case Accept(ballot, decision):
            written = _write_decision(decision)
            return Vote(question, VoteKind.ACCEPT, 0, _write_ballot(ballot), None, written)
        case Accepted(number, ballot):
            return Vote(question, VoteKind.ACCEPTED, number, _write_ballot(ballot))
        case Refusal(number, promised):
            return Vote(question, VoteKind.REFUSAL, number, _write_ballot(promised))
        case Decided(decision):
            return Vote(question, VoteKind.DECIDED, 0, None, None, _write_decision(decision))


def read_vote(vote: Vote) -> Message:
    """Return the message that came. Raises RemoteProtocolError unless it is complete."""
    try:
        return _read_vote(vote)
    except ValueError as error:
        raise RemoteProtocolError(f"a malformed {vote.kind.name} came: {error}") from error


def _read_vote(vote: Vote) -> Message:
    number = vote.number
    match vote.kind:
        case VoteKind.PREPARE:
            return Prepare(number, _read_ballot(vote.ballot))
        case VoteKind.PROMISE if vote.accepted is None:
            return Promise(number, _read_ballot(vote.ballot), None)
        case VoteKind.PROMISE:
            accepted = Accept(_read_ballot(vote.accepted), _read_decision(vote.decision))
            return Promise(number, _read_ballot(vote.ballot), accepted)
        case VoteKind.ACCEPT:
            return Accept(_read_ballot(vote.ballot), _read_decision(vote.decision))
        case VoteKind.ACCEPTED:
            return Accepted(number, _read_ballot(vote.ballot))
        case VoteKind.REFUSAL:
            return Refusal(number, _read_ballot(vote.ballot))
        case VoteKind.DECIDED:
            return Decided(_read_decision(vote.decision))


def _write_ballot(ballot: Ballot) -> WireBallot:
    return WireBallot(ballot.attempt, ballot.proposer)


def _read_ballot(ballot: WireBallot | None) -> Ballot:
    if ballot is None:
        raise ValueError("it has no ballot")
    return Ballot(ballot.attempt, ballot.proposer)


def _write_decision(decision: Decision) -> WireDecision:
    members = tuple(
        WireMember(member.id, 0 if member.stage is None else member.stage + 1)
        for member in decision.members
    )
    return WireDecision(decision.number, decision.previous, members, decision.value)


def _read_decision(decision: WireDecision | None) -> Decision:
    if decision is None:
        raise ValueError("it has no decision")
    members = tuple(
        Member(each.id, each.stage - 1 if each.stage else None) for each in decision.members
    )
    return Decision(decision.number, decision.previous, members, decision.value)
