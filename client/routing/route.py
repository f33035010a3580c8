"""Routes: hops, each a peer and the blocks used there; and what is said of hops that fail."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from enum import IntEnum

from ...protocol.errors import (
    ErrorCode,
    RefusedError,
    RemoteProtocolError,
    SilentError,
    StaleAnnouncementError,
    UnavailableError,
)
from ...protocol.ids import PeerId
from ...protocol.net.retry import Retry
from ...protocol.records.announcements import Announcement
from ...protocol.spans import Span


@dataclass(frozen=True)
class Hop:
    """A peer and the span used on it."""

    peer: Announcement
    span: Span

    def __repr__(self) -> str:
        return f"<Hop {self.name}>"

    @property
    def name(self) -> str:
        """Its name for people: the end of the peer's id, and the blocks."""
        return f"peer …{self.peer.peer_id[-6:]} (blocks {self.span})"


@dataclass(frozen=True)
class Route:
    """Hops that cover a span once, in order."""

    hops: tuple[Hop, ...]


@dataclass(frozen=True)
class Ends:
    """The ends of a chain: the client (None), or hops of a route of which only a part is planned.

    `before` pushes to the first hop of the chain, and its last hop pushes to `after`.
    """

    before: Announcement | None = None
    after: Announcement | None = None

    @property
    def known(self) -> list[Announcement]:
        """The peers on both sides."""
        return [peer for peer in (self.before, self.after) if peer is not None]


PeerFailure = UnavailableError | RemoteProtocolError | RefusedError
"""Errors that a peer may cause and after which a caller tries another one."""


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


# Answers that blame the question: no peer could take it. All peers that answer so may be one liar,
# and the client has checked the question: the caller gets the error when no other peer is left.
_QUESTION_CODES = frozenset({ErrorCode.BAD_FRAME, ErrorCode.BAD_VALUES, ErrorCode.TOO_LONG})
# Of the others, answers of a peer that is sound and may be asked again when there is no other, or
# that serves something else by now. A peer with any other answer is broken.
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

# What happened to the peer of a hop, by its answer; after any other answer, it was lost.
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


class LostHopError(UnavailableError):
    """A hop has to be replaced; `__cause__` says why. Its peer may be blamed, or may be sound."""

    def __init__(self, hop: Hop, detail: str, is_final: bool = False) -> None:
        """`is_final` says that the same peer need not be asked again, whatever its refusal says."""
        super().__init__(detail)
        self.hop = hop
        self.is_final = is_final

    @property
    def what_happened(self) -> str:
        """The reason, as the end of a sentence that begins with the peer's name."""
        return find_loss(self.__cause__)


@dataclass(frozen=True)
class Failover:
    """A peer that did not do its part of a session or a pass, and its replacements.

    Without replacements nobody hosts all of the blocks of a pass any more: several peers share
    them.
    """

    lost: Hop
    reason: str
    what_happened: str
    """In a few words, behind the name of the lost peer; `reason` has all of them."""
    replacements: tuple[Hop, ...]


@dataclass(frozen=True)
class Refusals:
    """Peers that declined for good what one hop is asked; they are not asked again."""

    _lost: dict[PeerId, tuple[Hop, RefusedError]] = field(
        default_factory=dict[PeerId, tuple[Hop, RefusedError]]
    )

    @property
    def peer_ids(self) -> Collection[PeerId]:
        """The peers that declined."""
        return self._lost.keys()

    @property
    def first(self) -> RefusedError | None:
        """The first refusal, None while there is none."""
        return next((refusal for _, refusal in self._lost.values()), None)

    @property
    def contradicted(self) -> list[Hop]:
        """The hops that said no peer could take it, for when another one did."""
        return [hop for hop, refusal in self._lost.values() if blames_question(refusal)]

    def note(self, lost: LostHopError) -> None:
        """Note a refusal, if the hop was lost by one that is for good."""
        refusal = lost.__cause__
        if isinstance(refusal, RefusedError) and (lost.is_final or is_for_good(refusal)):
            self._lost[lost.hop.peer.peer_id] = lost.hop, refusal


@dataclass
class Failures:
    """The failures of one step or pass at one place so far: peers that declined for good, and how
    long to go on with others.
    """

    retry: Retry
    refusals: Refusals = field(default_factory=Refusals)
