"""All connections of a peer to other peers: to push to them, and to measure how far they are."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from ...protocol.endpoints import Endpoint
from ...protocol.identity import Identity
from ...protocol.ids import ModelId
from ...protocol.messages.session import NextHop
from ...protocol.net.clock import Clock
from ...protocol.net.directory import Directory
from ...protocol.net.network import Presence
from ...protocol.net.transport import StreamServer
from ...protocol.records.announcements import Announcement
from ..announcing.round_trip_times import RoundTripTimes
from .parked_streams import ParkedStreams
from .push_links import PushLinks
from .reverse_connections import ReverseConnections


@dataclass(frozen=True)
class Connections:
    """Those of one peer. A peer that can be dialled keeps streams that others have parked; one
    that cannot parks its own (`reverse`).
    """

    push_links: PushLinks
    parked: ParkedStreams | None
    round_trip_times: RoundTripTimes
    reverse: ReverseConnections | None

    @classmethod
    def make(
        cls,
        identity: Identity,
        presence: Presence,
        model_id: ModelId,
        serve: StreamServer,
        clock: Clock,
        period_seconds: float,
        rng: random.Random,
        note_pushed: Callable[[bytes], None],
    ) -> Connections:
        """Open nothing yet. `serve` gets each parked stream that is used; `period_seconds` is the
        time between two announcements; `note_pushed` hears each frame that was pushed.
        """
        transport, directory = presence.transport, presence.directory
        round_trip_times = RoundTripTimes(directory, transport, clock, period_seconds, rng)
        reverse = parked = None
        if presence.relays:
            reverse = ReverseConnections(
                identity, transport, directory, serve, clock, period_seconds
            )
        else:
            parked = ParkedStreams(presence.addresses.endpoints[0].fingerprint)
        push_links = PushLinks(
            transport, partial(find_endpoints, directory, model_id), clock, note_pushed, parked
        )
        return cls(push_links, parked, round_trip_times, reverse)

    @property
    def describers(self) -> Sequence[Callable[[Announcement], Announcement]]:
        """The functions that add round-trip times and parked streams to an announcement."""
        reverse = self.reverse
        return (self.round_trip_times.describe, *(() if reverse is None else (reverse.describe,)))


async def find_endpoints(
    directory: Directory, model_id: ModelId, following: NextHop
) -> Sequence[Endpoint]:
    """Return the endpoints that a next hop has announced itself; none if it is not known.

    What a client says of it is reason enough to look again, as often as it may have peers dialled,
    and no more: or else clients could have us dial anybody. Raises DirectoryError.
    """
    announced: Sequence[Endpoint] = ()
    for max_age_seconds in (math.inf, 0.0):
        peers = await directory.lookup(model_id, max_age_seconds)
        announced = next((p.endpoints for p in peers if p.peer_id == following.peer_id), ())
        if announced and set(following.endpoints) <= set(announced):
            break
    return announced
