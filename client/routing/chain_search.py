"""The cheapest chain: a shortest path over peers and blocks where each edge has its own cost.

Of a large swarm only the best peers of each block are looked at, some from each part of the
network: two in one house far away are a good chain, too, and each of them alone is not.
"""

from typing import NamedTuple

import numpy as np

from ...protocol.spans import Span
from .distances import Column, Table

MOST_COMPARED = 256
"""How many peers are compared with each other, edge by edge; with more, a choice is made before."""

_NUM_REGIONS = 4
_BEST_OF_REGION = 6
"""How many peers of a region are looked at for each block."""

_MOST_OF_REGION = 400
"""Among how many of a region those are looked for first: no other serves most blocks better."""


class Offers(NamedTuple):
    """What using each peer costs, with noise, within the span that is wanted; one row a peer.

    Columns and not objects, for a route over ten thousand peers is to be found while a person
    does not notice. Whatever a peer does costs `dearness` times as much as it takes; of
    `hop_seconds` and `block_seconds` that is part already.
    """

    starts: Column
    stops: Column
    rtt_seconds: Column
    dearness: Column
    hop_seconds: Column
    """For a hop, however many blocks are used on it; without the ways there and on."""
    block_seconds: Column

    def take(self, rows: Column) -> "Offers":
        """Return the offers of some peers."""
        return Offers(*(column[rows] for column in self))


class Edges(NamedTuple):
    """What the ways of a chain cost: to the first hop, between any two, and from the last one."""

    first_seconds: Column
    between_seconds: Table
    last_seconds: Column


class Leg(NamedTuple):
    """A hop of a chain: the row of its peer, and the span used there."""

    row: int
    span: Span


def choose_compared(span: Span, offers: Offers, points: Table) -> Column:
    """Return the rows of the peers that are worth being compared edge by edge, in their order."""
    # Most of a large swarm serve nothing of the span that a lost hop leaves open.
    useful = np.flatnonzero(offers.starts < offers.stops)
    if len(useful) <= MOST_COMPARED:
        return useful
    offers, points = offers.take(useful), points[useful]
    num_blocks = offers.stops - offers.starts
    # What a block costs there, if the peer is used from end to end and everybody else is near it.
    shares = (offers.hop_seconds + 0.5 * offers.dearness * offers.rtt_seconds) / num_blocks
    scores = shares + offers.dearness * offers.rtt_seconds / len(span) + offers.block_seconds
    ranked = scores.argsort(kind="stable")
    regions = _find_regions(points)[ranked]
    blocks = np.arange(span.start, span.stop)[:, None]
    chosen = [
        _choose_best(offers, ranked[regions == region][:_MOST_OF_REGION], blocks)
        for region in range(_NUM_REGIONS)
    ]
    rows = np.concatenate(chosen)
    missing = blocks[~_find_serving(offers, rows, blocks).any(axis=1)]
    rare = _choose_best(offers, ranked, missing) if missing.size else ranked[:0]
    return useful[np.unique(np.concatenate([rows, rare]))]


def _choose_best(offers: Offers, ranked: Column, blocks: Column) -> Column:
    """Return the first few of some rows that serve each of the blocks."""
    serving = _find_serving(offers, ranked, blocks)
    ranks = serving.cumsum(axis=1, dtype=np.int16)
    return ranked[(serving & (ranks <= _BEST_OF_REGION)).any(axis=0)]


def _find_serving(offers: Offers, rows: Column, blocks: Column) -> Table:
    """Return for each block which of the rows serve it."""
    return (offers.starts[rows] <= blocks) & (blocks < offers.stops[rows])


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


def find_cheapest_chain(span: Span, offers: Offers, edges: Edges) -> list[Leg]:
    """Return the cheapest chain, by a sweep over the blocks from the last to the first.

    Before each block, every peer that serves it knows the cheapest way on from there: through the
    next block as well, or over to one of those that serve that.
    """
    num_peers = len(offers.starts)
    onward_seconds = np.full(num_peers, np.inf)  # to the end, from where a peer is
    exits = np.zeros(num_peers, dtype=int)
    followers = np.full(num_peers, -1)
    plans: dict[int, tuple[Column, Column]] = {}  # exits and followers of who begins at a block
    following = np.zeros(0, dtype=int)
    for block in range(span.stop - 1, span.start - 1, -1):
        serving = np.flatnonzero((offers.starts <= block) & (block < offers.stops))
        if block + 1 == span.stop:
            leaving_seconds, onto = edges.last_seconds[serving], np.full(len(serving), -1)
        else:
            entry_seconds = offers.hop_seconds[following] + onward_seconds[following]
            ways = edges.between_seconds[np.ix_(serving, following)] + entry_seconds
            best = ways.argmin(axis=1)
            leaving_seconds, onto = ways[np.arange(len(serving)), best], following[best]
        leaves = (leaving_seconds < onward_seconds[serving]) | (offers.stops[serving] == block + 1)
        leavers = serving[leaves]
        onward_seconds[leavers] = leaving_seconds[leaves]
        exits[leavers], followers[leavers] = block + 1, onto[leaves]
        onward_seconds[serving] += offers.block_seconds[serving]
        plans[block] = exits.copy(), followers.copy()
        following = serving
    total = (edges.first_seconds + offers.hop_seconds + onward_seconds)[following]
    legs: list[Leg] = []
    row, block = int(following[total.argmin()]), span.start
    while row >= 0:
        exits, followers = plans[block]
        legs.append(Leg(row, Span(block, int(exits[row]))))
        row, block = int(followers[row]), int(exits[row])
    return legs
