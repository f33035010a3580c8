"""Every error of shoal. The class shows whose fault it is, and which side can act on it.

    ShoalError
      UsageError             the caller asked for something impossible (fix the call)
        ModelError             ... the model directory is missing, damaged or not supported
      LocalProtocolError     our own code violated the protocol (a bug of ours)
      RemoteProtocolError    the other end violated the protocol, or is not who it claims to be
        NewerRecordError       ... or a newer version of shoal made its record; update ours
      RefusedError           the other end understood and declined: a typed answer from the wire
        CacheFullError         ... because its KV cache is full; try again later or elsewhere
        NotAMemberError        ... because its swarm is private and we did not prove membership
      UnavailableError       no fault that can be assigned: broken, silent or unreachable
        SilentError            ... silent past a deadline; may be alive and slow
        NotDialledError        ... too much was dialled in vain where it is said to be
        StaleAnnouncementError ... what is there is not what the peer announced
        RouteError             ... no peer serves some of the blocks; names them
        DirectoryError         ... the directory cannot be reached or refuses us
          WrongSwarmError        ... the swarm that was found does not match our join code
          RevokedError           ... the owner of the swarm has revoked us
          P2pdEndedError         ... the p2pd of this machine ended; no peer is at fault

Only the layer that can act on an error catches it. Errors of other libraries are translated where
we call these libraries, and keep the original as `__cause__`.
"""

from collections.abc import Sequence
from enum import IntEnum
from typing import Self


class ShoalError(Exception):
    """Base class of all errors that shoal raises on purpose; the message says what to do."""

    def __copy__(self) -> Self:
        """Return an error to raise when this one is kept: what is raised keeps all its frames."""
        copied = type(self).__new__(type(self), *self.args)
        copied.__dict__.update(self.__dict__)
        return copied


class UsageError(ShoalError, ValueError):
    """The caller asked for something impossible; nothing was changed."""


class ModelError(UsageError):
    """The model directory is missing, damaged, of an unknown family or in an unsafe format."""


class LocalProtocolError(ShoalError):
    """Our end tried something that the protocol forbids; nothing was sent."""


class RemoteProtocolError(ShoalError):
    """The other end sent something that the protocol forbids; its message was not applied."""


class NewerRecordError(RemoteProtocolError):
    """A record has something that only newer versions of shoal know; updating ours helps."""


class ErrorCode(IntEnum):
    """Why a message was declined; the numbers are part of the wire format."""

    BAD_FRAME = 1
    BAD_VERSION = 2
    UNKNOWN_SESSION = 3
    WRONG_MODEL = 4
    WRONG_SPAN = 5
    TOO_LONG = 6
    CACHE_FULL = 7
    DRAINING = 8
    BAD_VALUES = 9
    BUSY = 10
    INTERNAL = 11
    NEXT_UNREACHABLE = 12
    LOG_INCOMPLETE = 13
    NOT_A_MEMBER = 16  # of a private swarm (said before any message), or of a training run
    OUT_OF_MEMORY = 17
    UNKNOWN_ADAPTER = 18
    NO_ROOM_FOR_ADAPTER = 19
    OTHER_COMPUTE_CLASS = 20
    LEFT_OUT = 21  # a training run does not take this peer back for a while


class RefusedError(ShoalError):
    """The other end declined with a typed answer.

    `code` is machine readable; `retry_after_seconds` is None when trying again will not help.
    """

    def __init__(
        self, code: ErrorCode, detail: str, retry_after_seconds: float | None = None
    ) -> None:
        super().__init__(detail)
        self.code = code
        self.retry_after_seconds = retry_after_seconds


class CacheFullError(RefusedError):
    """A peer's KV cache has no room for what was asked."""

    def __init__(self, detail: str, retry_after_seconds: float | None = None) -> None:
        super().__init__(ErrorCode.CACHE_FULL, detail, retry_after_seconds)


class NotAMemberError(RefusedError):
    """A peer of a private swarm refused us: we hold no secret, or that of another swarm."""

    def __init__(self, detail: str, has_secret: bool) -> None:
        super().__init__(ErrorCode.NOT_A_MEMBER, detail)
        self.has_secret = has_secret


class UnavailableError(ShoalError):
    """A peer or service cannot be reached, has gone away or stays silent past a deadline."""


class SilentError(UnavailableError):
    """A peer did not answer before the deadline; it may be dead, paused or only slow."""


class NotDialledError(UnavailableError):
    """Nobody was dialled, since many dials of that host have failed: that may be others' fault."""


class StaleAnnouncementError(UnavailableError):
    """A peer announced something else than what is found there.

    That need not be its fault: it was restarted with other blocks, or its port went to another.
    """


class DirectoryError(UnavailableError):
    """The directory cannot be joined, read or written."""


class WrongSwarmError(DirectoryError):
    """The directory belongs to another swarm than the one we looked for."""


class NobodyAnswersError(DirectoryError):
    """None of the peers that we join through can be reached, which may change."""


class RevokedError(DirectoryError):
    """The owner of the swarm has revoked us: members ignore what we announce."""


class P2pdEndedError(DirectoryError):
    """The p2pd of this machine ended while it was needed, which says nothing of any peer."""


class RouteError(UnavailableError):
    """No route covers the blocks that are needed; `missing` holds their spans."""

    def __init__(self, detail: str, missing: Sequence[object] = ()) -> None:
        super().__init__(detail)
        self.missing = tuple(missing)
