"""Network coordinates of peers, from which unmeasured round trips are estimated.

Vivaldi (Dabek et al., SIGCOMM 2004): everybody is a point, the distance of two points is about the
round trip between them, and each measured round trip is a spring that pulls or pushes. Distances
are in seconds. Nothing here is proven by anybody: a coordinate is a claim like any other.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field, FiniteFloat

MAX_COORDINATE_SECONDS = 10.0
"""How far out a point may be. No round trip on earth is longer that is of any use."""

SETTLED_ERROR = 0.5
"""From which error on a coordinate says more than nothing."""

_LEAST_RTT_SECONDS = 1e-4
"""Below this a round trip is made of software: relative errors of it mean nothing."""

_STEP_FRACTION = 0.25
"""Which part of the way to where one spring is at rest is gone at once (the paper's c_c, c_e)."""

_MOST_FORCE_SECONDS = 0.02
"""How much one spring pulls at most: who tells that it is far out, or lets others wait for its
answers, weighs no more than anybody else."""

_LEAST_ERROR = 0.05
"""Nobody is surer of its place than this, whatever it says."""

_Axis = Annotated[FiniteFloat, Field(ge=-MAX_COORDINATE_SECONDS, le=MAX_COORDINATE_SECONDS)]
_Height = Annotated[FiniteFloat, Field(ge=0, le=MAX_COORDINATE_SECONDS)]
_Error = Annotated[FiniteFloat, Field(ge=0, le=1)]


@dataclass(frozen=True, slots=True)
class Coordinate:
    """A point, and above it a height: what every packet needs to get to the network and from it."""

    x: _Axis = 0.0
    y: _Axis = 0.0
    z: _Axis = 0.0
    height: _Height = 0.0
    error: _Error = 1.0
    """Relative error of estimates, about; 1 for a peer without measurements."""

    @property
    def is_settled(self) -> bool:
        """Return whether estimates from here are worth anything."""
        return self.error <= SETTLED_ERROR

    def rounded(self) -> Coordinate:
        """Return what is worth to be announced: tenths of a millisecond."""
        x, y, z, height = (round(part, 4) for part in (self.x, self.y, self.z, self.height))
        return Coordinate(x, y, z, height, round(self.error, 2))


ORIGIN = Coordinate()
"""The coordinate with which every peer begins."""


def estimate_rtt_seconds(a: Coordinate, b: Coordinate) -> float:
    """Return about how long it takes from one point to the other and back.

    >>> a, b = Coordinate(0.03, 0.0, 0.0, 0.25), Coordinate(0.0, 0.04, 0.0, 0.5)
    >>> estimate_rtt_seconds(a, b)
    0.8
    """
    return math.hypot(a.x - b.x, a.y - b.y, a.z - b.z) + a.height + b.height


def settle(
    own: Coordinate,
    samples: Sequence[tuple[Coordinate, float]],
    num_rounds: int,
    rng: random.Random,
) -> Coordinate:
    """Return the coordinate of a peer after it measured the round trips to some others.

    Each sample is what another one says of itself, and the measured seconds. Where nobody knows
    anything yet, everybody moves away from the origin in a direction of its own.
    """
    order = list(samples)
    for _ in range(num_rounds):
        rng.shuffle(order)
        for other, rtt_seconds in order:
            own = _pull(own, other, rtt_seconds, rng)
    return own


def _pull(own: Coordinate, other: Coordinate, rtt_seconds: float, rng: random.Random) -> Coordinate:
    """Return the coordinate after one spring has pulled at it."""
    rtt_seconds = min(max(rtt_seconds, _LEAST_RTT_SECONDS), MAX_COORDINATE_SECONDS)
    distance = estimate_rtt_seconds(own, other)
    stretch = rtt_seconds - distance
    # A peer with a small error moves little for a peer with a large one.
    doubt = own.error / (own.error + max(other.error, _LEAST_ERROR))
    surprise = min(abs(stretch) / rtt_seconds, 1.0)
    share = _STEP_FRACTION * doubt
    force = share * min(max(stretch, -_MOST_FORCE_SECONDS), _MOST_FORCE_SECONDS)
    direction = (own.x - other.x, own.y - other.y, own.z - other.z)
    if not any(direction):
        direction = (rng.gauss(0.0, 1.0), rng.gauss(0.0, 1.0), rng.gauss(0.0, 1.0))
    length = math.hypot(*direction)
    upwards = (own.height + other.height) / max(distance, _LEAST_RTT_SECONDS)
    x, y, z = (
        _keep_near(part + force * (1.0 - upwards) * along / length)
        for part, along in zip((own.x, own.y, own.z), direction, strict=True)
    )
    return Coordinate(
        x,
        y,
        z,
        max(0.0, _keep_near(own.height + force * upwards)),
        min(1.0, share * surprise + (1.0 - share) * own.error),
    )


def _keep_near(seconds: float) -> float:
    return min(max(seconds, -MAX_COORDINATE_SECONDS), MAX_COORDINATE_SECONDS)
