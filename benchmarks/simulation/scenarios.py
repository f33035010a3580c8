"""The questions that are put to a simulated swarm, and their answers in numbers."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from shoal.peer.placement.placement import MIN_RESIDENCY_SECONDS
from shoal.peer.placement.supply import MIN_REPLICAS
from shoal.protocol.records.announcements import PeerState
from shoal.protocol.spans import Span
from simulation.machines import ChurnEvent, Machine, draw_churn, draw_machine
from simulation.recorder import (
    Recorder,
    Sample,
    count_returns,
    find_most_moves_of_a_peer,
    search_optimum,
)
from simulation.world import Move, SimulatedPeer, World, WorldConfig

LARGE = WorldConfig(view_seconds=5.0)
"""A large swarm, in which views are taken less often: for peers that is harder."""

WARM_UP_SECONDS = 2400.0
"""Everybody joins in the first quarter, and the last block is loaded before the end."""

_SAMPLE_SECONDS = 60.0
_HALVES_SAMPLE_SECONDS = 1.0
_HALVES_MINUTES = 10


@dataclass(frozen=True)
class ChurnSetting:
    """A swarm in which peers come and go."""

    num_peers: int = 1000
    hours: float = 2.0
    per_hour: float = 0.3
    """Which part of the peers is replaced in an hour."""
    quiet_hours: float = 0.5
    """How long is watched afterwards, while nobody comes or goes."""
    liars: float = 0.0
    """Which part of the peers claims to be a hundred times as fast as it is."""
    seed: int = 0

    @property
    def end_seconds(self) -> float:
        """When the churn ends."""
        return WARM_UP_SECONDS + 3600 * self.hours


@dataclass(frozen=True)
class ChurnOutcome:
    """What churn did to a swarm, after the warm-up."""

    setting: ChurnSetting
    samples: list[Sample]
    """From the very beginning, to draw."""
    moves: list[Move]
    recovery_seconds: list[float]
    num_dials: list[tuple[float, int]]
    """How many hosts were dialled before each move, the first ones included, and when."""

    @property
    def judged(self) -> list[Sample]:
        """The samples after the warm-up."""
        return [sample for sample in self.samples if sample.seconds >= WARM_UP_SECONDS]

    @property
    def least_ratio(self) -> float:
        """The lowest that the weakest block ever had, as a part of the optimum."""
        return min(sample.ratio for sample in self.judged)

    @property
    def mean_ratio(self) -> float:
        """The same on average."""
        return sum(sample.ratio for sample in self.judged) / len(self.judged)

    @property
    def moves_per_peer_and_hour(self) -> float:
        """How often a peer moves while others come and go."""
        num_moves = sum(
            WARM_UP_SECONDS <= move.seconds < self.setting.end_seconds for move in self.moves
        )
        return num_moves / self.setting.num_peers / self.setting.hours

    @property
    def dials_per_peer_and_hour(self) -> float:
        """How often a peer dials another one to see whether it is there."""
        num_dials = sum(
            num
            for seconds, num in self.num_dials
            if WARM_UP_SECONDS <= seconds < self.setting.end_seconds
        )
        return num_dials / self.setting.num_peers / self.setting.hours

    @property
    def num_late_moves(self) -> int:
        """Moves in the second half of the quiet time."""
        begin = self.setting.end_seconds + 1800 * self.setting.quiet_hours
        return sum(move.seconds >= begin for move in self.moves)

    def summarize(self) -> dict[str, float]:
        """Return the figures."""
        return {
            "least_ratio": self.least_ratio,
            "mean_ratio": self.mean_ratio,
            "min_replicas": min(sample.min_replicas for sample in self.judged),
            "min_covered_blocks": min(sample.num_covered for sample in self.judged),
            "moves_per_peer_and_hour": self.moves_per_peer_and_hour,
            "dials_per_peer_and_hour": self.dials_per_peer_and_hour,
            "most_moves_of_a_peer_in_an_hour": find_most_moves_of_a_peer(self.moves),
            "returns": count_returns(self.moves),
            "moves_in_quiet_half_hour": self.num_late_moves,
        }


def run_churn(
    setting: ChurnSetting,
    trace: Sequence[ChurnEvent] | None = None,
    config: WorldConfig = LARGE,
) -> ChurnOutcome:
    """Let peers come and go, by a trace if one is given."""
    rng = random.Random(setting.seed)
    world = World(config, random.Random(setting.seed + 1))
    if trace is None:
        trace = draw_churn(
            rng, setting.num_peers, setting.per_hour, WARM_UP_SECONDS, setting.end_seconds
        )
    world.follow(
        trace,
        lambda _: draw_machine(
            rng, config.num_blocks, boast=100.0 if rng.random() < setting.liars else 1.0
        ),
    )
    recorder = Recorder(world, _SAMPLE_SECONDS)
    world.run_until(setting.end_seconds + 3600 * setting.quiet_hours)
    return ChurnOutcome(
        setting, recorder.samples, world.moves, recorder.recovery_seconds, world.num_dials
    )


@dataclass(frozen=True)
class Recovery:
    """A span lost its only host while others were idle elsewhere."""

    noticed_seconds: float
    """From the death until somebody began to load the span."""
    load_seconds: float
    """That takes, with leaving the old place."""
    total_seconds: float
    """From the death until all blocks were served."""


def run_recovery(seed: int, num_spare: int = 3, config: WorldConfig | None = None) -> Recovery:
    """Kill the only host of half of a model, `num_spare` others being at the other half."""
    config = config or WorldConfig(num_blocks=16)
    rng = random.Random(seed)
    world = World(config, random.Random(seed + 1))
    half = config.num_blocks // 2
    machine = replace(draw_machine(rng, config.num_blocks), max_blocks=half)
    for index in range(num_spare):
        world.add(f"spare-{rng.random()}-{index}", machine, Span(0, half))
    only = world.add("only", machine, Span(half, config.num_blocks))
    recorder = Recorder(world, _SAMPLE_SECONDS)
    for peer in world.peers.values():
        world.on_change(peer, True)
    # Before the others may give it a replica, which they will.
    died_at = rng.uniform(60.0, MIN_RESIDENCY_SECONDS - 60.0)
    world.run_until(died_at)
    world.remove(only, says_goodbye=False)
    world.run_until(died_at + 900.0)
    load_seconds = half * machine.load_seconds + config.drain_seconds
    begun_at = min(move.seconds for move in world.moves)
    return Recovery(begun_at - died_at, load_seconds, max(recorder.recovery_seconds))


@dataclass(frozen=True)
class SmallOutcome:
    """What peers reached by themselves in a small swarm, and what the best placement reaches."""

    replicas: int
    best_replicas: int
    steps_per_second: float
    best_steps_per_second: float
    """With spans as long as memory allows, as peers take them."""
    best_of_any_length: float
    """With shorter spans as well, which cost hops."""


def run_small(seed: int, num_blocks: int = 6) -> SmallOutcome:
    """Let a handful of unequal machines join one by one, and search for the best placement."""
    rng = random.Random(seed)
    machines: list[Machine] = []
    while sum(machine.max_blocks for machine in machines) < 2 * num_blocks + 2:
        machine = draw_machine(rng, num_blocks)
        machines.append(replace(machine, max_blocks=rng.randint(2, num_blocks)))
    world = World(WorldConfig(num_blocks=num_blocks), random.Random(seed + 1))
    recorder = Recorder(world, _SAMPLE_SECONDS)
    for index, machine in enumerate(machines):
        world.schedule(rng.uniform(0, 1200), lambda i=index, m=machine: world.add(f"p{i}", m))
    world.run_until(1.5 * 3600.0)
    last = recorder.samples[-1]
    best_replicas, best_speed = search_optimum(machines, num_blocks, may_be_shorter=False)
    _, best_of_any_length = search_optimum(machines, num_blocks, may_be_shorter=True)
    return SmallOutcome(
        replicas=min(2, last.min_replicas),
        best_replicas=best_replicas,
        steps_per_second=last.steps_per_second,
        best_steps_per_second=best_speed,
        best_of_any_length=best_of_any_length,
    )


@dataclass(frozen=True)
class StormOutcome:
    """Half of the peers of a quarter of the blocks died at once, and nobody joined."""

    samples: list[Sample]
    moves: list[Move]
    storm_seconds: float
    num_peers: int
    """Who is left."""

    def find_ratio(self, minutes_later: float) -> float:
        """Return the speed of the weakest block as a part of the optimum, some time after."""
        later = self.storm_seconds + 60 * minutes_later
        return next(sample.ratio for sample in self.samples if sample.seconds >= later)

    @property
    def moves_per_peer_and_hour(self) -> float:
        """How often a peer moved in the first hour after."""
        return len(self.moves) / self.num_peers


def run_storm(
    seed: int,
    num_peers: int = 1000,
    config: WorldConfig = LARGE,
) -> StormOutcome:
    """Kill half of those who serve the first quarter of the blocks, and watch the others."""
    rng = random.Random(seed)
    world = World(config, random.Random(seed + 1))
    trace = draw_churn(rng, num_peers, 0.0, WARM_UP_SECONDS, WARM_UP_SECONDS)
    world.follow(trace, lambda _: draw_machine(rng, config.num_blocks))
    recorder = Recorder(world, _SAMPLE_SECONDS)
    world.run_until(WARM_UP_SECONDS)
    quarter = Span(0, max(1, config.num_blocks // 4))
    for peer in list(world.peers.values()):
        if peer.span is not None and peer.span.overlap(quarter) and rng.random() < 0.5:
            world.remove(peer, says_goodbye=False)
    num_left = len(world.peers)
    world.run_until(WARM_UP_SECONDS + 3700.0)
    return StormOutcome(recorder.samples, world.moves, WARM_UP_SECONDS, num_left)


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
    recorder = Recorder(world, _HALVES_SAMPLE_SECONDS)
    world.run_until(WARM_UP_SECONDS)
    num_killed, num_moves, num_gaps = 0, len(world.moves), recorder.num_gaps
    for minute in range(_HALVES_MINUTES):
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
        seconds_below_floor=_HALVES_SAMPLE_SECONDS * sum(num < MIN_REPLICAS for num in hosts),
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
