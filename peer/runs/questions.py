"""The interface by which members of a run ask each other, with or without a network."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from ...protocol.errors import (
    ErrorCode,
    RefusedError,
    RemoteProtocolError,
    SilentError,
    UnavailableError,
)
from ...protocol.ids import SESSION_ID_BYTES, MemberId, SessionId
from ...protocol.messages.fields import Message
from ...protocol.messages.runs import Question

FAILURES = (UnavailableError, RefusedError, RemoteProtocolError)
"""Failures of a member that is asked; another member may answer."""

_BUSY_SECONDS = 1.0

_Kind = TypeVar("_Kind", bound=Message)


class StillBusyError(SilentError):
    """A member has said until the deadline that it is at work, and has not answered."""


@dataclass(frozen=True)
class MemberAnswer:
    """A message, and the bytes that follow it."""

    message: Message
    payload: bytes | memoryview = b""

    def check_kind(self, kind: type[_Kind]) -> _Kind:
        """Return the message if it is of this kind. Raises RemoteProtocolError."""
        if not isinstance(self.message, kind):
            name = type(self.message).__name__
            raise RemoteProtocolError(f"{name} came in place of {kind.__name__}")
        return self.message


AnswerMember = Callable[[Question, bytes | memoryview, MemberId], Awaitable[MemberAnswer]]
"""Answers a question and the bytes that follow it, from a member that has proved its id."""


NoteBytes = Callable[[int], None]
"""Is told how many bytes of an answer have come."""


def ignore_bytes(num_bytes: int) -> None:
    """Note nothing."""


class FrameCounts(Protocol):
    """Counts the frames of questions and answers."""

    def note_sent(self, frame: bytes) -> None:
        """Count a frame that has left."""
        ...

    def note_received(self, frame: bytes) -> None:
        """Count a frame that has come."""
        ...


class Members(Protocol):
    """The members of a run, by their ids."""

    async def ask(
        self,
        member: MemberId,
        question: Question,
        payload: bytes | memoryview = b"",
        most_bytes: int = 0,
        note_bytes: NoteBytes = ignore_bytes,
    ) -> MemberAnswer:
        """Ask a member something, and return its answer, which has at most so many bytes.

        Raises RefusedError, RemoteProtocolError or UnavailableError.
        """
        ...


def make_question_id() -> SessionId:
    """Return a fresh id for a question."""
    return SessionId(secrets.token_bytes(SESSION_ID_BYTES))


def make_busy(detail: str) -> RefusedError:
    """Return the refusal of a question that may be answered at the next try."""
    return RefusedError(ErrorCode.BUSY, detail, _BUSY_SECONDS)
