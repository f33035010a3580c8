"""What a client knows of the swarm: the newest view, measured times, and whom to avoid."""

import asyncio
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import IntEnum
from statistics import median

from ...protocol.errors import DirectoryError, RouteError
from ...protocol.ids import ModelId, PeerId
from ...protocol.net.clock import Clock
from ...protocol.net.directory import Directory
from ...protocol.net.transport import Transport
from ...protocol.records.announcements import Announcement
from ...protocol.records.coordinates import ORIGIN, Coordinate, settle
from ...protocol.records.swarm_view import SwarmView
from ...protocol.spans import Span
from .deadlines import AnswerTimes
from .landmarks import LEAST_LANDMARKS, choose_landmarks, measure_landmarks
from .line import Line
from .links import Links
from .router import Ends, Hop, Route, RoutingCosts, expect_way_seconds, plan_route

_FIRST_QUARANTINE_SECONDS = 15.0
_LONGEST_QUARANTINE_SECONDS = 600.0

_MEMORY_SECONDS = 3600.0
"""How long a peer is remembered that is not announced any more; longer than any quarantine."""

_NO_DOUBT, _UNPROVEN = -1, 0
"""What is wrong with peers in no quarantine: nothing, or that they failed us and never worked."""

_SHORT_SECONDS = 0.5
"""What the directory gets to answer even when time is up: a look is worth that much."""

_MOST_LANDMARKS = 32
"""From how many round trips a client finds out where it stands: more take longer than they give."""

_SURVEY_AGAIN_SECONDS = 600.0
"""How long a client does without its place that could not find it."""

_SETTLING_ROUNDS = 40
"""How often all of them pull until a place is found, from nowhere."""


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


@dataclass
class _Quarantine:
    """Why a peer is not used for a while. `sequence` is the announcement that was not kept."""

    until: float
    seconds: float
    sequence: int
    fault: Fault


class Swarm:
    """One model's swarm as one client sees it. Owned by the client's event loop."""

    def __init__(
        self,
        directory: Directory,
        model_id: ModelId,
        num_blocks: int,
        clock: Clock,
        rng: random.Random,
    ) -> None:
        self._directory = directory
        self._clock = clock
        self._rng = rng
        self._refreshed_at = float("-inf")
        self._quarantines: dict[PeerId, _Quarantine] = {}
        self._times: dict[PeerId, AnswerTimes] = {}
        self._rtt_seconds: dict[PeerId, float] = {}
        self._seen_at: dict[PeerId, float] = {}
        self._taking_passes: set[PeerId] = set()
        self._surveyed_at = float("-inf")
        self._coordinate: Coordinate | None = None  # until there is more to find it from
        self._way_seconds: dict[tuple[PeerId, ...], list[float]] = {}
        self.line = Line()
        self.links = Links(clock)
        self.view = SwarmView.from_announcements(model_id, (), clock.wall(), num_blocks)

    def __repr__(self) -> str:
        return f"<Swarm {self.view!r}, {len(self._quarantines)} in quarantine>"

    async def refresh(self, max_age_seconds: float = 0.0) -> SwarmView:
        """Read the directory unless the view is fresh enough, and return the view.

        Raises DirectoryError when the directory cannot be read; the old view stays.
        """
        if self._clock.now() - self._refreshed_at > max_age_seconds:
            announcements = await self._directory.lookup(self.view.model_id)
            self.view = SwarmView.from_announcements(
                self.view.model_id, announcements, self._clock.wall(), self.view.num_blocks
            )
            self._refreshed_at = self._clock.now()
            self._forget_absent()
            self._forget_ways()
        return self.view

    def _forget_absent(self) -> None:
        """Drop what is known of peers that left long ago: identities are free and many."""
        now = self._clock.now()
        self._seen_at |= {peer.peer_id: now for peer in self.view.peers}
        for peer_id in {*self._times, *self._rtt_seconds, *self._quarantines, *self._taking_passes}:
            self._seen_at.setdefault(peer_id, now)
        absent = [p for p, at in self._seen_at.items() if now - at > _MEMORY_SECONDS]
        self.links.forget(absent)
        for peer_id in absent:
            del self._seen_at[peer_id]
            self._times.pop(peer_id, None)
            self._rtt_seconds.pop(peer_id, None)
            self._quarantines.pop(peer_id, None)
            self._taking_passes.discard(peer_id)

    def _forget_ways(self) -> None:
        """Find out anew where everybody stands: something was measured, here or elsewhere."""
        self._coordinate = None
        self._way_seconds.clear()

    async def wait_for_route(
        self,
        span: Span,
        deadline: float,
        max_age_seconds: float,
        weights: Collection[str | None],
        exclude: Collection[PeerId] = (),
        needed_kv_tokens: float = 0.0,
        ends: Ends | None = None,
    ) -> Route:
        """Return a route through `span`, waiting for peers to appear until `deadline`.

        `weights` are tried in order: the formats to prefer, None for any. Peers of `exclude` and
        those in quarantine are left out; who did not lie is used when nobody else is there.
        While the directory cannot be read, the last view has to do. Room for `needed_kv_tokens`,
        counted as in announcements, makes peers cheaper. With `ends` it is a chain, else a star.

        Raises RouteError with the missing blocks once the deadline has passed, or DirectoryError
        when that is what hides the peers.
        """
        pause_seconds = 0.1
        while True:
            unread: DirectoryError | None = None
            try:
                async with asyncio.timeout(max(deadline - self._clock.now(), _SHORT_SECONDS)):
                    await self.refresh(max_age_seconds)
            except DirectoryError as error:
                unread = error
            except TimeoutError:
                unread = DirectoryError("the directory did not answer in time")
            try:
                return self._plan(span, weights, exclude, needed_kv_tokens, ends)
            except RouteError as missing:
                remaining_seconds = deadline - self._clock.now()
                if remaining_seconds <= 0:
                    raise (unread or missing) from None
            await asyncio.sleep(min(pause_seconds, remaining_seconds))
            pause_seconds = min(2 * pause_seconds, 1.0)
            max_age_seconds = 0.0

    def _plan(
        self,
        span: Span,
        weights: Collection[str | None],
        exclude: Collection[PeerId],
        needed_kv_tokens: float,
        ends: Ends | None,
    ) -> Route:
        costs = self._measure_costs(needed_kv_tokens)
        doubts = self._list_doubts()
        error: RouteError | None = None
        for tolerated in sorted({_NO_DOUBT, *doubts.values()} - {Fault.STALE, Fault.LYING}):
            unwanted = {peer_id for peer_id, doubt in doubts.items() if doubt > tolerated}
            for kind in weights:
                try:
                    avoided = unwanted.union(exclude)
                    return plan_route(self.view, span, costs, self._rng, avoided, kind, ends)
                except RouteError as missing:
                    error = missing
        assert error is not None
        raise error

    def _measure_costs(self, needed_kv_tokens: float = 0.0) -> RoutingCosts:
        used = ((peer_id, times.block_seconds) for peer_id, times in self._times.items())
        block_seconds = {peer_id: median(seconds) for peer_id, seconds in used if seconds}
        return RoutingCosts(
            self._rtt_seconds,
            block_seconds=block_seconds,
            needed_kv_tokens=needed_kv_tokens,
            cuts=self.links.cuts,
            coordinate=self._find_coordinate(),
        )

    async def survey(self, transport: Transport) -> None:
        """Measure the round trips to some peers, if the client does not know where it stands."""
        now = self._clock.now()
        if now - self._surveyed_at < _SURVEY_AGAIN_SECONDS or self._find_coordinate().is_settled:
            return
        if landmarks := choose_landmarks(self.view.online, self._rng):
            self._surveyed_at = now
            found = await measure_landmarks(landmarks, transport, self._clock)
            for peer_id, seconds in found.items():
                self.note_rtt(peer_id, seconds)

    def _find_coordinate(self) -> Coordinate:
        """Return where the client stands: settled once it has measured enough round trips."""
        if self._coordinate is None:
            known = ((peer.coordinate, self.rtt_seconds(peer.peer_id)) for peer in self.view.peers)
            landmarks = [
                (place, seconds)
                for place, seconds in known
                if place is not None and seconds is not None and place.is_settled
            ][:_MOST_LANDMARKS]
            is_enough = len(landmarks) >= LEAST_LANDMARKS
            num_rounds = _SETTLING_ROUNDS if is_enough else 0
            self._coordinate = settle(ORIGIN, landmarks, num_rounds, random.Random(0))
        return self._coordinate

    def expect_way_seconds(self, hops: Sequence[Hop]) -> list[float]:
        """Return the ways of a chain: to the first hop, from each to the next, and back."""
        key = tuple(hop.peer.peer_id for hop in hops)
        if key not in self._way_seconds:
            peers = [self.view.find(hop.peer.peer_id) or hop.peer for hop in hops]
            self._way_seconds[key] = expect_way_seconds(peers, self._measure_costs())
        return self._way_seconds[key]

    def find_hosts(self, block: int, exclude: Collection[PeerId]) -> list[Announcement]:
        """Return those of whom a block's hosts are least in doubt; liars are not among them."""
        doubts = self._list_doubts()
        hosts: dict[int, list[Announcement]] = {}
        for peer in self.view.serving(block):
            doubt = doubts.get(peer.peer_id, _NO_DOUBT)
            if peer.peer_id not in exclude and doubt not in (Fault.STALE, Fault.LYING):
                hosts.setdefault(doubt, []).append(peer)
        return hosts[min(hosts)] if hosts else []

    def list_by_doubt(self) -> list[Announcement]:
        """Return who serves blocks, those that have worked for us first; liars are not among them.

        Who is in quarantine comes last.
        """
        doubts = self._list_doubts()
        peers = [peer for peer in self.view.online if doubts.get(peer.peer_id) != Fault.LYING]

        def doubt(peer: Announcement) -> tuple[int, bool]:
            peer_id = peer.peer_id
            return doubts.get(peer_id, _NO_DOUBT), not self._has_worked(peer_id)

        return sorted(peers, key=doubt)

    def note_pass(self, peer_id: PeerId) -> None:
        """Note that a peer took a pass: forget what it did wrong."""
        self._taking_passes.add(peer_id)
        self._quarantines.pop(peer_id, None)

    def _list_doubts(self) -> dict[PeerId, int]:
        """Return whom to use only if nobody else is there, and how reluctantly.

        Somebody who failed us and never worked stays among them when the quarantine is over: it
        may be a black hole, of which there can be as many as somebody likes.
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

    def note_answer(
        self, hop: Hop, num_tokens: int, seconds: float, way_seconds: float | None = None
    ) -> None:
        """Note that a hop took a step of so many tokens: forget what its peer did wrong.

        `way_seconds` are what is expected of the ways there and on; None: the round trip.
        """
        peer_id = hop.peer.peer_id
        if way_seconds is None:
            way_seconds = self._rtt_seconds.get(peer_id, 0.0)
        self.times(peer_id).note(num_tokens, seconds, way_seconds, len(hop.span))
        self._quarantines.pop(peer_id, None)

    def note_rtt(self, peer_id: PeerId, seconds: float) -> None:
        """Note a measured round trip; the newest counts."""
        self._rtt_seconds[peer_id] = seconds
        self._forget_ways()

    def rtt_seconds(self, peer_id: PeerId) -> float | None:
        """Return the newest measured round trip, None if there is none."""
        return self._rtt_seconds.get(peer_id)

    def times(self, peer_id: PeerId) -> AnswerTimes:
        """Return the record of a peer's answer times."""
        return self._times.setdefault(peer_id, AnswerTimes())

    def times_of_others(self, peer_id: PeerId) -> list[AnswerTimes]:
        """Return the records of all peers but one."""
        return [times for other, times in self._times.items() if other != peer_id]
