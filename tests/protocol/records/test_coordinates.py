"""Points in the network: what springs make of round trips, honest ones and others."""

import math
import random
from itertools import combinations

import pytest

from shoal.protocol.records.coordinates import (
    MAX_COORDINATE_SECONDS,
    ORIGIN,
    Coordinate,
    estimate_rtt_seconds,
    settle,
)

Places = list[tuple[float, float]]


def draw_places(rng: random.Random, num_places: int) -> Places:
    """Return places of a map that is 150 ms wide and high."""
    return [(rng.uniform(0.0, 0.15), rng.uniform(0.0, 0.15)) for _ in range(num_places)]


def measure(a: tuple[float, float], b: tuple[float, float]) -> float:
    return 0.004 + math.dist(a, b)


def settle_together(places: Places, rng: random.Random, num_rounds: int = 60) -> list[Coordinate]:
    """Let everybody measure eight others at a time and move, again and again."""
    known = [ORIGIN] * len(places)
    for _ in range(num_rounds):
        for index, place in enumerate(places):
            others = rng.sample([i for i in range(len(places)) if i != index], 8)
            samples = [(known[i], measure(place, places[i])) for i in others]
            known[index] = settle(known[index], samples, 1, rng)
    return known


def find_median_error(places: Places, known: list[Coordinate]) -> float:
    errors = [
        abs(estimate_rtt_seconds(known[i], known[j]) / measure(places[i], places[j]) - 1)
        for i, j in combinations(range(len(places)), 2)
    ]
    return sorted(errors)[len(errors) // 2]


@pytest.mark.parametrize("seed", range(2))
def test_strangers_estimate_what_they_never_measured(seed: int) -> None:
    rng = random.Random(seed)
    places = draw_places(rng, 24)

    known = settle_together(places, rng)

    assert find_median_error(places, known) < 0.1
    assert all(coordinate.is_settled for coordinate in known)


def test_who_has_measured_nothing_is_not_settled() -> None:
    assert not ORIGIN.is_settled
    assert settle(ORIGIN, [], 10, random.Random(0)) == ORIGIN


@pytest.mark.parametrize("seed", range(2))
def test_newcomer_finds_its_place_from_a_dozen_of_round_trips(seed: int) -> None:
    rng = random.Random(seed)
    places = draw_places(rng, 24)
    known = settle_together(places, rng)
    own = (0.07, 0.02)

    samples = [(known[i], measure(own, places[i])) for i in range(12)]
    found = settle(ORIGIN, samples, 40, rng)

    errors = [
        abs(estimate_rtt_seconds(found, known[i]) / measure(own, places[i]) - 1)
        for i in range(12, 24)
    ]
    assert sorted(errors)[6] < 0.15


@pytest.mark.parametrize(
    "lie",
    [
        (Coordinate(10.0, 10.0, 10.0, 10.0, 0.0), 0.0),
        (Coordinate(-MAX_COORDINATE_SECONDS, error=0.0), 3.2e7),
        (Coordinate(error=0.0), 3.2e7),
        (Coordinate(error=0.0), 0.0),
    ],
)
def test_liar_moves_nobody_far(lie: tuple[Coordinate, float]) -> None:
    rng = random.Random(1)
    places = draw_places(rng, 24)
    known = settle_together(places, rng)
    own = (0.07, 0.02)
    samples = [(known[i], measure(own, places[i])) for i in range(15)]

    honest, misled = (settle(ORIGIN, lies, 60, rng) for lies in (samples, [*samples, lie]))

    assert estimate_rtt_seconds(honest, misled) - honest.height - misled.height < 0.03
    assert abs(misled.height - honest.height) < 0.02


@pytest.mark.parametrize("seed", range(5))
def test_coordinates_stay_within_their_bounds(seed: int) -> None:
    rng = random.Random(seed)
    edge = MAX_COORDINATE_SECONDS
    own = ORIGIN
    for _ in range(300):
        x, y, z = (rng.choice((-edge, 0.0, edge)) for _ in range(3))
        other = Coordinate(x, y, z, rng.choice((0.0, edge)), rng.choice((0.0, 1.0)))
        own = settle(own, [(other, rng.choice((0.0, 1e-9, 1.0, 1e12)))], 1, rng)

        assert max(map(abs, (own.x, own.y, own.z))) <= edge
        assert 0.0 <= own.height <= edge
        assert 0.0 <= own.error <= 1.0


def test_what_is_announced_is_short() -> None:
    found = Coordinate(0.123456789, -0.2, 0.0, 0.00111111, 0.123456)

    assert found.rounded() == Coordinate(0.1235, -0.2, 0.0, 0.0011, 0.12)
