"""What a client remembers of each peer: how fast it answered, what it did wrong, and whether it is
avoided for that.
"""

from collections.abc import Collection
from dataclasses import dataclass
from enum import IntEnum
from statistics import median

from ...protocol.errors import (
    ErrorCode,
    RefusedError,
    RemoteProtocolError,
    SilentError,
    StaleAnnouncementError,
    UnavailableError,
)
from ...protocol.ids import PeerId
from ...protocol.net.clock import Clock
from ...protocol.net.retry import Retry
from ...protocol.records.announcements import Announcement
from ...protocol.records.swarm_view import SwarmView
from .bandwidth import Bandwidth, PeerLinks
from .deadlines import AnswerTimes
from .route import Hop

_FIRST_QUARANTINE_SECONDS = 15.0
_LONGEST_QUARANTINE_SECONDS = 600.0

_MEMORY_SECONDS = 3600.0
"""How long a peer is remembered that is not announced any more; longer than any quarantine."""

NO_DOUBT, _UNPROVEN = -1, 0
"""What is wrong with peers in no quarantine: nothing, or that they failed us and never worked."""


class Fault(IntEnum):
    """What a peer in quarantine did; the worse, the later it is asked when nobody else is left."""

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


class LostHopError(UnavailableError):
    """A hop has to be replaced. It is hung up on, and its peer blamed; `__cause__` says why."""

    def __init__(self, hop: Hop, detail: str) -> None:
        super().__init__(detail)
        self.hop = hop

    @property
    def what_happened(self) -> str:
        """What happened to the peer, as the end of a sentence that begins with its name."""
        cause = self.__cause__
        if isinstance(cause, RefusedError):
            return _LOSSES.get(cause.code, WAS_LOST)
        return "did not answer in time" if isinstance(cause, SilentError) else WAS_LOST


class Refusals:
    """Who declined, for good, what one hop is asked: these peers are not asked again."""

    def __init__(self) -> None:
        self._lost: dict[PeerId, tuple[Hop, RefusedError]] = {}

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
        return [hop for hop, refusal in self._lost.values() if refusal.code in _QUESTION_CODES]

    def note(self, lost: LostHopError) -> None:
        """Note a refusal, if the hop was lost by one that is for good."""
        refusal = lost.__cause__
        if not isinstance(refusal, RefusedError):
            return
        if refusal.code in _QUESTION_CODES or _is_hopeless(refusal):
            self._lost[lost.hop.peer.peer_id] = lost.hop, refusal


class Trouble:
    """What went wrong with one step or pass at one place so far: who declined it for good, and how
    long to go on with others.
    """

    def __init__(self, retry: Retry) -> None:
        self.refusals = Refusals()
        self.retry = retry


@dataclass
class _Quarantine:
    """Why a peer is not used for a while. `sequence` is the announcement that was not kept."""

    until: float
    seconds: float
    sequence: int
    fault: Fault


class PeerBook:
    """The record of all peers of one swarm, shared by all sessions and passes of a client.

    `revision` counts round trips that were measured and views that were read: what follows from
    either is to be found anew then.
    """

    def __init__(self, view: SwarmView, clock: Clock) -> None:
        self._clock = clock
        self._quarantines: dict[PeerId, _Quarantine] = {}
        self._times: dict[PeerId, AnswerTimes] = {}
        self._seen_at: dict[PeerId, float] = {}
        self._taking_passes: set[PeerId] = set()
        self.rtts_seconds: dict[PeerId, float] = {}
        self.bandwidth = Bandwidth()
        """Of the line of this client."""
        self.links = PeerLinks(clock)
        self.view = view
        self.revision = 0

    def __repr__(self) -> str:
        return f"<PeerBook: {len(self._quarantines)} in quarantine>"

    def note_view(self, view: SwarmView) -> None:
        """Take in what peers announce now, and drop what is known of those that left long ago:
        identities are free and many.
        """
        self.view, now = view, self._clock.now()
        self.revision += 1
        self._seen_at |= {peer.peer_id: now for peer in view.peers}
        for peer_id in {*self._times, *self.rtts_seconds, *self._quarantines, *self._taking_passes}:
            self._seen_at.setdefault(peer_id, now)
        absent = [p for p, at in self._seen_at.items() if now - at > _MEMORY_SECONDS]
        self.links.forget(absent)
        for peer_id in absent:
            del self._seen_at[peer_id]
            self._times.pop(peer_id, None)
            self.rtts_seconds.pop(peer_id, None)
            self._quarantines.pop(peer_id, None)
            self._taking_passes.discard(peer_id)

    def find_hosts(self, block: int, exclude: Collection[PeerId]) -> list[Announcement]:
        """Return those of whom a block's hosts are least in doubt; liars are not among them."""
        doubts = self.list_doubts()
        hosts: dict[int, list[Announcement]] = {}
        for peer in self.view.serving(block):
            doubt = doubts.get(peer.peer_id, NO_DOUBT)
            if peer.peer_id not in exclude and doubt not in (Fault.STALE, Fault.LYING):
                hosts.setdefault(doubt, []).append(peer)
        return hosts[min(hosts)] if hosts else []

    def list_by_doubt(self) -> list[Announcement]:
        """Return who serves blocks, those that have worked for us first; liars are not among them.

        Who is in quarantine comes last.
        """
        doubts = self.list_doubts()
        peers = [peer for peer in self.view.online if doubts.get(peer.peer_id) != Fault.LYING]

        def doubt(peer: Announcement) -> tuple[int, bool]:
            peer_id = peer.peer_id
            return doubts.get(peer_id, NO_DOUBT), not self._has_worked(peer_id)

        return sorted(peers, key=doubt)

    def note_pass(self, peer_id: PeerId) -> None:
        """Note that a peer took a pass: forget what it did wrong."""
        self._taking_passes.add(peer_id)
        self._quarantines.pop(peer_id, None)

    def list_doubts(self) -> dict[PeerId, int]:
        """Return the peers to use only if nobody else is there, and how reluctantly.

        One that failed us and never worked stays among them when the quarantine is over: it may be
        a black hole, of which there can be as many as somebody likes.
        """
        doubts: dict[PeerId, int] = {}
        for peer_id, quarantine in self._quarantines.items():
            peer = self.view.find(peer_id)
            if peer is not None and self.is_quarantined(peer):
                doubts[peer_id] = quarantine.fault
            elif peer is not None and not self._has_worked(peer_id):
                doubts[peer_id] = _UNPROVEN
        return doubts

    def _has_worked(self, peer_id: PeerId) -> bool:
        times = self._times.get(peer_id)
        return peer_id in self._taking_passes or (times is not None and times.has_answered)

    @property
    def avoided(self) -> frozenset[PeerId]:
        """The peers in quarantine that are announced."""
        return frozenset(peer.peer_id for peer in self.view.peers if self.is_quarantined(peer))

    def is_quarantined(self, peer: Announcement) -> bool:
        """Return whether a peer is to be avoided: not for ever, and not once it has come back."""
        quarantine = self._quarantines.get(peer.peer_id)
        return (
            quarantine is not None
            and self._clock.now() < quarantine.until
            and not self._has_come_back(peer, quarantine)
        )

    def _has_come_back(self, peer: Announcement, quarantine: _Quarantine) -> bool:
        if peer.sequence <= quarantine.sequence or quarantine.fault is Fault.LYING:
            return False
        return quarantine.fault is Fault.STALE or self._has_worked(peer.peer_id)

    def quarantine(self, peer: Announcement, fault: Fault) -> None:
        """Avoid a peer that failed us, at once and for longer each time it comes back.

        What is stale is one announcement, not the next. Otherwise a newer one ends it if the peer
        has worked before: it was restarted or is alive after all. Not so for one that lied or never
        worked: announcing costs nothing. Many sessions may tell of one failure; it counts once.
        """
        previous = self._quarantines.get(peer.peer_id)
        newest = self.view.find(peer.peer_id) or peer
        if fault is Fault.STALE and peer.sequence < newest.sequence:
            return
        if previous is None:
            seconds = _FIRST_QUARANTINE_SECONDS
        elif self.is_quarantined(newest):
            seconds = previous.seconds
            fault = max(fault, previous.fault)
        else:
            seconds = min(2 * previous.seconds, _LONGEST_QUARANTINE_SECONDS)
        self._quarantines[peer.peer_id] = _Quarantine(
            self._clock.now() + seconds, seconds, newest.sequence, fault
        )

    def blame(
        self,
        hop: Hop,
        error: UnavailableError | RemoteProtocolError | RefusedError,
        forgiven: set[PeerId],
    ) -> LostHopError:
        """Have a peer avoided for a failure of its own; return what to raise of the failure.

        A peer that was restarted has lost the session and is sound: that is `forgiven` once.
        """
        if isinstance(error, RefusedError):
            is_forgiven = (
                error.code is ErrorCode.UNKNOWN_SESSION and hop.peer.peer_id not in forgiven
            )
            if is_forgiven:
                forgiven.add(hop.peer.peer_id)
            elif error.code not in _QUESTION_CODES:  # those are not the peer's doing
                self.quarantine(hop.peer, _FAULTS.get(error.code, Fault.BROKEN))
        elif isinstance(error, RemoteProtocolError):
            self.quarantine(hop.peer, Fault.LYING)
        elif isinstance(error, StaleAnnouncementError):
            self.quarantine(hop.peer, Fault.STALE)
        elif isinstance(error, SilentError):
            self.times(hop.peer.peer_id).note_silence()
            self.quarantine(hop.peer, Fault.SILENT)
        else:
            self.quarantine(hop.peer, Fault.BROKEN)
        return LostHopError(hop, str(error))

    def note_answer(
        self, hop: Hop, num_tokens: int, seconds: float, way_seconds: float | None = None
    ) -> None:
        """Note that a hop took a step of so many tokens: forget what its peer did wrong.

        `way_seconds` are what is expected of the ways there and on; None: the round trip.
        """
        peer_id = hop.peer.peer_id
        if way_seconds is None:
            way_seconds = self.rtts_seconds.get(peer_id, 0.0)
        self.times(peer_id).note(num_tokens, seconds, way_seconds, len(hop.span))
        self._quarantines.pop(peer_id, None)

    def note_rtt(self, peer_id: PeerId, seconds: float) -> None:
        """Note a measured round trip; the newest counts."""
        self.rtts_seconds[peer_id] = seconds
        self.revision += 1

    def rtt_seconds(self, peer_id: PeerId) -> float | None:
        """Return the newest measured round trip, None if there is none."""
        return self.rtts_seconds.get(peer_id)

    def times(self, peer_id: PeerId) -> AnswerTimes:
        """Return the record of a peer's answer times."""
        times = self._times.get(peer_id)
        if times is None:
            times = self._times[peer_id] = AnswerTimes()
        return times

    def times_of_others(self, peer_id: PeerId) -> list[AnswerTimes]:
        """Return the records of all peers but one."""
        return [times for other, times in self._times.items() if other != peer_id]

    def measure_block_seconds(self) -> dict[PeerId, float]:
        """Return what a block takes for one token at each peer that has worked for us."""
        used = ((peer_id, times.block_seconds) for peer_id, times in self._times.items())
        return {peer_id: median(seconds) for peer_id, seconds in used if seconds}


def _is_hopeless(error: RefusedError) -> bool:
    """Return whether a peer said that what we want, or our adapter, will never fit there."""
    is_full = error.code in (ErrorCode.CACHE_FULL, ErrorCode.NO_ROOM_FOR_ADAPTER)
    return is_full and error.retry_after_seconds is None
