"""The machines of a simulated swarm, and when they come and go.

Unequal speeds, memory, links and places are drawn from a seed; churn as well, or read from a file.
"""

import csv
import math
import random
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from shoal.protocol.errors import UsageError


@dataclass(frozen=True)
class Machine:
    """The capabilities of a volunteer's machine."""

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


class Churn(StrEnum):
    """What happens to a peer."""

    JOIN = "join"
    LEAVE = "leave"
    """It says goodbye."""
    KILL = "kill"
    """It is gone without a word."""


@dataclass(frozen=True, order=True)
class ChurnEvent:
    """One line of a trace: `name` is whatever tells the peers of a trace apart."""

    seconds: float
    kind: Churn
    name: str


def draw_churn(
    rng: random.Random, num_peers: int, per_hour: float, begin_seconds: float, end_seconds: float
) -> list[ChurnEvent]:
    """Return a trace in which `per_hour` of the peers are replaced in an hour.

    The first peers join in the first minutes. From `begin_seconds` on, lives end as often for
    young ones as for old ones, half of them without a word, and as many others join.
    """
    events = [
        ChurnEvent(rng.uniform(0.0, begin_seconds / 4), Churn.JOIN, f"first-{index}")
        for index in range(num_peers)
    ]
    present = [event.name for event in events]
    seconds, num_replaced = begin_seconds, 0
    while per_hour > 0:
        seconds += rng.expovariate(num_peers * per_hour / 3600)
        if seconds >= end_seconds:
            break
        index = rng.randrange(num_peers)
        kind = rng.choice((Churn.LEAVE, Churn.KILL))
        events.append(ChurnEvent(seconds, kind, present[index]))
        present[index] = f"later-{num_replaced}"
        num_replaced += 1
        events.append(ChurnEvent(seconds + rng.expovariate(1 / 60), Churn.JOIN, present[index]))
    return sorted(events)


def read_churn(path: Path) -> list[ChurnEvent]:
    """Return the trace in a file of lines `seconds,join|leave|kill,name`."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            return sorted(_read_lines(csv.reader(file)))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} is no churn trace: {error}") from error


def _read_lines(lines: Iterable[list[str]]) -> Iterable[ChurnEvent]:
    for seconds, kind, name in lines:
        yield ChurnEvent(float(seconds), Churn(kind), name)
