"""Some peers to which a client measures its way before its first route, to know where it stands."""

import asyncio
import random
from collections.abc import Collection

from ...protocol.errors import RefusedError, RemoteProtocolError, UnavailableError
from ...protocol.ids import PeerId
from ...protocol.net.clock import Clock
from ...protocol.net.dialling import measure_rtt
from ...protocol.net.transport import Transport
from ...protocol.records.announcements import Announcement

LEAST_LANDMARKS = 4
"""Fewer round trips than this fit many places."""

_NUM_ASKED = 8
"""Asked all at once; of most swarms that is somebody in every part of the world."""

_SURVEY_SECONDS = 1.0
"""How long a first route waits for them: a few round trips around the world."""


def choose_landmarks(peers: Collection[Announcement], rng: random.Random) -> list[Announcement]:
    """Return some peers that know where they stand; none where too few do.

    Drawn by chance, not because they are far apart: whoever wants to be chosen could say so.
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
