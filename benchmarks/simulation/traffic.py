"""Sessions on a simulated swarm: routed by the router, and slowed down by each other."""

import random
from dataclasses import dataclass, replace

import numpy as np

from shoal.client.routing.router import Route, RoutingCosts, plan_route
from shoal.protocol.ids import PeerId
from shoal.protocol.records.swarm_view import SwarmView
from shoal.protocol.spans import Span
from simulation.machines import Machine, draw_machine
from simulation.recorder import find_bound
from simulation.scenarios import WARM_UP_SECONDS
from simulation.steps import StepCost, time_network
from simulation.world import World, WorldConfig

_ROUNDS = 10
"""Sessions begin in so many rounds; in between, peers announce how busy they are."""

_NUM_MEASURED = 64
"""How many peers a client has measured the round trip to."""

_ITERATIONS = 200


@dataclass(frozen=True)
class TrafficOutcome:
    """What sessions get that all step as fast as they are answered."""

    num_sessions: int
    steps_per_second: float
    """Of all sessions together."""
    optimum: float
    """What the machines could do, or the sessions on idle machines, whichever is less."""
    median_step_seconds: float
    mean_hops: float


def run_traffic(seed: int, num_peers: int, session_counts: list[int]) -> list[TrafficOutcome]:
    """Let peers place themselves and then sessions come, from few to many."""
    rng = random.Random(seed)
    world = World(WorldConfig(), random.Random(seed + 1))
    num_blocks = world.config.num_blocks
    for index in range(num_peers):
        machine = draw_machine(rng, num_blocks)
        world.schedule(rng.uniform(0, 600), lambda i=index, m=machine: world.add(f"p{i}", m))
    world.run_until(WARM_UP_SECONDS)
    machines = {peer_id: peer.machine for peer_id, peer in world.peers.items()}
    clients = [draw_machine(rng, num_blocks) for _ in range(max(session_counts))]
    traffic = _Traffic(world.take_view(), machines, rng)
    return [traffic.measure(clients[:num_sessions]) for num_sessions in session_counts]


class _Traffic:
    def __init__(
        self, view: SwarmView, machines: dict[PeerId, Machine], rng: random.Random
    ) -> None:
        self._view = view
        self._machines = machines
        self._rng = rng

    def measure(self, clients: list[Machine]) -> TrafficOutcome:
        """Return what these clients get, a session each, none of them knowing of the others."""
        view, sessions = self._view, _Sessions(self._machines)
        for first in range(_ROUNDS):
            for client in clients[first::_ROUNDS]:
                sessions.add(self._route(view, client), client)
            sessions.settle()
            view = sessions.announce_load(view)
        bound = find_bound(list(self._machines.values()), view.num_blocks)
        return TrafficOutcome(
            num_sessions=len(clients),
            steps_per_second=float(sessions.steps_per_second.sum()),
            optimum=min(bound, float((1 / sessions.alone_seconds()).sum())),
            median_step_seconds=float(np.median(1 / sessions.steps_per_second)),
            mean_hops=len(sessions.peers) / len(clients),
        )

    def _route(self, view: SwarmView, client: Machine) -> Route:
        measured = self._rng.sample(view.online, min(_NUM_MEASURED, len(view.online)))
        rtt_seconds = {
            peer.peer_id: 2 * client.one_way_seconds(self._machines[peer.peer_id])
            for peer in measured
        }
        return plan_route(view, Span(0, view.num_blocks), RoutingCosts(rtt_seconds), self._rng)


class _Sessions:
    """A closed network of queues: each session has one step on its way at any time.

    Solved by Schweitzer's approximation of mean value analysis: a step finds at each peer the
    steps of the others that are there on average, and waits for them.
    """

    def __init__(self, machines: dict[PeerId, Machine]) -> None:
        self._machines = machines
        self._numbers = {peer_id: number for number, peer_id in enumerate(machines)}
        self.sessions: list[int] = []  # of each hop
        self.peers: list[int] = []
        self.compute_seconds: list[float] = []
        self.network_seconds: list[float] = []  # of each session
        self.steps_per_second = np.zeros(0)
        self._num_waiting = np.zeros(0)

    def add(self, route: Route, client: Machine) -> None:
        """Begin a session."""
        for hop in route.hops:
            machine = self._machines[hop.peer.peer_id]
            self.sessions.append(len(self.network_seconds))
            self.peers.append(self._numbers[hop.peer.peer_id])
            self.compute_seconds.append(len(hop.span) / machine.blocks_per_second)
        self.network_seconds.append(time_network(route, client, self._machines, StepCost()))

    def alone_seconds(self) -> np.ndarray:
        """Return what a step of each session would take on idle machines."""
        num_sessions = len(self.network_seconds)
        computing = np.bincount(self.sessions, self.compute_seconds, num_sessions)
        return np.array(self.network_seconds) + computing

    def settle(self) -> None:
        """Find how fast all sessions are beside each other."""
        sessions, peers = np.array(self.sessions), np.array(self.peers)
        compute_seconds = np.array(self.compute_seconds)
        num_sessions, num_peers = len(self.network_seconds), len(self._machines)
        seconds = compute_seconds.copy()
        for _ in range(_ITERATIONS):
            staying = np.bincount(sessions, seconds, num_sessions)
            self.steps_per_second = 1 / (np.array(self.network_seconds) + staying)
            present = self.steps_per_second[sessions] * seconds
            self._num_waiting = np.bincount(peers, present, num_peers)
            target = compute_seconds * (1 + self._num_waiting[peers] - present)
            seconds = 0.5 * (seconds + target)

    def announce_load(self, view: SwarmView) -> SwarmView:
        """Return the view once every peer has said how long a step waits there."""
        num_peers = len(self._machines)
        rates = self.steps_per_second[np.array(self.sessions)]
        busy = np.bincount(self.peers, rates * np.array(self.compute_seconds), num_peers)
        num_steps = np.bincount(self.peers, rates, num_peers)
        mean_seconds = np.divide(busy, num_steps, out=np.zeros(num_peers), where=num_steps > 0)
        queue_seconds = self._num_waiting * mean_seconds
        peers = tuple(
            replace(peer, queue_seconds=float(queue_seconds[self._numbers[peer.peer_id]]))
            for peer in view.peers
        )
        return replace(view, peers=peers)
