"""Which peers to send hidden states through: a pure decision over a swarm view.

Shortest path over block boundaries: a hop costs its network round trip, what the peer's queue
delays it, and the compute of the blocks used on it; more where the peer lacks room for the session.
In a chain there are no round trips but the ways to the first hop, from each to the next, and back.
"""

import math
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

import numpy as np

from ...protocol.errors import RouteError
from ...protocol.ids import PeerId
from ...protocol.records.announcements import Announcement
from ...protocol.records.coordinates import Coordinate
from ...protocol.records.swarm_view import SwarmView
from ...protocol.spans import Span, find_gaps
from .chain_search import Edges, Offers, choose_compared, find_cheapest_chain
from .distances import Column, Places, estimate_rtts, measure_edges, read_places
from .route import Ends, Hop, Route

_MOST_SPEEDUP = 4.0
"""How many times faster than others a peer is believed to be that has not shown it."""

_FULL_FACTOR = 4.0
"""How many times as dear a peer is that announces no room at all for what a session may need. It
is no filter: sessions seldom grow to their limit, and what was announced may be over by now."""

_PASSING_SECONDS = 0.001
"""What it takes two processes to pass a step along that share a machine: where hops cost nothing, a
chain would have one for every block."""


@dataclass(frozen=True)
class RoutingCosts:
    """What a client has measured; all times in seconds.

    `noise_fraction` spreads clients over peers of about the same cost.
    """

    rtt_seconds: Mapping[PeerId, float] = field(default_factory=dict)
    noise_fraction: float = 0.1
    unknown_rtt_seconds: float = 0.05
    """What a hop is taken to cost before any round trip was measured: free hops would make a
    route of a hop per block."""
    block_seconds: Mapping[PeerId, float] = field(default_factory=dict)
    """Of peers that have worked for us; all others are strangers, whose word counts for less."""
    needed_kv_tokens: float = 0.0
    """How far a session may grow: tokens of one row, in the floats that announcements count."""
    cuts: Collection[tuple[PeerId, PeerId]] = ()
    """Who cannot push to whom, for now."""
    coordinate: Coordinate | None = None
    """Where the client itself stands in the network, if it knows."""

    def estimate_unknown_rtt_seconds(self) -> float:
        """Return what to expect of a peer that was never measured."""
        known = self.rtt_seconds.values()
        return median(known) if known else self.unknown_rtt_seconds


def plan_route(
    view: SwarmView,
    span: Span,
    costs: RoutingCosts,
    rng: random.Random,
    exclude: Collection[PeerId] = (),
    weights: str | None = None,
    ends: Ends | None = None,
) -> Route:
    """Return the cheapest route through `span`, with noise: a chain between `ends`, or a star.

    Raises RouteError that names the blocks nobody serves among the peers that may be used.
    """
    peers = [
        peer
        for peer in view.online
        if (weights is None or peer.weights == weights) and peer.peer_id not in exclude
    ]
    starts, stops = _read_spans(peers)
    if not _is_covered(span, starts, stops):
        check_coverage(span, peers, weights)
    places = read_places(peer.coordinate for peer in peers)
    offers = _draw_offers(span, peers, (starts, stops), places, costs, rng)
    if ends is not None:
        return _find_chain(span, peers, offers, places, costs, ends)
    return _find_star(span, peers, offers)


def _read_spans(peers: Sequence[Announcement]) -> tuple[Column, Column]:
    """Return where the spans of peers start and stop."""
    spans = [peer.span for peer in peers]
    starts = np.array([own.start for own in spans], dtype=int)
    return starts, np.array([own.stop for own in spans], dtype=int)


def _is_covered(span: Span, starts: Column, stops: Column) -> bool:
    """Return whether somebody serves each block, without a look at each peer."""
    begun = np.bincount(starts.clip(span.start, span.stop) - span.start, minlength=len(span) + 1)
    ended = np.bincount(stops.clip(span.start, span.stop) - span.start, minlength=len(span) + 1)
    return bool(((begun - ended).cumsum()[:-1] > 0).all())


def _draw_offers(
    span: Span,
    peers: Sequence[Announcement],
    spans: tuple[Column, Column],
    places: Places,
    costs: RoutingCosts,
    rng: random.Random,
) -> Offers:
    """Return what each peer costs, with noise; whoever serves nothing of `span` is left empty."""
    starts, stops = spans[0].clip(min=span.start), spans[1].clip(max=span.stop)
    all_blocks = spans[1] - spans[0]
    typical_rtt_seconds = costs.estimate_unknown_rtt_seconds()
    shown_seconds = _look_up(costs.block_seconds, peers)
    # Who is known to work is preferred.
    waiting_seconds = np.where(np.isnan(shown_seconds), typical_rtt_seconds, 0.0)
    waiting_seconds += np.array([peer.queue_seconds for peer in peers])
    normal = np.random.default_rng(rng.getrandbits(64)).standard_normal(len(peers))
    noise = np.exp(costs.noise_fraction * normal)
    dearness = noise * _rate_room(peers, (stops - starts) / all_blocks, costs)
    announced_seconds = _read_block_seconds(peers, all_blocks)
    block_seconds = _estimate_block_seconds(announced_seconds, shown_seconds)
    return Offers(
        starts,
        stops,
        _expect_rtts(peers, places, costs),
        dearness,
        dearness * waiting_seconds,
        dearness * block_seconds,
    )


def _expect_rtts(peers: Sequence[Announcement], places: Places, costs: RoutingCosts) -> Column:
    """Return the client's round trips: measured, or else by coordinates, or else as to most."""
    seconds = _look_up(costs.rtt_seconds, peers)
    if costs.coordinate is not None and costs.coordinate.is_settled:
        seconds = np.where(np.isnan(seconds), estimate_rtts(costs.coordinate, places), seconds)
    return np.where(np.isnan(seconds), costs.estimate_unknown_rtt_seconds(), seconds)


def _rate_room(
    peers: Sequence[Announcement], used_fractions: Column, costs: RoutingCosts
) -> Column:
    """Return how many times as dear a peer is because it will run out of room half way.

    It counts free tokens through all of its blocks, and a session may use a fraction of them.
    """
    if not costs.needed_kv_tokens:
        return np.ones(len(peers))
    # Whoever serves nothing of the span is left empty anyway.
    needed = costs.needed_kv_tokens * np.where(used_fractions > 0.0, used_fractions, 1.0)
    free = np.array([peer.free_kv_tokens for peer in peers])
    return 1.0 + (_FULL_FACTOR - 1.0) * ((needed - free) / needed).clip(min=0.0)


def _look_up(known: Mapping[PeerId, float], peers: Sequence[Announcement]) -> Column:
    """Return what is known of each peer, NaN where that is nothing."""
    if not known:
        return np.full(len(peers), math.nan)
    return np.array([known.get(peer.peer_id, math.nan) for peer in peers])


def _read_block_seconds(peers: Sequence[Announcement], num_blocks: Column) -> Column:
    """Return what a block takes for one token by each announcement; NaN if never measured.

    Nobody is quicker under load than alone: of two speeds that say so, the lower one counts. It
    is what the deadline is made from, and must not be slower than what the route was chosen for.
    """
    alone = np.array([peer.decode_steps_per_second or math.inf for peer in peers])
    loaded = np.array([peer.loaded_decode_steps_per_second or math.inf for peer in peers])
    with np.errstate(over="ignore"):  # a speed may be announced as next to nothing
        seconds = 1.0 / (np.minimum(alone, loaded) * num_blocks)
    return np.where(seconds > 0.0, seconds, math.nan)


def _estimate_block_seconds(announced: Column, shown: Column) -> Column:
    """Return what a block takes at each peer.

    An announcement may be slower than what was measured, for a peer may be busy by now, but not
    faster; and a stranger is taken to be only so much faster than those who have shown it, or
    than most announce: or else whoever announces the most gets every session.
    """
    known = announced[~np.isnan(announced)]
    unknown = float(np.median(known)) if known.size else 1e-3  # all alike: only ratios matter then
    seconds = np.fmax(np.where(np.isnan(announced), unknown, announced), shown)
    is_stranger = np.isnan(shown)
    least = (unknown if is_stranger.all() else seconds[~is_stranger].min()) / _MOST_SPEEDUP
    return np.where(is_stranger, np.maximum(seconds, least), seconds)


def _find_star(span: Span, peers: Sequence[Announcement], offers: Offers) -> Route:
    """Return the cheapest route, by a sweep over the blocks from the last to the first.

    Before each block, every peer that serves it knows the cheapest way on: through the next block
    as well, or over to whoever is cheapest from there.
    """
    hop_seconds = offers.dearness * offers.rtt_seconds + offers.hop_seconds
    onward_seconds = np.full(len(peers), math.inf)  # to the end, from where a peer is
    exit_blocks = offers.stops.copy()
    first_hops: dict[int, Hop] = {}
    cheapest_seconds = 0.0  # from the next block to the end
    for block in range(span.stop - 1, span.start - 1, -1):
        serving = np.flatnonzero((offers.starts <= block) & (block < offers.stops))
        leaving = serving[cheapest_seconds < onward_seconds[serving]]
        onward_seconds[leaving] = cheapest_seconds
        exit_blocks[leaving] = block + 1
        onward_seconds[serving] += offers.block_seconds[serving]
        total_seconds = hop_seconds[serving] + onward_seconds[serving]
        cheapest = int(total_seconds.argmin())
        cheapest_seconds, first = float(total_seconds[cheapest]), int(serving[cheapest])
        first_hops[block] = Hop(peers[first], Span(block, int(exit_blocks[first])))
    hops = [first_hops[span.start]]
    while hops[-1].span.stop < span.stop:
        hops.append(first_hops[hops[-1].span.stop])
    return Route(tuple(hops))


def _find_chain(
    span: Span,
    peers: Sequence[Announcement],
    offers: Offers,
    places: Places,
    costs: RoutingCosts,
    ends: Ends,
) -> Route:
    """Return the cheapest chain among the peers that are worth a closer look."""
    rows = choose_compared(span, offers, places.points)
    compared, offers = [peers[row] for row in rows], offers.take(rows)
    offers = offers._replace(hop_seconds=offers.hop_seconds + offers.dearness * _PASSING_SECONDS)
    legs = find_cheapest_chain(span, offers, _price_edges(compared, offers.dearness, costs, ends))
    return Route(tuple(Hop(compared[leg.row], leg.span) for leg in legs))


def expect_way_seconds(peers: Sequence[Announcement], costs: RoutingCosts) -> list[float]:
    """Return the ways of a chain over peers: to the first, from each to the next, and back."""
    places = read_places(peer.coordinate for peer in peers)
    rtt_seconds = _expect_rtts(peers, places, costs)
    is_measured = np.array([peer.peer_id in costs.rtt_seconds for peer in peers])
    one_way = measure_edges(peers, places, rtt_seconds, is_measured, costs.cuts)
    between = one_way[np.arange(len(peers) - 1), np.arange(1, len(peers))]
    return [0.5 * float(rtt_seconds[0]), *map(float, between), 0.5 * float(rtt_seconds[-1])]


def _price_edges(
    peers: Sequence[Announcement], dearness: Column, costs: RoutingCosts, ends: Ends
) -> Edges:
    """Return what the ways between peers cost, with the noise of both ends."""
    everybody = list({peer.peer_id: peer for peer in (*peers, *ends.known)}.values())
    places = read_places(peer.coordinate for peer in everybody)
    rtt_seconds = _expect_rtts(everybody, places, costs)
    is_measured = np.array([peer.peer_id in costs.rtt_seconds for peer in everybody])
    one_way = measure_edges(everybody, places, rtt_seconds, is_measured, costs.cuts)
    rows = {peer.peer_id: row for row, peer in enumerate(everybody)}
    num_peers = len(peers)
    first = last = 0.5 * rtt_seconds[:num_peers]
    if ends.before is not None:
        first = one_way[rows[ends.before.peer_id], :num_peers]
    if ends.after is not None:
        last = one_way[:num_peers, rows[ends.after.peer_id]]
    between = one_way[:num_peers, :num_peers]
    return Edges(dearness * first, 0.5 * (dearness[:, None] + dearness) * between, dearness * last)


def check_coverage(span: Span, peers: Collection[Announcement], weights: str | None) -> None:
    """Raise RouteError naming every maximal span of `span` that none of the peers serves."""
    longest: dict[int, Span] = {}
    for peer in peers:
        start = peer.span.start
        if start not in longest or peer.span.stop > longest[start].stop:
            longest[start] = peer.span
    gaps = find_gaps(span.stop, longest.values())
    missing = [part for gap in gaps if (part := gap.overlap(span))]
    if missing:
        names = ", ".join(str(gap) for gap in missing)
        kind = f" with {weights} weights" if weights else ""
        raise RouteError(
            f"no reachable peer{kind} serves blocks {names}; start one with "
            f"`shoal serve MODEL --blocks {missing[0]}` or wait until one comes back",
            missing,
        )
