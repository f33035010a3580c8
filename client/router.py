"""Which peers to send hidden states through: a pure decision over a swarm view.

Shortest path over block boundaries: a hop costs its network round trip, what the peer's queue
delays it, and the compute of the blocks used on it; more where the peer lacks room for the session.
"""

import math
import random
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

from ..protocol.announcements import Announcement
from ..protocol.errors import RouteError
from ..protocol.ids import PeerId
from ..protocol.spans import Span, find_gaps
from ..protocol.swarm_view import SwarmView

_MOST_SPEEDUP = 4.0
"""How many times faster than others a peer is believed to be that has not shown it."""

_FULL_FACTOR = 4.0
"""How many times as dear a peer is that announces no room at all for what a session may need. It
is no filter: sessions seldom grow to their limit, and what was announced may be over by now."""

_MAX_RIVALS = 32
"""With how many offers each one is compared before the search."""


@dataclass(frozen=True)
class Hop:
    """A peer and the span used on it."""

    peer: Announcement
    span: Span


@dataclass(frozen=True)
class Route:
    """Hops that cover a span once, in order."""

    hops: tuple[Hop, ...]

    def __str__(self) -> str:
        return " → ".join(f"{hop.peer.peer_id[-6:]}[{hop.span}]" for hop in self.hops)


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

    def estimate_unknown_rtt_seconds(self) -> float:
        """Return what to expect of a peer that was never measured."""
        known = self.rtt_seconds.values()
        return median(known) if known else self.unknown_rtt_seconds


class _Offer(NamedTuple):
    """What using a peer costs, with noise, within the span that is wanted."""

    peer: Announcement
    start: int
    stop: int
    hop_seconds: float
    block_seconds: float


@dataclass(slots=True)
class _Use:
    """An offer, and the cheapest way to the end once the hidden states are at its peer."""

    offer: _Offer
    onward_seconds: float
    exit_block: int


def plan_route(
    view: SwarmView,
    span: Span,
    costs: RoutingCosts,
    rng: random.Random,
    exclude: Collection[PeerId] = (),
    weights: str | None = None,
) -> Route:
    """Return the cheapest route through `span`, with noise.

    Raises RouteError that names the blocks nobody serves among the peers that may be used.
    """
    peers = [
        peer
        for peer in view.online
        if (weights is None or peer.weights == weights) and peer.peer_id not in exclude
    ]
    check_coverage(span, peers, weights)
    return _find_cheapest(span, _drop_dominated(_draw_offers(span, peers, costs, rng)))


def _draw_offers(
    span: Span, peers: Sequence[Announcement], costs: RoutingCosts, rng: random.Random
) -> list[_Offer]:
    """Return what each peer that serves blocks of `span` costs, with noise."""
    typical_rtt_seconds = costs.estimate_unknown_rtt_seconds()
    offers: list[_Offer] = []
    for peer, block_seconds in zip(peers, _estimate_blocks(peers, costs), strict=True):
        start, stop = max(peer.span.start, span.start), min(peer.span.stop, span.stop)
        if start >= stop:
            continue
        noise = math.exp(rng.gauss(0.0, costs.noise_fraction))
        dearness = noise * _rate_room(peer, stop - start, costs.needed_kv_tokens)
        rtt_seconds = costs.rtt_seconds.get(peer.peer_id, typical_rtt_seconds)
        if peer.peer_id not in costs.block_seconds:
            rtt_seconds += typical_rtt_seconds  # who is known to work is preferred
        hop_seconds = dearness * (rtt_seconds + peer.queue_seconds)
        offers.append(_Offer(peer, start, stop, hop_seconds, dearness * block_seconds))
    return offers


def _rate_room(peer: Announcement, num_blocks: int, needed_kv_tokens: float) -> float:
    """Return how many times as dear a peer is because it will run out of room half way.

    It counts free tokens through all of its blocks, and a session may use fewer of them.
    """
    needed = needed_kv_tokens * num_blocks / len(peer.span)
    missing = max(0.0, needed - peer.free_kv_tokens)
    return 1.0 + (_FULL_FACTOR - 1.0) * missing / needed if missing else 1.0


def _estimate_blocks(peers: Sequence[Announcement], costs: RoutingCosts) -> list[float]:
    """Return what a block takes at each peer.

    An announcement may be slower than what was measured, for a peer may be busy by now, but not
    faster; and a stranger is taken to be only so much faster than those who have shown it, or
    than most announce: or else whoever announces the most gets every session.
    """
    announced = [_estimate_block_seconds(peer) for peer in peers]
    known = [seconds for seconds in announced if seconds is not None]
    unknown = median(known) if known else 1e-3  # all alike: only ratios matter then
    seconds = [
        max(unknown if given is None else given, costs.block_seconds.get(peer.peer_id, 0.0))
        for peer, given in zip(peers, announced, strict=True)
    ]
    is_stranger = [peer.peer_id not in costs.block_seconds for peer in peers]
    shown = [given for given, is_new in zip(seconds, is_stranger, strict=True) if not is_new]
    least = min(shown, default=unknown) / _MOST_SPEEDUP
    return [
        max(given, least) if is_new else given
        for given, is_new in zip(seconds, is_stranger, strict=True)
    ]


def _estimate_block_seconds(peer: Announcement) -> float | None:
    """Return the compute time of one block for one token; None if never measured.

    Nobody is quicker under load than alone: of two speeds that say so, the lower one counts. It
    is what the deadline is made from, and must not be slower than what the route was chosen for.
    """
    speeds = peer.loaded_decode_steps_per_second, peer.decode_steps_per_second
    speed = min((speed for speed in speeds if speed), default=None)
    return 1.0 / (speed * (peer.span.stop - peer.span.start)) if speed else None


def _drop_dominated(offers: list[_Offer]) -> list[_Offer]:
    """Leave out most offers to which another one is nowhere inferior.

    Whoever is cheapest per block beats nearly all of a crowd, so it is enough to compare with
    the first few of those. However peers announce themselves, this stays quick.
    """
    kept: list[_Offer] = []
    rivals: list[_Offer] = []
    for offer in sorted(offers, key=_seconds_per_block):
        if not _is_beaten(offer, rivals):
            kept.append(offer)
            if len(rivals) < _MAX_RIVALS:
                rivals.append(offer)
    return kept


def _seconds_per_block(offer: _Offer) -> float:
    """Return the cost of a block when the peer is used from end to end."""
    return offer.hop_seconds / (offer.stop - offer.start) + offer.block_seconds


def _is_beaten(offer: _Offer, rivals: list[_Offer]) -> bool:
    _, start, stop, hop_seconds, block_seconds = offer
    for _, rival_start, rival_stop, rival_hop_seconds, rival_block_seconds in rivals:
        if (
            rival_start <= start
            and stop <= rival_stop
            and rival_hop_seconds <= hop_seconds
            and rival_block_seconds <= block_seconds
        ):
            return True
    return False


def _find_cheapest(span: Span, offers: list[_Offer]) -> Route:
    """Return the cheapest route, by a sweep over the blocks from the last to the first.

    Before each block, every peer that serves it knows the cheapest way on: through the next block
    as well, or over to whoever is cheapest from there.
    """
    ending_at: dict[int, list[_Offer]] = defaultdict(list)
    for offer in offers:
        ending_at[offer.stop].append(offer)
    serving: list[_Use] = []
    first_hops: dict[int, Hop] = {}
    cheapest_seconds = 0.0  # from the next block to the end
    for block in range(span.stop - 1, span.start - 1, -1):
        serving = [use for use in serving if use.offer.start <= block]
        serving += [_Use(offer, math.inf, block + 1) for offer in ending_at[block + 1]]
        for use in serving:
            if cheapest_seconds < use.onward_seconds:
                use.onward_seconds, use.exit_block = cheapest_seconds, block + 1
            use.onward_seconds += use.offer.block_seconds
        first = min(serving, key=_total_seconds)
        cheapest_seconds = _total_seconds(first)
        first_hops[block] = Hop(first.offer.peer, Span(block, first.exit_block))
    hops = [first_hops[span.start]]
    while hops[-1].span.stop < span.stop:
        hops.append(first_hops[hops[-1].span.stop])
    return Route(tuple(hops))


def _total_seconds(use: _Use) -> float:
    return use.offer.hop_seconds + use.onward_seconds


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
