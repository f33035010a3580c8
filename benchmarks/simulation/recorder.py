"""What is measured in a simulated swarm: coverage, speed against the optimum, moves, recovery."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shoal.protocol.records.announcements import PeerState
from shoal.protocol.spans import Span
from simulation.machines import Machine
from simulation.world import Move, SimulatedPeer, World


@dataclass(frozen=True)
class Sample:
    """A swarm at one moment. Speeds are the true ones, whatever peers claim."""

    seconds: float
    num_peers: int
    num_covered: int
    """Blocks that somebody serves."""
    min_replicas: int
    """Of the block with the fewest."""
    steps_per_second: float
    """Of the weakest block: what the swarm can do for all sessions together."""
    optimum: float
    """No placement of the peers that are there can do more."""

    @property
    def ratio(self) -> float:
        """Speed as a part of the optimum."""
        return self.steps_per_second / self.optimum if self.optimum else 0.0


class Recorder:
    """Watches a world: looks at it now and then, and notes every gap."""

    def __init__(self, world: World, every_seconds: float) -> None:
        self.samples: list[Sample] = []
        self.recovery_seconds: list[float] = []
        """How long gaps were open, of blocks that had been served."""
        self._world = world
        self._every_seconds = every_seconds
        self._num_hosts = np.zeros(world.config.num_blocks, dtype=int)
        self._open_gaps: dict[int, float] = {}
        world.on_change = self._note_change
        world.schedule(every_seconds, self._take_sample)

    @property
    def num_open_gaps(self) -> int:
        """Blocks that were lost and nobody serves yet."""
        return len(self._open_gaps)

    @property
    def num_gaps(self) -> int:
        """How often a block was lost, so far."""
        return len(self.recovery_seconds) + len(self._open_gaps)

    def find_fewest_hosts(self, peer: SimulatedPeer) -> int:
        """Return how many hosts the block has that has the fewest of those that a peer serves."""
        assert peer.span is not None
        return int(self._num_hosts[peer.span.start : peer.span.stop].min())

    def _note_change(self, peer: SimulatedPeer, serves: bool) -> None:
        assert peer.span is not None
        for block in range(peer.span.start, peer.span.stop):
            self._num_hosts[block] += 1 if serves else -1
            if self._num_hosts[block] == 0:
                self._open_gaps[block] = self._world.now
            elif serves and block in self._open_gaps:
                self.recovery_seconds.append(self._world.now - self._open_gaps.pop(block))

    def _take_sample(self) -> None:
        world = self._world
        serving = [peer for peer in world.peers.values() if peer.state is PeerState.ONLINE]
        steps_per_second = np.zeros(world.config.num_blocks)
        for peer in serving:
            assert peer.span is not None
            speed = peer.machine.blocks_per_second / len(peer.span)
            steps_per_second[peer.span.start : peer.span.stop] += speed
        self.samples.append(
            Sample(
                seconds=world.now,
                num_peers=len(world.peers),
                num_covered=int((self._num_hosts > 0).sum()),
                min_replicas=int(self._num_hosts.min()),
                steps_per_second=float(steps_per_second.min()),
                optimum=find_bound(
                    [peer.machine for peer in world.peers.values()], world.config.num_blocks
                ),
            )
        )
        world.schedule(self._every_seconds, self._take_sample)


def find_bound(machines: Sequence[Machine], num_blocks: int) -> float:
    """Return the steps per second that no placement exceeds: all work spread evenly.

    A step takes a machine as many blocks as it serves, so together they give their blocks per
    second, to be divided among the blocks.
    """
    return sum(machine.blocks_per_second for machine in machines) / num_blocks


def search_optimum(
    machines: Sequence[Machine], num_blocks: int, may_be_shorter: bool
) -> tuple[int, float]:
    """Return what the best of all placements reaches, every span of every machine tried.

    Peers take spans as long as their memory allows; the best placement `may_be_shorter`.

    That is the replicas of every block, of which two are enough, and then steps per second of the
    weakest block. The work is a power of the number of machines: for small swarms only.
    """
    num_machines = len(machines)
    speeds: list[np.ndarray] = [np.zeros(()) for _ in range(num_blocks)]
    hosts: list[np.ndarray] = [np.zeros((), dtype=np.int8) for _ in range(num_blocks)]
    for axis, machine in enumerate(machines):
        spans = [
            Span(start, stop)
            for start in range(num_blocks)
            for stop in range(start + 1, min(start + machine.max_blocks, num_blocks) + 1)
            if may_be_shorter or stop - start == machine.max_blocks
        ]
        shape = [1] * num_machines
        shape[axis] = len(spans)
        for block in range(num_blocks):
            serves = np.array([block in span for span in spans])
            speed = serves * np.array([machine.blocks_per_second / len(span) for span in spans])
            speeds[block] = speeds[block] + speed.reshape(shape)
            hosts[block] = hosts[block] + serves.astype(np.int8).reshape(shape)
    weakest = np.minimum.reduce(speeds)
    replicas = np.minimum.reduce(hosts).clip(max=2)
    best = int(replicas.max())
    return best, float(weakest[replicas == best].max())


def count_returns(moves: Sequence[Move], within_seconds: float = 3600.0) -> int:
    """Return how many moves led back to at least half of what the peer had left not long before.

    A swarm in which this happens oscillates.
    """
    of_peers: dict[str, list[Move]] = defaultdict(list)
    num_returns = 0
    for move in moves:
        earlier = of_peers[move.peer_id]
        num_returns += any(
            move.seconds - left.seconds <= within_seconds and _is_back(move, left.origin)
            for left in earlier
        )
        earlier.append(move)
    return num_returns


def _is_back(move: Move, left: Span) -> bool:
    def share(span: Span) -> float:
        common = span.overlap(left)
        return len(common) / len(left) if common else 0.0

    return share(move.target) >= 0.5 > share(move.origin)


def find_most_moves_of_a_peer(moves: Sequence[Move], within_seconds: float = 3600.0) -> int:
    """Return how often the most restless peer moved in an hour."""
    times: dict[str, list[float]] = defaultdict(list)
    for move in moves:
        times[move.peer_id].append(move.seconds)
    return max(
        (
            sum(begin <= other < begin + within_seconds for other in seconds)
            for seconds in times.values()
            for begin in seconds
        ),
        default=0,
    )
