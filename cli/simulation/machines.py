"""The machines of a simulated swarm: unequal speeds, memory, links and places, from a seed."""

import math
import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Machine:
    """What a volunteer's machine can do."""

    blocks_per_second: float
    """Steps of one token through one block."""
    max_blocks: int
    load_seconds: float
    """To load one block, from the network."""
    bits_per_second: float
    """Of its link, each way."""
    place: tuple[float, float]
    """Where it is; a unit of distance is a second of one-way delay."""
    boast: float = 1.0
    """How many times its speed it claims to have."""

    def one_way_seconds(self, other: "Machine") -> float:
        """Return how long a small packet takes to another machine."""
        return 0.001 + math.dist(self.place, other.place)


_CITIES = [(0.0, 0.0), (0.012, 0.004), (0.04, 0.01), (0.045, 0.03), (0.09, 0.02)]
"""Home, a neighbouring country, two coasts over the ocean, and the other side of the world."""


def draw_machine(rng: random.Random, num_blocks: int, boast: float = 1.0) -> Machine:
    """Return a machine as volunteers may have them.

    The fastest tenth is about six times as fast as the slowest tenth; memory is from a twentieth to
    half of the model; a block of a few hundred megabytes loads in 2 to 30 seconds.
    """
    city = rng.choice(_CITIES)
    megabits_per_second = 10 ** rng.uniform(1.6, 3.0)
    share = rng.choice((0.05, 0.075, 0.1, 0.1, 0.15, 0.2, 0.3, 0.5))
    return Machine(
        blocks_per_second=rng.lognormvariate(math.log(400.0), 0.7),
        max_blocks=max(1, round(share * num_blocks)),
        load_seconds=min(30.0, 2000 / megabits_per_second),
        bits_per_second=1e6 * megabits_per_second,
        place=(city[0] + rng.gauss(0.0, 0.003), city[1] + rng.gauss(0.0, 0.003)),
        boast=boast,
    )
