"""Chains against full search, and what peers cannot make a client believe of ways between them."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from announcements import describe_peer

from shoal.client.routing import router
from shoal.client.routing.route import Ends, Hop, Route
from shoal.client.routing.router import RoutingCosts, plan_route
from shoal.protocol.endpoints import Endpoint
from shoal.protocol.ids import ModelId, PeerId
from shoal.protocol.records.announcements import Announcement
from shoal.protocol.records.coordinates import (
    MAX_COORDINATE_SECONDS,
    SETTLED_ERROR,
    Coordinate,
    estimate_rtt_seconds,
)
from shoal.protocol.records.swarm_view import SwarmView
from shoal.protocol.spans import Span
from shoal.protocol.versions import CHAIN_VERSION, REVERSE_VERSION

MODEL = ModelId("a" * 32)
NOW = 1_800_000_000.0
NUM_BLOCKS = 6
PASSING_SECONDS = 0.001
YEAR = 3.2e7
CLIENT = Ends()
"""The client is at both ends of the chain."""


def make_peer(name: str, span: tuple[int, int], **facts: Any) -> Announcement:
    """Return a peer that others can push to and that does 100 blocks per second."""
    usual: dict[str, Any] = {
        "peer_id": PeerId(name),
        "model_id": MODEL,
        "num_blocks": NUM_BLOCKS,
        "span": Span(*span),
        "endpoints": (Endpoint("192.0.2.7", 4040, "f" * 64),),
        "max_version": CHAIN_VERSION,
        "issued_at": NOW,
        "expires_at": NOW + 90,
        "decode_steps_per_second": 100 / (span[1] - span[0]),
    }
    return describe_peer(**(usual | facts))


def make_costs(rtts: dict[str, float], peers: Sequence[Announcement], **facts: Any) -> RoutingCosts:
    """Return the costs of a client without noise for which every peer has worked as announced."""
    known = {
        peer.peer_id: 1 / ((peer.decode_steps_per_second or 0) * len(peer.span)) for peer in peers
    }
    rtt_seconds = {PeerId(name): seconds for name, seconds in rtts.items()}
    return RoutingCosts(rtt_seconds, 0.0, block_seconds=known, **facts)


def draw_place(
    rng: random.Random, around: Sequence[float], spread: float, error: float
) -> Coordinate:
    x, y, z = (part + rng.gauss(0.0, spread) for part in around)
    return Coordinate(x, y, z, 0.001, error)


def make_view(peers: Sequence[Announcement]) -> SwarmView:
    return SwarmView.from_announcements(MODEL, peers, NOW, NUM_BLOCKS)


def plan(
    peers: Sequence[Announcement],
    costs: RoutingCosts,
    span: tuple[int, int] = (0, 6),
    ends: Ends | None = CLIENT,
) -> Route:
    return plan_route(make_view(peers), Span(*span), costs, random.Random(0), ends=ends)


def show(route: Route) -> str:
    return " ".join(f"{hop.peer.peer_id}[{hop.span}]" for hop in route.hops)


# ---- against full search


def find_way_seconds(a: Announcement, b: Announcement, costs: RoutingCosts) -> float:
    """Return the one-way seconds of an edge, as slowly and plainly as can be."""
    if a.peer_id == b.peer_id:
        return 0.0
    to_a, to_b = costs.rtt_seconds[a.peer_id], costs.rtt_seconds[b.peer_id]
    told = [
        seconds
        for one, other in ((a, b), (b, a))
        for peer_id, seconds in one.rtts
        if peer_id == other.peer_id
    ]
    places = [peer.coordinate for peer in (a, b)]
    settled = [place for place in places if place is not None and place.error <= SETTLED_ERROR]
    if told:
        seconds = max(told)
    elif len(settled) == 2:
        seconds = estimate_rtt_seconds(*settled)
    else:
        seconds = to_a + to_b
    version = min(a.max_version, b.max_version)
    can_dial = version >= CHAIN_VERSION and b.endpoints
    has_parked = version >= REVERSE_VERSION and a.peer_id[-8:] in b.parked_at
    if not (can_dial or has_parked) or (a.peer_id, b.peer_id) in costs.broken_links:
        seconds = to_a + to_b
    return 0.5 * min(max(seconds, abs(to_a - to_b)), to_a + to_b)


def compute_cost(hops: Sequence[Hop], costs: RoutingCosts, ends: Ends) -> float:
    first, last = hops[0].peer, hops[-1].peer
    seconds = sum(find_way_seconds(a.peer, b.peer, costs) for a, b in pairwise(hops))
    for hop in hops:
        of_block = costs.block_seconds[hop.peer.peer_id]
        seconds += PASSING_SECONDS + hop.peer.queue_seconds + len(hop.span) * of_block
    for end, peer in ((ends.before, first), (ends.after, last)):
        if end is None:
            seconds += 0.5 * costs.rtt_seconds[peer.peer_id]
    if ends.before is not None:
        seconds += find_way_seconds(ends.before, first, costs)
    if ends.after is not None:
        seconds += find_way_seconds(last, ends.after, costs)
    return seconds


def list_routes(peers: Sequence[Announcement], span: Span) -> Iterator[list[Hop]]:
    if span.start == span.stop:
        yield []
    for peer in peers:
        for stop in range(span.start + 1, span.stop + 1):
            if peer.span.covers(Span(span.start, stop)):
                for rest in list_routes(peers, Span(stop, span.stop)) if stop < span.stop else [[]]:
                    yield [Hop(peer, Span(span.start, stop)), *rest]


def draw_swarm(rng: random.Random) -> tuple[list[Announcement], RoutingCosts, Ends]:
    """Return a small swarm that covers everything, with whatever peers may say, true or not."""
    names = [f"p{index}" for index in range(rng.randint(2, 5))]
    others = [*names, "before", "after", "nobody"]
    peers: list[Announcement] = []
    for name in [*names, "before", "after"]:
        start = rng.randrange(NUM_BLOCKS)
        span = (0, NUM_BLOCKS) if name == "p0" else (start, rng.randint(start + 1, NUM_BLOCKS))
        place = draw_place(rng, (0.0, 0.0, 0.0), 0.05, rng.choice((0.1, 0.9)))
        facts: dict[str, Any] = {
            "queue_seconds": rng.choice((0.0, rng.uniform(0, 0.05))),
            "decode_steps_per_second": rng.uniform(10, 500),
            "coordinate": rng.choice((None, place, place)),
            "rtts": tuple(
                (PeerId(other), rng.choice((0.0, YEAR, rng.uniform(0.0, 0.2))))
                for other in rng.sample(others, rng.randint(0, 3))
            ),
            "max_version": rng.choice((CHAIN_VERSION - 1, CHAIN_VERSION, *[REVERSE_VERSION] * 5)),
        }
        if rng.random() < 0.3:
            facts["endpoints"] = ()
            facts["parked_at"] = tuple(rng.sample(others, rng.randint(0, 3)))
        peers.append(make_peer(name, span, **facts))
    broken_links = {(PeerId(rng.choice(others)), PeerId(rng.choice(others)))}
    rtts = {str(peer.peer_id): rng.uniform(0.0, 0.2) for peer in peers}
    *peers, before, after = peers
    ends = Ends(rng.choice((None, before)), rng.choice((None, after)))
    return peers, make_costs(rtts, [*peers, before, after], broken_links=broken_links), ends


@pytest.mark.parametrize("seed", range(60))
def test_chain_is_the_cheapest_of_all(seed: int) -> None:
    rng = random.Random(seed)
    peers, costs, ends = draw_swarm(rng)
    start = rng.randrange(NUM_BLOCKS)
    span = Span(start, rng.randint(start + 1, NUM_BLOCKS))

    route = plan(peers, costs, (span.start, span.stop), ends=ends)

    stops = [span.start, *(hop.span.stop for hop in route.hops)]
    assert stops[:-1] == [hop.span.start for hop in route.hops]
    assert stops[-1] == span.stop
    assert all(hop.peer.span.covers(hop.span) for hop in route.hops)
    least = min(compute_cost(other, costs, ends) for other in list_routes(peers, span))
    assert compute_cost(route.hops, costs, ends) == pytest.approx(least)


@pytest.mark.parametrize("seed", range(3))
def test_choice_in_a_crowd_is_nearly_the_best(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is not looked at is no great loss: at most a tenth of the time of a step."""
    rng = random.Random(seed)
    cities = [[rng.uniform(0.0, 0.1) for _ in range(3)] for _ in range(5)]
    peers: list[Announcement] = []
    for index in range(600):
        start = rng.randrange(NUM_BLOCKS - 1)
        place = draw_place(rng, rng.choice(cities), 0.002, 0.1)
        speed = rng.lognormvariate(4.0, 0.7)
        span = (start, min(NUM_BLOCKS, start + rng.randint(1, 2)))
        peers.append(make_peer(f"p{index}", span, coordinate=place, decode_steps_per_second=speed))
    here = draw_place(rng, cities[0], 0.0, 0.1)
    rtts = {
        str(peer.peer_id): estimate_rtt_seconds(here, peer.coordinate or here) for peer in peers
    }
    costs = make_costs(rtts, peers)

    quick = compute_cost(plan(peers, costs).hops, costs, Ends())
    monkeypatch.setattr(router, "MOST_COMPARED", len(peers))
    assert quick <= 1.1 * compute_cost(plan(peers, costs).hops, costs, Ends())


# ---- what it is for


def test_two_peers_in_one_house_far_away_are_a_good_chain() -> None:
    """Each of them alone is no nearer than the scattered ones."""
    house = [
        make_peer("a", (0, 3), rtts=((PeerId("b"), 0.001),)),
        make_peer("b", (3, 6)),
    ]
    scattered = [make_peer("c", (0, 3), rtts=((PeerId("d"), 0.2),)), make_peer("d", (3, 6))]
    rtts = {"a": 0.1, "b": 0.1, "c": 0.09, "d": 0.09}
    peers = [*house, *scattered]

    assert show(plan(peers, make_costs(rtts, peers))) == "a[0:3] b[3:6]"
    star = RoutingCosts(make_costs(rtts, peers).rtt_seconds, 0.0)
    assert show(plan(peers, star, ends=None)) == "c[0:3] d[3:6]"


def test_peer_that_has_parked_streams_is_pushed_to_like_one_that_can_be_dialled() -> None:
    newest = {"max_version": REVERSE_VERSION}
    before = make_peer("a", (0, 3), rtts=((PeerId("b"), 0.001),), **newest)
    relayed = make_peer("b", (3, 6), endpoints=(), **newest)
    near = make_peer("c", (3, 6), rtts=((PeerId("a"), 0.05),))
    rtts = {"a": 0.1, "b": 0.1, "c": 0.1}

    def choose(relayed: Announcement) -> str:
        peers = [before, relayed, near]
        return show(plan(peers, make_costs(rtts, peers)))

    assert choose(relayed) == "a[0:3] c[3:6]"
    assert choose(replace(relayed, parked_at=("a",))) == "a[0:3] b[3:6]"
    assert choose(replace(relayed, parked_at=("d",))) == "a[0:3] c[3:6]"
    older = replace(relayed, parked_at=("a",), max_version=REVERSE_VERSION - 1)
    assert choose(older) == "a[0:3] c[3:6]"


def test_replacement_is_near_to_those_around_it() -> None:
    near, far = (
        make_peer(name, (2, 4), rtts=((PeerId("b"), seconds), (PeerId("e"), seconds)))
        for name, seconds in (("near", 0.01), ("far", 0.15))
    )
    ends = Ends(make_peer("b", (0, 2)), make_peer("e", (4, 6)))
    rtts = {"near": 0.1, "far": 0.09, "b": 0.1, "e": 0.1}
    costs = make_costs(rtts, [near, far])

    assert show(plan([near, far], costs, (2, 4), ends=ends)) == "near[2:4]"
    assert show(plan([near, far], costs, (2, 4))) == "far[2:4]"


def test_crowd_that_serves_other_blocks_hides_no_replacement() -> None:
    crowd = [make_peer(f"p{index}", (0, 2)) for index in range(500)]
    far = [make_peer(f"far{index}", (2, 4)) for index in range(8)]
    rtts_near = ((PeerId("b"), 0.01), (PeerId("e"), 0.01))
    peers = [*crowd, *far, make_peer("near", (2, 4), rtts=rtts_near)]
    rtts = dict.fromkeys((str(peer.peer_id) for peer in crowd), 0.001)
    rtts |= dict.fromkeys((str(peer.peer_id) for peer in far), 0.09)
    costs = make_costs(rtts | {"near": 0.1, "b": 0.1, "e": 0.1}, peers)
    ends = Ends(make_peer("b", (0, 2)), make_peer("e", (4, 6)))

    assert show(plan(peers, costs, (2, 4), ends=ends)) == "near[2:4]"


def test_link_that_is_cut_costs_the_way_through_the_client() -> None:
    peers = [
        make_peer("a", (0, 3), rtts=((PeerId("b"), 0.001),)),
        make_peer("b", (3, 6)),
        make_peer("c", (3, 6), rtts=((PeerId("a"), 0.03),)),
    ]
    rtts = {"a": 0.1, "b": 0.1, "c": 0.1}
    broken = [(PeerId("a"), PeerId("b"))]

    assert show(plan(peers, make_costs(rtts, peers))) == "a[0:3] b[3:6]"
    assert show(plan(peers, make_costs(rtts, peers, broken_links=broken))) == "a[0:3] c[3:6]"


def test_client_that_knows_its_place_knows_who_is_near() -> None:
    near, far = (
        make_peer(name, (0, 6), coordinate=Coordinate(place, 0.0, 0.0, 0.0, 0.1))
        for name, place in (("near", 0.01), ("far", 0.2))
    )
    landmark = make_peer("landmark", (0, 1))
    here = Coordinate(0.0, 0.0, 0.0, 0.0, 0.1)

    costs = RoutingCosts({PeerId("landmark"): 0.1}, 0.0, coordinate=here)
    for ends in (Ends(), None):
        assert show(plan([far, near, landmark], costs, ends=ends)) == "near[0:6]"


# ---- what liars say


def make_triangle(*told: tuple[str, float], **facts: Any) -> list[Announcement]:
    """Return an honest pair, and a liar that could take the place of its second peer."""
    return [
        make_peer("first", (0, 3), rtts=((PeerId("honest"), 0.04),)),
        make_peer("honest", (3, 6)),
        make_peer("liar", (3, 6), rtts=tuple((PeerId(n), s) for n, s in told), **facts),
    ]


def test_liar_that_claims_to_be_everywhere_is_no_nearer_than_the_triangle_allows() -> None:
    peers = make_triangle(("first", 0.0), ("honest", 0.0))

    # 80 ms away from the client, the first one 100: between them are at least 20.
    costs = make_costs({"first": 0.1, "honest": 0.1, "liar": 0.08}, peers)
    route = [Hop(peers[0], Span(0, 3)), Hop(peers[2], Span(3, 6))]
    compute = 6 * 0.01 + 2 * PASSING_SECONDS
    assert compute_cost(route, costs, Ends()) - compute == pytest.approx(0.05 + 0.01 + 0.04)
    # Far from the client, it gains nothing at all: the whole way there and back counts.
    costs = make_costs({"first": 0.1, "honest": 0.1, "liar": 0.15}, peers)
    assert show(plan(peers, costs)) == "first[0:3] honest[3:6]"


def test_liar_is_believed_less_than_whoever_says_that_it_is_farther() -> None:
    peers = make_triangle(("first", 0.0))
    peers[0] = make_peer("first", (0, 3), rtts=((PeerId("honest"), 0.04), (PeerId("liar"), 0.1)))
    costs = make_costs({"first": 0.1, "honest": 0.1, "liar": 0.1}, peers)

    assert show(plan(peers, costs)) == "first[0:3] honest[3:6]"


@pytest.mark.parametrize("place", [-MAX_COORDINATE_SECONDS, 0.0, MAX_COORDINATE_SECONDS])
def test_coordinate_far_out_is_clipped_by_the_clients_own_round_trips(place: float) -> None:
    coordinate = Coordinate(place, place, place, abs(place), 0.0)
    peers = make_triangle(coordinate=coordinate)
    near, far = ({"first": 0.1, "honest": 0.1, "liar": rtt} for rtt in (0.001, 0.3))

    assert show(plan(peers, make_costs(far, peers))) == "first[0:3] honest[3:6]"
    assert show(plan(peers, make_costs(near, peers))) == "first[0:3] liar[3:6]"


def test_crowd_of_liars_with_nan_like_values_still_gives_a_route() -> None:
    edge = MAX_COORDINATE_SECONDS
    peers = [
        make_peer(
            f"p{index}",
            (index % 3, 6) if index else (0, 6),
            coordinate=Coordinate(edge, -edge, edge, edge, 0.0),
            rtts=((PeerId("p0"), 1e12),),
            queue_seconds=1e12,
            decode_steps_per_second=5e-324,
        )
        for index in range(400)
    ]
    costs = RoutingCosts({PeerId("p0"): math.ulp(0.0)})

    route = plan(peers, costs)

    assert route.hops[-1].span.stop == NUM_BLOCKS
