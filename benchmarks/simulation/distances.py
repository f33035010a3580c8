"""Chains over peers in distant regions: what it is worth to know the delays between peers.

And how long a client of a very large swarm takes to choose a route, which is real time.
"""

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median

import numpy as np

from shoal.client.routing.route import Ends
from shoal.client.routing.router import (
    Edges,
    PricedPeers,
    RoutingCosts,
    find_cheapest_chain,
    plan_route,
)
from shoal.peer.announcing.round_trip_times import MAX_ANNOUNCED_RTTS, choose_peer_to_measure
from shoal.protocol.ids import PeerId
from shoal.protocol.records.announcements import Announcement, PeerState
from shoal.protocol.records.coordinates import ORIGIN, Coordinate, settle
from shoal.protocol.records.swarm_view import SwarmView
from shoal.protocol.spans import Span
from simulation.machines import Machine, draw_machine
from simulation.steps import StepCost
from simulation.world import MODEL_ID, make_announcement

_NUM_BLOCKS = 80
_NUM_REGIONS = 5
_RTT_WITHIN_SECONDS = 0.005
_RTT_BETWEEN_SECONDS = (0.08, 0.2)
_DETOUR = 0.1
"""By which part a way is longer than from region to region, at most: no map shows that."""

_NUM_MEASURED_BY_CLIENT = 200
"""Peers to which the client of a very large swarm has measured the round trip."""

_NUM_MEASURED = 40
"""Round trips that a peer has measured: ten periods of announcements after it came."""


@dataclass(frozen=True)
class Chosen:
    """What one way of choosing chains comes to, over all clients."""

    median_step_seconds: float
    above_optimum: float
    """By which part a step takes longer than over the best of all chains, for the median client."""


@dataclass(frozen=True)
class DistanceOutcome:
    """Chains by the sum of the client's round trips, and by the ways between peers."""

    num_measured: int
    """Peers to which each client has measured the round trip."""
    by_round_trips: Chosen
    by_ways: Chosen
    optimum_seconds: float
    """Of a step, for the median client, over the best of all chains."""


class _World:
    """Places in regions, and the true round trips between any two of them."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._regions: dict[str, int] = {}
        self._seconds: dict[frozenset[str], float] = {}
        for one in range(_NUM_REGIONS):
            for other in range(one):
                pair = frozenset((f"region {one}", f"region {other}"))
                self._seconds[pair] = rng.uniform(*_RTT_BETWEEN_SECONDS)

    def settle(self, name: str) -> None:
        """Put a peer or a client into a region."""
        self._regions[name] = self._rng.randrange(_NUM_REGIONS)

    def rtt_seconds(self, one: str, other: str) -> float:
        """Return the round trip between two that live somewhere."""
        if one == other:
            return 0.0
        pair = frozenset((one, other))
        if pair not in self._seconds:
            regions = frozenset(f"region {self._regions[name]}" for name in pair)
            between = self._seconds.get(regions, _RTT_WITHIN_SECONDS)
            self._seconds[pair] = between * (1.0 + self._rng.uniform(0.0, _DETOUR))
        return self._seconds[pair]


def run_distances(
    seed: int, num_peers: int, num_clients: int, counts: Sequence[int]
) -> list[DistanceOutcome]:
    """Let peers measure each other, and then clients choose chains, knowing more and more peers."""
    rng = random.Random(seed)
    world = _World(rng)
    machines = {PeerId(f"peer {n}"): draw_machine(rng, _NUM_BLOCKS) for n in range(num_peers)}
    peers = place_peers(machines, _NUM_BLOCKS)
    clients = [f"client {n}" for n in range(num_clients)]
    for name in (*machines, *clients):
        world.settle(name)
    peers = _measure_each_other(peers, world, rng)
    judge = _Judge(peers, machines, world)
    best = [judge.find_optimum_seconds(client) for client in clients]
    outcomes: list[DistanceOutcome] = []
    for num_measured in counts:
        taken: list[list[float]] = [[], []]
        for client in clients:
            known = rng.sample(peers, min(num_measured, num_peers))
            rtts = {p.peer_id: world.rtt_seconds(client, p.peer_id) for p in known}
            for ends, seconds in zip((None, Ends()), taken, strict=True):
                seconds.append(judge.time_choice(client, rtts, ends, rng))
        chosen = [_compare(seconds, best) for seconds in taken]
        outcomes.append(DistanceOutcome(num_measured, *chosen, optimum_seconds=median(best)))
    return outcomes


def _compare(seconds: Sequence[float], best: Sequence[float]) -> Chosen:
    ratios = [taken / least for taken, least in zip(seconds, best, strict=True)]
    return Chosen(median(seconds), median(ratios) - 1.0)


def place_peers(machines: Mapping[PeerId, Machine], num_blocks: int) -> list[Announcement]:
    """Return peers that serve as many blocks as they can hold, each where the fewest others are."""
    num_hosts = np.zeros(num_blocks, dtype=int)
    peers: list[Announcement] = []
    for peer_id, machine in machines.items():
        start = min(int(num_hosts.argmin()), num_blocks - machine.max_blocks)
        span = Span(start, start + machine.max_blocks)
        num_hosts[span.start : span.stop] += 1
        announcement = make_announcement(
            peer_id,
            machine,
            span,
            PeerState.ONLINE,
            num_blocks=num_blocks,
            sequence=1,
            issued_at=0.0,
            expires_at=90.0,
        )
        peers.append(announcement)
    return peers


def _measure_each_other(
    peers: Sequence[Announcement], world: _World, rng: random.Random
) -> list[Announcement]:
    """Return the peers with what they announce once they have measured for some minutes."""
    announced = {peer.peer_id: peer for peer in peers}
    known: dict[PeerId, dict[PeerId, float]] = {peer_id: {} for peer_id in announced}
    for _ in range(_NUM_MEASURED):
        for peer_id, rtts in known.items():
            own = announced[peer_id]
            others = [p for p in announced.values() if p.peer_id not in {peer_id, *rtts}]
            target = choose_peer_to_measure(own, others, rng)
            if target is not None:
                rtts[target.peer_id] = world.rtt_seconds(peer_id, target.peer_id)
            samples = [(announced[p].coordinate or ORIGIN, rtt) for p, rtt in rtts.items()]
            place = settle(own.coordinate or ORIGIN, samples, 1, rng)
            announced[peer_id] = replace(own, coordinate=place.rounded())
    return [
        replace(peer, rtts=_choose_told(peer, known[peer.peer_id], announced))
        for peer in announced.values()
    ]


def _choose_told(
    own: Announcement, rtts: Mapping[PeerId, float], peers: Mapping[PeerId, Announcement]
) -> tuple[tuple[PeerId, float], ...]:
    likely = (
        (rtt, other) for other, rtt in rtts.items()
        if own.span.adjoins(peers[other].span)
    )  # fmt: skip
    return tuple((other, rtt) for rtt, other in sorted(likely)[:MAX_ANNOUNCED_RTTS])


class _Judge:
    """Knows how long everything really takes."""

    def __init__(
        self, peers: Sequence[Announcement], machines: Mapping[PeerId, Machine], world: _World
    ) -> None:
        self._view = SwarmView.from_announcements(MODEL_ID, peers, 0.0, _NUM_BLOCKS)
        self._peers = self._view.online
        self._rows = {peer.peer_id: row for row, peer in enumerate(self._peers)}
        self._world = world
        speeds = [machines[peer.peer_id].blocks_per_second for peer in self._peers]
        self._block_seconds = 1.0 / np.array(speeds)
        self._between_seconds = 0.5 * np.array(
            [
                [world.rtt_seconds(one.peer_id, other.peer_id) for other in self._peers]
                for one in self._peers
            ]
        )

    def _reach_seconds(self, client: str) -> np.ndarray:
        rtts = [self._world.rtt_seconds(client, peer.peer_id) for peer in self._peers]
        return 0.5 * np.array(rtts)

    def find_optimum_seconds(self, client: str) -> float:
        """Return what a step takes over the best chain of all, every edge looked at."""
        spans = [peer.span for peer in self._peers]
        nothing, reach = np.zeros(len(spans)), self._reach_seconds(client)
        priced = PricedPeers(
            starts=np.array([span.start for span in spans]),
            stops=np.array([span.stop for span in spans]),
            rtt_seconds=2.0 * reach,
            dearness=nothing + 1.0,
            hop_seconds=nothing + StepCost().overhead_seconds,
            block_seconds=self._block_seconds,
        )
        edges = Edges(reach, self._between_seconds, reach)
        return self._time(client, find_cheapest_chain(Span(0, _NUM_BLOCKS), priced, edges))

    def time_choice(
        self, client: str, rtts: Mapping[PeerId, float], ends: Ends | None, rng: random.Random
    ) -> float:
        """Return what a step takes over the chain that a client chooses, by itself or as a star.

        It knows how fast the peers are, and the round trips to some of them.
        """
        costs = RoutingCosts(
            rtts,
            block_seconds=dict(zip(self._rows, map(float, self._block_seconds), strict=True)),
            coordinate=None if ends is None else self._find_coordinate(rtts),
        )
        route = plan_route(self._view, Span(0, _NUM_BLOCKS), costs, rng, ends=ends)
        hops = [(self._rows[hop.peer.peer_id], hop.span) for hop in route.hops]
        return self._time(client, hops)

    def _find_coordinate(self, rtts: Mapping[PeerId, float]) -> Coordinate:
        places = [(self._peers[self._rows[peer_id]].coordinate, s) for peer_id, s in rtts.items()]
        landmarks = [(place, seconds) for place, seconds in places if place is not None]
        return settle(ORIGIN, landmarks[:32], 40, random.Random(0))

    def _time(self, client: str, hops: Sequence[tuple[int, Span]]) -> float:
        rows, reach = [row for row, _ in hops], self._reach_seconds(client)
        seconds = reach[rows[0]] + reach[rows[-1]]
        seconds += sum(self._between_seconds[one, other] for one, other in pairwise(rows))
        seconds += sum(len(used) * self._block_seconds[row] for row, used in hops)
        return float(seconds + len(hops) * StepCost().overhead_seconds)


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
    peers = [_with_delays(peer, ids, rng) for peer in peers]
    view = SwarmView.from_announcements(MODEL_ID, peers, 0.0, num_blocks)
    rtts = {
        peer_id: rng.uniform(0.005, 0.2)
        for peer_id in rng.sample(ids, min(_NUM_MEASURED_BY_CLIENT, num_peers))
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


def _with_delays(peer: Announcement, ids: list[PeerId], rng: random.Random) -> Announcement:
    told = tuple((other, rng.uniform(0.005, 0.2)) for other in rng.sample(ids, MAX_ANNOUNCED_RTTS))
    return replace(peer, coordinate=_draw_coordinate(rng), rtts=told)


def _draw_coordinate(rng: random.Random) -> Coordinate:
    x, y, z = (rng.uniform(-0.1, 0.1) for _ in range(3))
    return Coordinate(x, y, z, height=rng.uniform(0.0, 0.01), error=0.1)
