"""Which peers to send hidden states through: a pure decision over a swarm view.

Shortest path over block boundaries: a hop costs its network round trip, what the peer's queue
delays it, and the compute of the blocks used on it; more where the peer lacks room for the session.
In a chain there are no round trips but the ways to the first hop, from each to the next, and back:
each edge between two peers has its own cost. Of a large swarm only the best peers of each block are
compared for that, some from each part of the network: two in one house far away are a good chain,
too, and each of them alone is not.

No peer is believed beyond what can be: whatever peers say of the round trip between two of them, it
is no more than the client's own round trips to both together, and no less than what these differ
by. So a peer gains little by lying about it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...protocol.errors import RouteError
from ...protocol.ids import PeerId
from ...protocol.records.announcements import Announcement, shorten
from ...protocol.records.coordinates import ORIGIN, SETTLED_ERROR, Coordinate
from ...protocol.records.swarm_view import SwarmView
from ...protocol.spans import Span
from ...protocol.versions import CHAIN_VERSION, REVERSE_VERSION
from .route import Ends, Hop, Route

Column = NDArray[Any]
"""A number for each peer."""

Table = NDArray[Any]
"""A number for each peer and each other one."""

_MOST_SPEEDUP = 4.0
"""How many times faster than others a peer is believed to be that has not shown it."""

_FULL_FACTOR = 4.0
"""How many times as dear a peer is that announces no room at all for what a session may need. It
is no filter: sessions seldom grow to their limit, and what was announced may be over by now."""

_PASSING_SECONDS = 0.001
"""Seconds for passing a step between two processes on one machine: where hops cost nothing, a
chain would have one for every block."""

MOST_COMPARED = 256
"""How many peers are compared with each other, edge by edge; with more, a choice is made before."""

_NUM_REGIONS = 4
_BEST_OF_REGION = 6
"""How many peers of a region are looked at for each block."""

_MOST_OF_REGION = 400
"""Among how many of a region those are looked for first: no other serves most blocks better."""


class PeerCoordinates(NamedTuple):
    """The announced coordinates of peers; `heights` are NaN for those without one."""

    points: Table
    heights: Column


class PricedPeers(NamedTuple):
    """The cost of using each peer, with noise, within the span that is wanted; one row a peer.

    Columns and not objects, for a route over ten thousand peers is to be found while a person
    does not notice. The cost of a peer is its time multiplied by `dearness`, which
    `hop_seconds` and `block_seconds` contain already.
    """

    starts: Column
    stops: Column
    rtt_seconds: Column
    dearness: Column
    hop_seconds: Column
    """For a hop, however many blocks are used on it; without the ways there and on."""
    block_seconds: Column

    def take(self, rows: Column) -> PricedPeers:
        """Return some of the peers."""
        return PricedPeers(*(column[rows] for column in self))


class Edges(NamedTuple):
    """The network costs of a chain: to the first hop, between any two, and from the last one."""

    first_seconds: Column
    between_seconds: Table
    last_seconds: Column


@dataclass(frozen=True)
class RoutingCosts:
    """The measurements of a client; all times in seconds.

    `noise_fraction` spreads clients over peers of about the same cost.
    """

    rtt_seconds: Mapping[PeerId, float] = field(default_factory=dict)
    noise_fraction: float = 0.1
    unknown_rtt_seconds: float = 0.05
    """The assumed cost of a hop before any round trip was measured: free hops would make a
    route of a hop per block."""
    block_seconds: Mapping[PeerId, float] = field(default_factory=dict)
    """Of peers that have worked for us; all others are strangers, whose word counts for less."""
    needed_kv_tokens: float = 0.0
    """How far a session may grow: tokens of one row, in the floats that announcements count."""
    broken_links: Collection[tuple[PeerId, PeerId]] = ()
    """Pairs of peers of which one cannot push to the other, for now."""
    coordinate: Coordinate | None = None
    """The network coordinate of the client itself, if it knows."""

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
    _check_coverage(span, starts, stops, weights)
    coordinates = read_coordinates(peer.coordinate for peer in peers)
    priced = _price_peers(span, peers, (starts, stops), coordinates, costs, rng)
    return _find_cheapest(span, peers, priced, coordinates, costs, ends)


def _read_spans(peers: Sequence[Announcement]) -> tuple[Column, Column]:
    """Return where the spans of peers start and stop."""
    spans = [peer.span for peer in peers]
    starts = np.array([own.start for own in spans], dtype=int)
    return starts, np.array([own.stop for own in spans], dtype=int)


def _check_coverage(span: Span, starts: Column, stops: Column, weights: str | None) -> None:
    """Raise RouteError naming every maximal span of `span` that none of the peers serves."""
    begun = np.bincount(starts.clip(span.start, span.stop) - span.start, minlength=len(span) + 1)
    ended = np.bincount(stops.clip(span.start, span.stop) - span.start, minlength=len(span) + 1)
    is_served = (begun - ended).cumsum()[:-1] > 0
    if is_served.all():
        return
    changes = span.start + np.flatnonzero(np.diff(is_served, prepend=True, append=True))
    missing = [Span(int(start), int(stop)) for start, stop in changes.reshape(-1, 2)]
    names = ", ".join(map(str, missing))
    kind = f" with {weights} weights" if weights else ""
    raise RouteError(
        f"no reachable peer{kind} serves blocks {names}; start one with "
        f"`shoal serve MODEL --blocks {missing[0]} --join CODE` or wait until one comes back",
        missing,
    )


def _price_peers(
    span: Span,
    peers: Sequence[Announcement],
    spans: tuple[Column, Column],
    coordinates: PeerCoordinates,
    costs: RoutingCosts,
    rng: random.Random,
) -> PricedPeers:
    """Return the cost of each peer, with noise; peers that serve nothing of `span` stay empty."""
    starts, stops = spans[0].clip(min=span.start), spans[1].clip(max=span.stop)
    all_blocks = spans[1] - spans[0]
    typical_rtt_seconds = costs.estimate_unknown_rtt_seconds()
    shown_seconds = _look_up(costs.block_seconds, peers)
    # Peers that are known to work are preferred.
    waiting_seconds = np.where(np.isnan(shown_seconds), typical_rtt_seconds, 0.0)
    waiting_seconds += np.array([peer.queue_seconds for peer in peers])
    normal = np.random.default_rng(rng.getrandbits(64)).standard_normal(len(peers))
    noise = np.exp(costs.noise_fraction * normal)
    dearness = noise * _rate_room(peers, (stops - starts) / all_blocks, costs)
    announced_seconds = _read_block_seconds(peers, all_blocks)
    block_seconds = _estimate_block_seconds(announced_seconds, shown_seconds)
    return PricedPeers(
        starts,
        stops,
        _expect_rtts(peers, coordinates, costs),
        dearness,
        dearness * waiting_seconds,
        dearness * block_seconds,
    )


def _expect_rtts(
    peers: Sequence[Announcement], coordinates: PeerCoordinates, costs: RoutingCosts
) -> Column:
    """Return the client's round trips: measured, or else by coordinates, or else as to most."""
    seconds = _look_up(costs.rtt_seconds, peers)
    if costs.coordinate is not None and costs.coordinate.is_settled:
        seconds = np.where(np.isnan(seconds), estimate_rtts(costs.coordinate, coordinates), seconds)
    return np.where(np.isnan(seconds), costs.estimate_unknown_rtt_seconds(), seconds)


def _rate_room(
    peers: Sequence[Announcement], used_fractions: Column, costs: RoutingCosts
) -> Column:
    """Return how many times as dear a peer is because it will run out of room half way.

    It counts free tokens through all of its blocks, and a session may use a fraction of them.
    """
    if not costs.needed_kv_tokens:
        return np.ones(len(peers))
    # Peers that serve nothing of the span are left empty anyway.
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
    faster; and a peer without measurements is taken to be only so much faster than the measured
    ones, or than most announce. Otherwise the peer that announces the most gets every session.
    """
    known = announced[~np.isnan(announced)]
    unknown = float(np.median(known)) if known.size else 1e-3  # all alike: only ratios matter then
    seconds = np.fmax(np.where(np.isnan(announced), unknown, announced), shown)
    is_stranger = np.isnan(shown)
    least = (unknown if is_stranger.all() else seconds[~is_stranger].min()) / _MOST_SPEEDUP
    return np.where(is_stranger, np.maximum(seconds, least), seconds)


def _find_cheapest(
    span: Span,
    peers: Sequence[Announcement],
    priced: PricedPeers,
    coordinates: PeerCoordinates,
    costs: RoutingCosts,
    ends: Ends | None,
) -> Route:
    """Return the cheapest route over the peers that are worth a closer look.

    In a star (no `ends`), the way from each peer to the next one leads through the client.
    """
    rows = choose_compared(span, priced, coordinates.points)
    compared, priced = [peers[row] for row in rows], priced.take(rows)
    if ends is None:
        half_seconds = 0.5 * priced.dearness * priced.rtt_seconds
        edges = Edges(half_seconds, half_seconds[:, None] + half_seconds, half_seconds)
    else:
        passing_seconds = priced.dearness * _PASSING_SECONDS
        priced = priced._replace(hop_seconds=priced.hop_seconds + passing_seconds)
        edges = _price_edges(compared, priced.dearness, costs, ends)
    chosen = find_cheapest_chain(span, priced, edges)
    return Route(tuple(Hop(compared[row], used) for row, used in chosen))


def expect_way_seconds(peers: Sequence[Announcement], costs: RoutingCosts) -> list[float]:
    """Return the ways of a chain over peers: to the first, from each to the next, and back."""
    rtt_seconds, one_way = _expect_ways(peers, costs)
    between = one_way[np.arange(len(peers) - 1), np.arange(1, len(peers))]
    return [0.5 * float(rtt_seconds[0]), *map(float, between), 0.5 * float(rtt_seconds[-1])]


def _expect_ways(peers: Sequence[Announcement], costs: RoutingCosts) -> tuple[Column, Table]:
    """Return the client's round trips to peers, and the one-way seconds from each to each other."""
    coordinates = read_coordinates(peer.coordinate for peer in peers)
    rtt_seconds = _expect_rtts(peers, coordinates, costs)
    is_measured = np.array([peer.peer_id in costs.rtt_seconds for peer in peers])
    broken = costs.broken_links
    return rtt_seconds, estimate_edges(peers, coordinates, rtt_seconds, is_measured, broken)


def _price_edges(
    peers: Sequence[Announcement], dearness: Column, costs: RoutingCosts, ends: Ends
) -> Edges:
    """Return what the ways between peers cost, with the noise of both ends."""
    everybody = list({peer.peer_id: peer for peer in (*peers, *ends.known)}.values())
    rtt_seconds, one_way = _expect_ways(everybody, costs)
    rows = {peer.peer_id: row for row, peer in enumerate(everybody)}
    num_peers = len(peers)
    first = last = 0.5 * rtt_seconds[:num_peers]
    if ends.before is not None:
        first = one_way[rows[ends.before.peer_id], :num_peers]
    if ends.after is not None:
        last = one_way[:num_peers, rows[ends.after.peer_id]]
    between = one_way[:num_peers, :num_peers]
    return Edges(dearness * first, 0.5 * (dearness[:, None] + dearness) * between, dearness * last)


def choose_compared(span: Span, priced: PricedPeers, points: Table) -> Column:
    """Return the rows of the peers that are worth being compared edge by edge, in their order."""
    # Most of a large swarm serve nothing of the span that a lost hop leaves open.
    useful = np.flatnonzero(priced.starts < priced.stops)
    if len(useful) <= MOST_COMPARED:
        return useful
    priced, points = priced.take(useful), points[useful]
    num_blocks = priced.stops - priced.starts
    # The cost of a block there, if the whole span of the peer is used and all others are near it.
    shares = (priced.hop_seconds + 0.5 * priced.dearness * priced.rtt_seconds) / num_blocks
    scores = shares + priced.dearness * priced.rtt_seconds / len(span) + priced.block_seconds
    ranked = scores.argsort(kind="stable")
    regions = _find_regions(points)[ranked]
    blocks = np.arange(span.start, span.stop)[:, None]
    chosen = [
        _choose_best(priced, ranked[regions == region][:_MOST_OF_REGION], blocks)
        for region in range(_NUM_REGIONS)
    ]
    rows = np.concatenate(chosen)
    missing = blocks[~_find_serving(priced, rows, blocks).any(axis=1)]
    rare = _choose_best(priced, ranked, missing) if missing.size else ranked[:0]
    return useful[np.unique(np.concatenate([rows, rare]))]


def _choose_best(priced: PricedPeers, ranked: Column, blocks: Column) -> Column:
    """Return the first few of some rows that serve each of the blocks."""
    serving = _find_serving(priced, ranked, blocks)
    ranks = serving.cumsum(axis=1, dtype=np.int16)
    return ranked[(serving & (ranks <= _BEST_OF_REGION)).any(axis=0)]


def _find_serving(priced: PricedPeers, rows: Column, blocks: Column) -> Table:
    """Return for each block which of the rows serve it."""
    return (priced.starts[rows] <= blocks) & (blocks < priced.stops[rows])


def _find_regions(points: Table) -> Column:
    """Return for each peer which of a few peers far from each other it is nearest to."""
    nearest = _square_distances(points, points.mean(axis=0))
    regions = np.zeros(len(points), dtype=int)
    farthest = int(nearest.argmin())  # the first one is in the middle
    for region in range(_NUM_REGIONS):
        apart = _square_distances(points, points[farthest])
        is_nearer = apart < nearest if region else np.ones(len(points), dtype=bool)
        regions[is_nearer] = region
        nearest = np.where(is_nearer, apart, nearest)
        farthest = int(nearest.argmax())
    return regions


def _square_distances(points: Table, point: Column) -> Column:
    differences = points - point
    return np.einsum("pk,pk->p", differences, differences)


def find_cheapest_chain(span: Span, priced: PricedPeers, edges: Edges) -> list[tuple[int, Span]]:
    """Return each hop of the cheapest chain, the row of its peer and its span, by a sweep over the
    blocks from the last to the first.

    Before each block, every peer that serves it knows the cheapest way on from there: through the
    next block as well, or over to one of those that serve that.
    """
    num_peers = len(priced.starts)
    onward_seconds = np.full(num_peers, np.inf)  # to the end, from where a peer is
    exits = np.zeros(num_peers, dtype=int)
    followers = np.full(num_peers, -1)
    plans: dict[int, tuple[Column, Column]] = {}  # exits and followers by first block
    following = np.zeros(0, dtype=int)
    for block in range(span.stop - 1, span.start - 1, -1):
        serving = np.flatnonzero((priced.starts <= block) & (block < priced.stops))
        if block + 1 == span.stop:
            leaving_seconds, onto = edges.last_seconds[serving], np.full(len(serving), -1)
        else:
            entry_seconds = priced.hop_seconds[following] + onward_seconds[following]
            ways = edges.between_seconds[np.ix_(serving, following)] + entry_seconds
            best = ways.argmin(axis=1)
            leaving_seconds, onto = ways[np.arange(len(serving)), best], following[best]
        leaves = (leaving_seconds < onward_seconds[serving]) | (priced.stops[serving] == block + 1)
        leavers = serving[leaves]
        onward_seconds[leavers] = leaving_seconds[leaves]
        exits[leavers], followers[leavers] = block + 1, onto[leaves]
        onward_seconds[serving] += priced.block_seconds[serving]
        plans[block] = exits.copy(), followers.copy()
        following = serving
    total = (edges.first_seconds + priced.hop_seconds + onward_seconds)[following]
    hops: list[tuple[int, Span]] = []
    row, block = int(following[total.argmin()]), span.start
    while row >= 0:
        exits, followers = plans[block]
        hops.append((row, Span(block, int(exits[row]))))
        row, block = int(followers[row]), int(exits[row])
    return hops


_read_numbers = attrgetter("x", "y", "z", "height", "error")


def read_coordinates(coordinates: Iterable[Coordinate | None]) -> PeerCoordinates:
    """Return where peers are, a row each."""
    known = (_read_numbers(coordinate or ORIGIN) for coordinate in coordinates)
    table = np.fromiter(chain.from_iterable(known), dtype=float).reshape(-1, 5)
    heights, errors = table[:, 3], table[:, 4]
    return PeerCoordinates(table[:, :3], np.where(errors <= SETTLED_ERROR, heights, np.nan))


def estimate_rtts(own: Coordinate, coordinates: PeerCoordinates) -> Column:
    """Return about how long the round trips from somewhere to peers are; NaN where nobody knows."""
    here = read_coordinates([own])
    differences = coordinates.points - here.points
    apart = np.sqrt(np.einsum("pk,pk->p", differences, differences))
    return apart + coordinates.heights + here.heights


def can_push(peer: Announcement, following: Announcement) -> bool:
    """Return whether a peer may push to another one, by what they announce: it can dial that, or
    holds connections that it has parked there.
    """
    version = min(peer.max_version, following.max_version)
    if following.endpoints:
        return version >= CHAIN_VERSION
    return version >= REVERSE_VERSION and following.is_parked_at(peer.peer_id)


def estimate_edges(
    peers: Sequence[Announcement],
    coordinates: PeerCoordinates,
    rtt_seconds: Column,
    is_measured: Column,
    broken_links: Collection[tuple[PeerId, PeerId]] = (),
) -> Table:
    """Return the one-way seconds from each peer to each other one.

    `rtt_seconds` are the client's own, to each, some of them measured. Measurements of
    peers count before estimates from their coordinates. If one peer cannot push to the other, or
    their distance is unknown, the way leads through the client.
    """
    through_client = rtt_seconds[:, None] + rtt_seconds
    told = _read_told(peers)
    seconds = np.where(np.isnan(told), _estimate_apart(coordinates), told)
    both_measured = is_measured[:, None] & is_measured
    differences = np.where(both_measured, np.abs(rtt_seconds[:, None] - rtt_seconds), 0.0)
    seconds = np.fmin(np.maximum(seconds, differences), through_client)
    seconds = np.where(_find_pushing(peers, broken_links), seconds, through_client)
    np.fill_diagonal(seconds, 0.0)
    return 0.5 * seconds


def _read_told(peers: Sequence[Announcement]) -> Table:
    """Return the round trips that peers have measured to each other; NaN for none.

    Of two that differ the longer one counts: to seem near is worth something, to seem far is not.
    """
    rows = {peer.peer_id: row for row, peer in enumerate(peers)}
    told = np.full((len(peers), len(peers)), np.nan)
    for row, peer in enumerate(peers):
        for other, seconds in peer.rtts:
            column = rows.get(other, row)  # a peer's distance to itself means nothing
            told[row, column] = told[column, row] = np.fmax(told[row, column], seconds)
    return told


def _estimate_apart(coordinates: PeerCoordinates) -> Table:
    """Return the round trips between peers by their coordinates; NaN where one is not settled."""
    points, heights = coordinates
    squares = (points**2).sum(axis=1)
    # |a - b|² as |a|² + |b|² - 2ab: no table with three numbers for each pair.
    apart = squares[:, None] + squares - 2.0 * (points @ points.T)
    return np.sqrt(apart.clip(min=0.0)) + heights[:, None] + heights


def _find_pushing(
    peers: Sequence[Announcement], broken_links: Collection[tuple[PeerId, PeerId]]
) -> NDArray[np.bool_]:
    speak_chain = np.array([peer.max_version >= CHAIN_VERSION for peer in peers], dtype=bool)
    can_be_dialled = np.array([bool(peer.endpoints) for peer in peers], dtype=bool)
    pushing = speak_chain[:, None] & (speak_chain & can_be_dialled)
    holders = {shorten(peer.peer_id): row for row, peer in enumerate(peers)}
    for column, following in enumerate(peers):
        for row in (holders[ending] for ending in following.parked_at if ending in holders):
            pushing[row, column] = can_push(peers[row], following)
    if broken_links:
        rows = {peer.peer_id: row for row, peer in enumerate(peers)}
        for before, after in broken_links:
            if before in rows and after in rows:
                pushing[rows[before], rows[after]] = False
    return pushing
