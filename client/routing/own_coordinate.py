"""The network coordinate of the client, found from its round trips to a few peers, which are
measured before its first route.
"""

import asyncio
import random
from collections.abc import Collection

from ...protocol.errors import RefusedError, RemoteProtocolError, UnavailableError
from ...protocol.ids import PeerId
from ...protocol.net.clock import Clock
from ...protocol.net.dialling import measure_rtt
from ...protocol.net.transport import Transport
from ...protocol.records.announcements import Announcement
from ...protocol.records.coordinates import ORIGIN, Coordinate, settle
from .peer_book import PeerBook

LEAST_LANDMARKS = 4
"""Fewer round trips than this fit many places."""

_NUM_ASKED = 8
"""Asked all at once; in most swarms they include a peer in every part of the world."""

_SURVEY_SECONDS = 1.0
"""How long a first route waits for them: a few round trips around the world."""

_MOST_LANDMARKS = 32
"""From how many round trips a client finds out where it stands: more take longer than they give."""

_SURVEY_AGAIN_SECONDS = 600.0
"""How long a client does without its place that could not find it."""

_SETTLING_ROUNDS = 40
"""How often all of them pull until a place is found, from nowhere."""


class OwnCoordinate:
    """Where a client stands in the network, as far as its `PeerBook` tells."""

    def __init__(self, book: PeerBook, clock: Clock, rng: random.Random) -> None:
        self._book = book
        self._clock = clock
        self._rng = rng
        self._surveyed_at = float("-inf")
        self._coordinate = ORIGIN
        self._revision = -1  # of the book, when the coordinate was found

    async def survey(self, transport: Transport) -> None:
        """Measure the round trips to some peers, if the client does not know where it stands."""
        now = self._clock.now()
        if now - self._surveyed_at < _SURVEY_AGAIN_SECONDS or self.find().is_settled:
            return
        if landmarks := choose_landmarks(self._book.view.online, self._rng):
            self._surveyed_at = now
            found = await measure_landmarks(landmarks, transport, self._clock)
            for peer_id, seconds in found.items():
                self._book.note_rtt(peer_id, seconds)

    def find(self) -> Coordinate:
        """Return where the client stands: settled once it has measured enough round trips."""
        if self._revision != self._book.revision:
            self._revision = self._book.revision
            known = (
                (peer.coordinate, self._book.rtt_seconds(peer.peer_id))
                for peer in self._book.view.peers
            )
            landmarks = [
                (coordinate, seconds)
                for coordinate, seconds in known
                if coordinate is not None and seconds is not None and coordinate.is_settled
            ][:_MOST_LANDMARKS]
            is_enough = len(landmarks) >= LEAST_LANDMARKS
            num_rounds = _SETTLING_ROUNDS if is_enough else 0
            self._coordinate = settle(ORIGIN, landmarks, num_rounds, random.Random(0))
        return self._coordinate


def choose_landmarks(peers: Collection[Announcement], rng: random.Random) -> list[Announcement]:
    """Return some peers that know where they stand; none where too few do.

    Drawn at random, not by distance: a peer that wants to be chosen could lie about that.
    """
    settled = [
        peer
        for peer in peers
        if peer.endpoints and peer.coordinate is not None and peer.coordinate.is_settled
    ]
    if len(settled) < LEAST_LANDMARKS:
        return []
    return rng.sample(settled, min(_NUM_ASKED, len(settled)))


async def measure_landmarks(
    landmarks: Collection[Announcement], transport: Transport, clock: Clock
) -> dict[PeerId, float]:
    """Return the round trips to those that answer soon."""
    found: dict[PeerId, float] = {}

    async def measure(peer: Announcement) -> None:
        try:
            found[peer.peer_id] = await measure_rtt(
                transport, clock, peer.peer_id, peer.endpoints, _SURVEY_SECONDS
            )
        except (UnavailableError, RemoteProtocolError, RefusedError):
            return  # what is wrong there shows when it is used

    async with asyncio.TaskGroup() as tasks:
        for peer in landmarks:
            tasks.create_task(measure(peer))
    return found
