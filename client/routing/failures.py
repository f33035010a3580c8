"""What can go wrong at a peer, whose fault that is, and which failures are for good."""

from __future__ import annotations

from enum import IntEnum

from ...protocol.errors import (
    ErrorCode,
    RefusedError,
    RemoteProtocolError,
    SilentError,
    StaleAnnouncementError,
    UnavailableError,
)

PeerFailure = UnavailableError | RemoteProtocolError | RefusedError
"""What a peer may cause, by which a caller turns to another one."""


class Fault(IntEnum):
    """The fault of a peer in quarantine. The worse it is, the later the peer is asked again."""

    SILENT = 1
    """It did not answer in time, or had no room: it may be sound and only slow."""

    BROKEN = 2
    """It hung up, could not be reached, or failed to compute."""

    STALE = 3
    """It is not what that announcement says; it is asked again once there is a newer one."""

    LYING = 4
    """It broke the protocol; it is not asked at all."""


# Answers that blame the question: no peer could take it. Any number of those who say so may be one
# liar, and the client has checked the question: the caller hears it when nobody is left to ask.
_QUESTION_CODES = frozenset({ErrorCode.BAD_FRAME, ErrorCode.BAD_VALUES, ErrorCode.TOO_LONG})
# Of the others, answers of a peer that is sound and may be asked again when there is no other, or
# that serves something else by now. Whoever gives another answer is broken.
_FAULTS = {
    ErrorCode.CACHE_FULL: Fault.SILENT,
    ErrorCode.BUSY: Fault.SILENT,
    ErrorCode.DRAINING: Fault.SILENT,
    ErrorCode.UNKNOWN_ADAPTER: Fault.SILENT,
    ErrorCode.NO_ROOM_FOR_ADAPTER: Fault.SILENT,
    ErrorCode.WRONG_MODEL: Fault.STALE,
    ErrorCode.WRONG_SPAN: Fault.STALE,
}

WAS_LOST = "was lost"

# What is said of the peer of a hop, by its answer; of all others, that they were lost.
_LOSSES = {
    ErrorCode.CACHE_FULL: "had no room",
    ErrorCode.BUSY: "had no room",
    ErrorCode.DRAINING: "is leaving",
    ErrorCode.UNKNOWN_SESSION: "lost the session",
    ErrorCode.UNKNOWN_ADAPTER: "lost the adapter",
    ErrorCode.NO_ROOM_FOR_ADAPTER: "had no room for the adapter",
}


def find_fault(error: PeerFailure) -> Fault | None:
    """Return what a failure says of its peer; None where it says that the question is wrong."""
    if isinstance(error, RefusedError):
        return None if blames_question(error) else _FAULTS.get(error.code, Fault.BROKEN)
    if isinstance(error, RemoteProtocolError):
        return Fault.LYING
    if isinstance(error, StaleAnnouncementError):
        return Fault.STALE
    return Fault.SILENT if isinstance(error, SilentError) else Fault.BROKEN


def find_loss(error: BaseException | None) -> str:
    """Return what happened to a peer, as the end of a sentence that begins with its name."""
    if isinstance(error, RefusedError):
        return _LOSSES.get(error.code, WAS_LOST)
    return "did not answer in time" if isinstance(error, SilentError) else WAS_LOST


def blames_question(error: RefusedError) -> bool:
    """Return whether a peer said that no peer could take what it was asked."""
    return error.code in _QUESTION_CODES


def is_for_good(error: RefusedError) -> bool:
    """Return whether it is no use to ask the same peer again: for this question, or because what we
    want, or our adapter, will never fit there.
    """
    is_full = error.code in (ErrorCode.CACHE_FULL, ErrorCode.NO_ROOM_FOR_ADAPTER)
    return blames_question(error) or (is_full and error.retry_after_seconds is None)
