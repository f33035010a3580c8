"""Who comes and goes in a simulated swarm: traces drawn from a seed, or read from a file."""

import csv
import random
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from ...protocol.errors import UsageError


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
