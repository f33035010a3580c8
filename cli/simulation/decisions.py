"""How long a client of a very large swarm takes to choose a route."""

import random
import time
from dataclasses import dataclass, replace

from ...client.routing.route import Ends
from ...client.routing.router import RoutingCosts, plan_route
from ...peer.announcing.delays import MAX_TOLD
from ...protocol.ids import PeerId
from ...protocol.records.announcements import Announcement
from ...protocol.records.coordinates import Coordinate
from ...protocol.records.swarm_view import SwarmView
from ...protocol.spans import Span
from .distances import place_peers
from .machines import draw_machine
from .world import MODEL_ID

_NUM_MEASURED = 200
"""Peers to which the client has measured the round trip."""


@dataclass(frozen=True)
class DecisionTimes:
    """Processor seconds of one decision, the least of several: what else runs only adds to it."""

    star: float
    chain: float


def time_decisions(seed: int, num_peers: int, num_blocks: int, num_calls: int) -> DecisionTimes:
    """Time routes through all blocks, over peers that announce coordinates and round trips."""
    rng = random.Random(seed)
    machines = {PeerId(f"peer {n}"): draw_machine(rng, num_blocks) for n in range(num_peers)}
    peers = place_peers(machines, num_blocks)
    ids = list(machines)
    peers = [_measure(peer, ids, rng) for peer in peers]
    view = SwarmView.from_announcements(MODEL_ID, peers, 0.0, num_blocks)
    rtts = {
        peer_id: rng.uniform(0.005, 0.2)
        for peer_id in rng.sample(ids, min(_NUM_MEASURED, num_peers))
    }
    costs = RoutingCosts(rtts, coordinate=_draw_coordinate(rng))
    whole = Span(0, num_blocks)

    def time_least(ends: Ends | None) -> float:
        seconds: list[float] = []
        for _ in range(num_calls):
            started_at = time.process_time()
            plan_route(view, whole, costs, rng, ends=ends)
            seconds.append(time.process_time() - started_at)
        return min(seconds)

    return DecisionTimes(star=time_least(None), chain=time_least(Ends()))


def _measure(peer: Announcement, ids: list[PeerId], rng: random.Random) -> Announcement:
    told = tuple((other, rng.uniform(0.005, 0.2)) for other in rng.sample(ids, MAX_TOLD))
    return replace(peer, coordinate=_draw_coordinate(rng), rtts=told)


def _draw_coordinate(rng: random.Random) -> Coordinate:
    x, y, z = (rng.uniform(-0.1, 0.1) for _ in range(3))
    return Coordinate(x, y, z, height=rng.uniform(0.0, 0.01), error=0.1)
