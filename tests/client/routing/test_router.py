"""Routes against brute force, and what a route must never contain."""

import math
import random
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from types import FrameType
from typing import Any

import pytest

from shoal.client.routing.route import Hop, Route
from shoal.client.routing.router import RoutingCosts, plan_route
from shoal.protocol.errors import RouteError
from shoal.protocol.ids import ModelId, PeerId
from shoal.protocol.records.announcements import Announcement, PeerState
from shoal.protocol.records.swarm_view import SwarmView
from shoal.protocol.spans import Span

MODEL = ModelId("a" * 32)
NOW = 1_800_000_000.0
SILENT = RoutingCosts(noise_fraction=0.0)


def make_peer(name: str, span: tuple[int, int], **changes: Any) -> Announcement:
    """Return an ONLINE peer of a model with 80 blocks, that does 100 blocks per second."""
    fields: dict[str, Any] = {
        "peer_id": PeerId(name),
        "model_id": MODEL,
        "num_blocks": 80,
        "span": Span(*span),
        "state": PeerState.ONLINE,
        "endpoints": (),
        "min_version": 1,
        "max_version": 1,
        "weights": "int8",
        "compute_dtype": "bf16",
        "sequence": 1,
        "issued_at": NOW,
        "expires_at": NOW + 90,
        "decode_steps_per_second": 100 / (span[1] - span[0]),
    }
    return Announcement(**(fields | changes))


def make_view(*peers: Announcement) -> SwarmView:
    return SwarmView.from_announcements(MODEL, peers, NOW, 80)


def plan(view: SwarmView, span: tuple[int, int], seed: int = 0, **options: Any) -> Route:
    options = {"costs": SILENT} | options
    return plan_route(view, Span(*span), rng=random.Random(seed), **options)


def show(route: Route) -> list[tuple[str, str]]:
    return [(hop.peer.peer_id, str(hop.span)) for hop in route.hops]


def make_known_costs(peers: Collection[Announcement], rtts: Sequence[float]) -> RoutingCosts:
    """Return the costs of a client for which every peer has worked as quickly as it announced."""
    return RoutingCosts(
        {peer.peer_id: rtt for peer, rtt in zip(peers, rtts, strict=True)},
        0.0,
        block_seconds={
            peer.peer_id: 1 / ((peer.decode_steps_per_second or 0) * len(peer.span))
            for peer in peers
        },
    )


def compute_cost(route: Collection[Hop], costs: RoutingCosts) -> float:
    """What the module's docstring says that a route costs, for peers with measured speeds."""
    return sum(
        costs.rtt_seconds[hop.peer.peer_id]
        + hop.peer.queue_seconds
        + len(hop.span) / ((hop.peer.decode_steps_per_second or 0) * len(hop.peer.span))
        for hop in route
    )


def find_least_seconds(peers: Collection[Announcement], span: Span, costs: RoutingCosts) -> float:
    """Return the cost of the cheapest route: from each block, every peer to every exit."""
    least = {span.stop: 0.0}
    for block in range(span.stop - 1, span.start - 1, -1):
        least[block] = min(
            (
                compute_cost([Hop(peer, Span(block, stop))], costs) + least[stop]
                for peer in peers
                for stop in range(block + 1, min(peer.span.stop, span.stop) + 1)
                if block in peer.span
            ),
            default=math.inf,
        )
    return least[span.start]


@pytest.mark.parametrize("seed", range(50))
def test_route_through_a_crowd_with_ties_is_the_cheapest(seed: int) -> None:
    """Few different costs make many ties; some crowds are larger than what is compared at first."""
    rng = random.Random(seed)
    num_values = rng.choice((1, 2, 4, 1000))
    peers = []
    for index in range(rng.choice((3, 12, 60, 120))):
        start = rng.randrange(12)
        changes: dict[str, Any] = {
            "decode_steps_per_second": 1.0 + rng.randrange(num_values),
            "queue_seconds": rng.randrange(num_values) / num_values,
            "weights": rng.choice(("int8", "fp32")),
            "state": rng.choice((PeerState.ONLINE, PeerState.ONLINE, PeerState.DRAINING)),
        }
        peers.append(make_peer(f"p{index}", (start, rng.randint(start + 1, 12)), **changes))
    costs = make_known_costs(peers, [rng.choice((0.0, 0.05, 0.2)) for _ in peers])
    weights = rng.choice((None, "int8"))
    exclude = {peer.peer_id for peer in peers if rng.random() < 0.1}
    start = rng.randrange(12)
    span = Span(start, rng.randint(start + 1, 12))
    usable = [
        peer
        for peer in peers
        if peer.state is PeerState.ONLINE
        and peer.peer_id not in exclude
        and weights in (None, peer.weights)
    ]
    least_seconds = find_least_seconds(usable, span, costs)

    if least_seconds == math.inf:
        with pytest.raises(RouteError):
            plan_route(make_view(*peers), span, costs, rng, exclude, weights)
        return
    route = plan_route(make_view(*peers), span, costs, rng, exclude, weights)

    assert all(hop.peer in usable and hop.peer.span.covers(hop.span) for hop in route.hops)
    stops = [span.start, *(hop.span.stop for hop in route.hops)]
    assert stops[:-1] == [hop.span.start for hop in route.hops]
    assert stops[-1] == span.stop
    assert compute_cost(route.hops, costs) == pytest.approx(least_seconds)


def test_faster_peer_takes_over_as_soon_as_it_can() -> None:
    slow, fast = make_peer("slow", (0, 8)), make_peer("fast", (3, 8), decode_steps_per_second=1e3)
    costs = RoutingCosts({slow.peer_id: 0.001, fast.peer_id: 0.001}, 0.0)

    assert show(plan(make_view(slow, fast), (0, 8), costs=costs)) == [
        ("slow", "0:3"),
        ("fast", "3:8"),
    ]


def test_peer_without_room_is_dearer_and_still_there_when_it_is_the_only_one() -> None:
    small = make_peer("small", (0, 80), free_kv_tokens=128)
    roomy = make_peer("roomy", (0, 80), free_kv_tokens=4096, decode_steps_per_second=0.6)
    far = make_peer("roomy", (0, 80), free_kv_tokens=4096, decode_steps_per_second=0.2)
    long, short = (replace(SILENT, needed_kv_tokens=tokens) for tokens in (604, 128))

    assert show(plan(make_view(small, roomy), (0, 80), costs=long)) == [("roomy", "0:80")]
    assert show(plan(make_view(small, roomy), (0, 80), costs=short)) == [("small", "0:80")]
    assert show(plan(make_view(small, far), (0, 80), costs=long)) == [("small", "0:80")]
    assert show(plan(make_view(small), (0, 80), costs=long)) == [("small", "0:80")]


def test_part_of_a_peers_blocks_takes_part_of_its_room() -> None:
    costs = replace(SILENT, needed_kv_tokens=100)
    wide = make_peer("wide", (0, 80), free_kv_tokens=50)
    exact = make_peer("exact", (0, 40), free_kv_tokens=100, decode_steps_per_second=2.4)

    assert show(plan(make_view(wide, exact), (0, 40), costs=costs)) == [("wide", "0:40")]
    assert show(plan(make_view(wide, exact), (0, 80), costs=costs)) != [("wide", "0:80")]


def test_speed_under_load_counts_before_the_speed_alone() -> None:
    loaded = make_peer("loaded", (0, 8), loaded_decode_steps_per_second=1.0)
    other = make_peer("other", (0, 8), decode_steps_per_second=5.0)

    assert show(plan(make_view(loaded, other), (0, 8))) == [("other", "0:8")]


def test_speed_under_load_that_is_above_the_speed_alone_does_not_count() -> None:
    boasting = make_peer(
        "boasting", (0, 8), loaded_decode_steps_per_second=1e9, decode_steps_per_second=1e-9
    )
    other = make_peer("other", (0, 8), decode_steps_per_second=5.0)

    assert show(plan(make_view(boasting, other), (0, 8))) == [("other", "0:8")]


def test_measured_time_counts_before_a_faster_announcement_but_not_before_a_slower_one() -> None:
    first = make_peer("first", (0, 8), decode_steps_per_second=1e3)
    second = make_peer("second", (0, 8), decode_steps_per_second=10.0)

    def choose(first_seconds: float) -> str:
        costs = RoutingCosts(
            {}, 0.0, block_seconds={first.peer_id: first_seconds, second.peer_id: 0.001}
        )
        return plan(make_view(first, second), (0, 8), costs=costs).hops[0].peer.peer_id

    assert choose(0.001) == "first"
    assert choose(0.1) == "second"


def test_stranger_is_taken_to_be_only_so_much_faster_than_those_who_have_shown_it() -> None:
    known = make_peer("known", (0, 8), decode_steps_per_second=10.0)
    boasting = [make_peer(f"b{i}", (0, 8), decode_steps_per_second=1e9) for i in range(5)]

    def choose(rtt: float) -> str:
        costs = RoutingCosts({known.peer_id: rtt}, 0.0, block_seconds={known.peer_id: 0.0125})
        return plan(make_view(known, *boasting), (0, 8), costs=costs).hops[0].peer.peer_id

    # Getting to know somebody costs a round trip; all blocks may take a quarter of 0.1 s there.
    assert choose(0.07) != "known"
    assert choose(0.08) == "known"


def test_among_strangers_nobody_is_taken_to_be_much_faster_than_most() -> None:
    near = make_peer("near", (0, 8), decode_steps_per_second=10.0)
    others = [make_peer(f"p{i}", (0, 8), decode_steps_per_second=10.0) for i in range(2)]
    boasting = make_peer("boasting", (0, 8), decode_steps_per_second=1e9)
    rtts = {peer.peer_id: 0.1 for peer in (*others, boasting)} | {near.peer_id: 0.01}
    costs = RoutingCosts(rtts, 0.0)

    assert show(plan(make_view(near, *others, boasting), (0, 8), costs=costs)) == [("near", "0:8")]


def test_peer_without_a_measured_speed_is_taken_for_an_average_one() -> None:
    unknown = make_peer("unknown", (0, 8), decode_steps_per_second=None)
    slow = make_peer("slow", (0, 8), decode_steps_per_second=1.0)
    fast = make_peer("fast", (0, 8), decode_steps_per_second=100.0)
    others = [make_peer(f"p{i}", (8, 16), decode_steps_per_second=50.0) for i in range(3)]

    assert show(plan(make_view(unknown, slow, *others), (0, 8))) == [("unknown", "0:8")]
    assert show(plan(make_view(unknown, fast, *others), (0, 8))) == [("fast", "0:8")]


@pytest.mark.parametrize("seed", range(10))
def test_route_has_few_hops_before_anything_was_measured(seed: int) -> None:
    """With hops for free, noise alone would change the peer at every block."""
    pieces = [
        make_peer(f"piece{start}", (start, start + 40), decode_steps_per_second=25.0)
        for start in range(0, 41, 4)
    ]
    whole = make_peer("whole", (0, 80), decode_steps_per_second=12.5)

    route = plan(make_view(*pieces, whole), (0, 80), seed, costs=RoutingCosts())

    assert len(route.hops) <= 2


def test_missing_blocks_are_named_within_the_span_that_was_asked_for() -> None:
    view = make_view(make_peer("a", (4, 6)), make_peer("b", (9, 12)), make_peer("c", (30, 40)))

    with pytest.raises(RouteError, match="2:4, 6:9, 12:14") as error:
        plan(view, (2, 14))

    assert error.value.missing == (Span(2, 4), Span(6, 9), Span(12, 14))
    assert "--blocks 2:4" in str(error.value)


def make_crowd(num_peers: int, seed: int) -> list[Announcement]:
    rng = random.Random(seed)
    peers = [make_peer("whole", (0, 80))]
    for index in range(num_peers - 1):
        start = rng.randrange(76)
        stop = min(80, start + rng.randint(4, 30))
        speed = rng.choice((None, rng.uniform(0.1, 50)))
        peers.append(make_peer(f"p{index}", (start, stop), decode_steps_per_second=speed))
    return peers


def test_same_seed_gives_the_same_route_whatever_the_order_of_announcements() -> None:
    peers = make_crowd(40, 5)
    shuffled = random.Random(1).sample(peers, len(peers))

    routes = {
        tuple(show(plan(make_view(*order), (0, 80), seed=3, costs=RoutingCosts())))
        for order in (peers, peers[::-1], shuffled)
    }

    assert len(routes) == 1


def test_noise_spreads_clients_over_equal_peers() -> None:
    view = make_view(*(make_peer(f"p{index}", (0, 80)) for index in range(4)))

    chosen = [
        plan(view, (0, 80), seed, costs=RoutingCosts()).hops[0].peer.peer_id for seed in range(80)
    ]

    counts = [chosen.count(PeerId(f"p{index}")) for index in range(4)]
    assert min(counts) > 10, counts


def test_noise_does_not_choose_much_worse_peers() -> None:
    slow = make_peer("slow", (0, 80), decode_steps_per_second=0.1)
    fast = make_peer("fast", (0, 80), decode_steps_per_second=1.0)

    chosen = {
        plan(make_view(slow, fast), (0, 80), seed, costs=RoutingCosts()).hops[0].peer.peer_id
        for seed in range(40)
    }

    assert chosen == {"fast"}


def make_incomparable(num_peers: int) -> list[Announcement]:
    """Return peers of which none beats another: the nearer, the slower."""
    return [
        make_peer(
            f"p{index:04}",
            (0, 80),
            decode_steps_per_second=1 + index,
            queue_seconds=10 + index / num_peers,
        )
        for index in range(num_peers)
    ]


def count_lines(num_peers: int) -> int:
    """Return how many lines of the router are executed for one route."""
    view, num_lines = make_view(*make_incomparable(num_peers)), 0

    def trace(frame: FrameType, event: str, _: object) -> Callable[..., Any] | None:
        nonlocal num_lines
        num_lines += event == "line"
        return trace if frame.f_code.co_filename == plan_route.__code__.co_filename else None

    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        plan(view, (0, 80))
    finally:
        sys.settrace(previous)
    return num_lines


def test_work_grows_in_step_with_the_swarm_even_if_peers_do_not_compare() -> None:
    few, many = count_lines(100), count_lines(400)

    assert few > 80
    assert many < 4.2 * few
    # A route over 10,000 peers is to be found within 20 ms: a few lines of Python for each peer
    # are affordable, one for each peer and block is not.
    assert many - few < 20 * 300


@pytest.mark.parametrize("speed", [5e-324, 0.0, None, 1e12])
@pytest.mark.parametrize("queue_seconds", [0.0, 1e12])
def test_absurd_announcements_still_give_a_route(speed: float | None, queue_seconds: float) -> None:
    absurd = {"decode_steps_per_second": speed, "queue_seconds": queue_seconds}
    view = make_view(*(make_peer(f"p{index}", (0, 80), **absurd) for index in range(3)))

    assert plan(view, (0, 80), costs=RoutingCosts()).hops[0].span == Span(0, 80)
