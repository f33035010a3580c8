"""How far a peer is from others: it measures round trips, and tells them, and where it stands.

A few at a time, so that a swarm is not busy with itself: a connection every few seconds, to those
that a chain would lead to or from, and now and then to anybody else.
"""

import asyncio
import logging
import random
from collections.abc import Collection, Mapping
from dataclasses import replace
from itertools import islice
from typing import NamedTuple

from ...protocol.errors import DirectoryError, RefusedError, RemoteProtocolError, UnavailableError
from ...protocol.ids import ModelId, PeerId
from ...protocol.net.clock import Clock
from ...protocol.net.dialling import measure_rtt
from ...protocol.net.directory import KNOWN_PERIODS, Directory
from ...protocol.net.transport import Transport
from ...protocol.records.announcements import Announcement, draw_by_address
from ...protocol.records.coordinates import ORIGIN, Coordinate, estimate_rtt_seconds, settle
from ...protocol.records.swarm_view import SwarmView

_logger = logging.getLogger(__name__)

MAX_ANNOUNCED_RTTS = 3
"""Round trips in an announcement. Each is 60 bytes; with three and a coordinate an announcement has
less than 1,000, so that a thousand of them are no more than a megabyte for whoever reads them."""

MEASURED_PER_PERIOD = 4
"""Measurements in the time between two announcements; each costs two machines a TLS handshake."""

_PERIODS_PER_LOOK = 4
"""How often the directory is read for this: a coordinate is as good for some minutes."""

_FRESH_PERIODS = 20
"""How long a round trip is not measured again, and told for twice as long."""

_MOST_LOOKED_AT = 1000
"""Peers to choose from between two looks, drawn anew each time: of ten thousand, choosing would
take 30 ms, and what they announced before would stay in memory."""

_MOST_KNOWN = 48
"""Peers whose round trips are kept: enough to know a place from, and all likely neighbours."""

_STRANGERS_FRACTION = 0.25
"""How many measurements go to any peer: a coordinate needs distant peers, too."""

_MEASURING_SECONDS = 5.0


class _Measurement(NamedTuple):
    """The last attempt to measure one peer, and the round trip; None if it did not answer."""

    at: float
    rtt_seconds: float | None


def choose_peer_to_measure(
    own: Announcement,
    others: Collection[Announcement],
    rng: random.Random,
) -> Announcement | None:
    """Return the peer to measure next: mostly the nearest likely neighbour, as far as
    coordinates tell; None where there is nobody.
    """
    likely = [peer for peer in others if own.span.adjoins(peer.span)]
    if not others or (likely and rng.random() >= _STRANGERS_FRACTION):
        return min(likely, key=lambda peer: _guess_rtt_seconds(own, peer, rng), default=None)
    return rng.choice(sorted(others, key=lambda peer: peer.peer_id))


def _guess_rtt_seconds(own: Announcement, peer: Announcement, rng: random.Random) -> float:
    """Return an estimate; those of whom nothing is known come in any order."""
    places = own.coordinate or ORIGIN, peer.coordinate or ORIGIN
    if all(place.is_settled for place in places):
        return estimate_rtt_seconds(*places)
    return rng.random()


class RoundTripTimes:
    """The round trips of one peer, measured in the background."""

    def __init__(
        self,
        directory: Directory,
        transport: Transport,
        clock: Clock,
        period_seconds: float,
        rng: random.Random,
    ) -> None:
        """`period_seconds` is the time between two announcements."""
        self._directory = directory
        self._transport = transport
        self._clock = clock
        self._period_seconds = period_seconds
        self._rng = rng
        self._known: dict[PeerId, _Measurement] = {}
        self._coordinate = ORIGIN
        self._told_coordinate = ORIGIN
        self._peers: Mapping[PeerId, Announcement] = {}
        self._own: Announcement | None = None

    def describe(self, announcement: Announcement) -> Announcement:
        """Return an announcement of the peer itself with what it knows of its neighbours."""
        self._own = announcement
        likely = [
            (rtt_seconds, peer_id)
            for peer_id, rtt_seconds in self._list_rtts()
            if peer_id in self._peers
            if announcement.span.adjoins(self._peers[peer_id].span)
        ]
        told = tuple(
            (peer_id, round(seconds, 4)) for seconds, peer_id in sorted(likely)[:MAX_ANNOUNCED_RTTS]
        )
        coordinate = self._told_coordinate if self._list_rtts() else None
        return replace(announcement, rtts=told, coordinate=coordinate)

    def _list_rtts(self) -> list[tuple[PeerId, float]]:
        """Return the peers with a known round trip. An old one says nothing of the way now."""
        return [
            (peer_id, known.rtt_seconds)
            for peer_id, known in self._known.items()
            if known.rtt_seconds is not None and self._age_periods(known.at) < 2 * _FRESH_PERIODS
        ]

    def _age_periods(self, at: float) -> float:
        return (self._clock.now() - at) / self._period_seconds

    async def run(self) -> None:
        """Measure until cancelled."""
        pause_seconds = self._period_seconds / MEASURED_PER_PERIOD
        for number in range(2**63):
            # Peers that were started together do not all measure at once.
            await asyncio.sleep(pause_seconds * self._rng.uniform(0.5, 1.5))
            if self._own is None:
                continue
            if not self._peers or number % (MEASURED_PER_PERIOD * _PERIODS_PER_LOOK) == 0:
                await self._look(self._own.model_id)
            await self._measure_one(self._own)

    async def _look(self, model_id: ModelId) -> None:
        try:
            announcements = await self._directory.lookup(
                model_id, KNOWN_PERIODS * self._period_seconds
            )
        except DirectoryError as error:
            _logger.debug("cannot look up neighbours to measure: %s", error)
            return
        view = SwarmView.from_announcements(model_id, announcements, self._clock.wall())
        online = {peer.peer_id: peer for peer in view.online if peer.endpoints}
        self._known = {
            peer_id: known for peer_id, known in self._known.items() if peer_id in online
        }
        drawn = islice(draw_by_address(online.values(), self._rng), _MOST_LOOKED_AT)
        self._peers = {peer.peer_id: peer for peer in drawn}
        self._peers |= {peer_id: online[peer_id] for peer_id in self._known}

    async def _measure_one(self, own: Announcement) -> None:
        peer = choose_peer_to_measure(self.describe(own), self._list_unmeasured(own), self._rng)
        if peer is None:
            return
        try:
            seconds = await measure_rtt(
                self._transport, self._clock, peer.peer_id, peer.endpoints, _MEASURING_SECONDS
            )
        except (UnavailableError, RemoteProtocolError, RefusedError) as error:
            _logger.debug(
                "cannot measure the round-trip time to peer …%s: %s", peer.peer_id[-6:], error
            )
            seconds = None
        self._note(peer.peer_id, seconds)

    def _list_unmeasured(self, own: Announcement) -> list[Announcement]:
        """Return peers that can be measured, one of each address that was not for a while."""
        measured = {
            mark
            for peer_id, known in self._known.items()
            if peer_id in self._peers and self._age_periods(known.at) < _FRESH_PERIODS
            for mark in self._peers[peer_id].marks
        }
        measured.update(own.marks)
        drawn = draw_by_address(self._peers.values(), self._rng)
        return [peer for peer in drawn if measured.isdisjoint(peer.marks)]

    def _note(self, peer_id: PeerId, rtt_seconds: float | None) -> None:
        """Take a measurement down, and let all round trips pull at the place of this peer."""
        self._known.pop(peer_id, None)
        self._known[peer_id] = _Measurement(self._clock.now(), rtt_seconds)  # behind all others
        if len(self._known) > _MOST_KNOWN:
            del self._known[next(iter(self._known))]
        if rtt_seconds is not None:
            samples = [(self._find_place(other), seconds) for other, seconds in self._list_rtts()]
            self._coordinate = settle(self._coordinate, samples, 1, self._rng)
            self._told_coordinate = self._coordinate.rounded()

    def _find_place(self, peer_id: PeerId) -> Coordinate:
        peer = self._peers.get(peer_id)
        return ORIGIN if peer is None or peer.coordinate is None else peer.coordinate
