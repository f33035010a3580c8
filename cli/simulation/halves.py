"""Half of a block's hosts are killed every minute: does every block stay served?"""

import random
from dataclasses import dataclass

from ...peer.placement.supply import MIN_REPLICAS
from ...protocol.records.announcements import PeerState
from .churn import draw_churn
from .machines import draw_machine
from .recorder import Recorder
from .scenarios import WARM_UP_SECONDS
from .world import SimulatedPeer, World, WorldConfig

_NUM_MINUTES = 10
_SAMPLE_SECONDS = 1.0


@dataclass(frozen=True)
class HalvesOutcome:
    """What became of a swarm, from the first kill to ten minutes after the last one."""

    num_peers: int
    num_killed: int
    least_hosts: int
    """Of the block with the fewest, at any second."""
    seconds_below_floor: float
    """For how long some block had fewer hosts than placement sees to."""
    num_gaps: int
    """Blocks that nobody served for a while: sessions would have failed there."""
    num_moves: int


def run_halves(seed: int, num_peers: int = 40, config: WorldConfig | None = None) -> HalvesOutcome:
    """Kill half of the hosts of some block every minute, unless a block would have too few.

    They are gone without a word, and as many newcomers join within minutes.
    """
    config = config or WorldConfig()
    rng = random.Random(seed)
    world = World(config, random.Random(seed + 1))
    joining = draw_churn(rng, num_peers, 0.0, WARM_UP_SECONDS, WARM_UP_SECONDS)
    world.follow(joining, lambda _: draw_machine(rng, config.num_blocks))
    recorder = Recorder(world, _SAMPLE_SECONDS)
    world.run_until(WARM_UP_SECONDS)
    num_killed, num_moves, num_gaps = 0, len(world.moves), recorder.num_gaps
    for minute in range(_NUM_MINUTES):
        block = rng.randrange(config.num_blocks)
        for peer in _choose_half(world, block, rng):
            if recorder.find_fewest_hosts(peer) > MIN_REPLICAS:
                world.remove(peer, says_goodbye=False)
                name, machine = f"{minute}-{num_killed}", draw_machine(rng, config.num_blocks)
                world.schedule(rng.expovariate(1 / 60), lambda n=name, m=machine: world.add(n, m))
                num_killed += 1
        world.run_until(world.now + 60.0)
    world.run_until(world.now + 600.0)
    hosts = [s.min_replicas for s in recorder.samples if s.seconds >= WARM_UP_SECONDS]
    return HalvesOutcome(
        num_peers=num_peers,
        num_killed=num_killed,
        least_hosts=min(hosts),
        seconds_below_floor=_SAMPLE_SECONDS * sum(num < MIN_REPLICAS for num in hosts),
        num_gaps=recorder.num_gaps - num_gaps,
        num_moves=len(world.moves) - num_moves,
    )


def _choose_half(world: World, block: int, rng: random.Random) -> list[SimulatedPeer]:
    hosts = [
        peer
        for peer in world.peers.values()
        if peer.state is PeerState.ONLINE and peer.span is not None and block in peer.span
    ]
    return rng.sample(hosts, len(hosts) // 2)
