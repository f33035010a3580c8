"""Which peers to send hidden states through: a pure decision over a swarm view.

Shortest path over block boundaries: a hop costs its network round trip, what the peer's queue
delays it, and the compute of the blocks used on it.
"""

import random
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from statistics import median

from ..protocol.announcements import Announcement
from ..protocol.errors import RouteError
from ..protocol.ids import PeerId
from ..protocol.spans import Span, find_gaps
from ..protocol.swarm_view import SwarmView


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

    def estimate_hop_seconds(self, peer: Announcement) -> float:
        """Return the part of a hop's cost that does not depend on its length."""
        unknown = (
            median(self.rtt_seconds.values()) if self.rtt_seconds else self.unknown_rtt_seconds
        )
        return self.rtt_seconds.get(peer.peer_id, unknown) + peer.queue_seconds

    def estimate_block_seconds(self, peer: Announcement, unknown: float) -> float:
        """Return the compute time of one block for one token; `unknown` if never measured."""
        speed = peer.loaded_decode_steps_per_second or peer.decode_steps_per_second
        return 1.0 / (speed * len(peer.span)) if speed else unknown


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
        if peer.peer_id not in exclude and (weights is None or peer.weights == weights)
    ]
    check_coverage(span, peers, weights)
    overheads, block_costs = _draw_costs(peers, costs, rng)
    starts = {peer.span.start for peer in peers} | {span.stop}
    # best[b]: cheapest way from block b to the end, and the hop it begins with.
    best: dict[int, tuple[float, Hop | None]] = {span.stop: (0.0, None)}
    for block in range(span.stop - 1, span.start - 1, -1):
        for peer in peers:
            if block not in peer.span:
                continue
            last = min(peer.span.stop, span.stop)
            for exit_block in {last} | {start for start in starts if block < start < last}:
                if exit_block not in best:
                    continue
                compute = (exit_block - block) * block_costs[peer.peer_id]
                cost = overheads[peer.peer_id] + compute + best[exit_block][0]
                if block not in best or cost < best[block][0]:
                    best[block] = cost, Hop(peer, Span(block, exit_block))
    hops: list[Hop] = []
    block = span.start
    while block < span.stop:
        hop = best[block][1]
        assert hop is not None  # check_coverage made sure that every block has one
        hops.append(hop)
        block = hop.span.stop
    return Route(tuple(hops))


def check_coverage(span: Span, peers: Collection[Announcement], weights: str | None) -> None:
    """Raise RouteError naming every maximal span of `span` that none of the peers serves."""
    gaps = find_gaps(span.stop, (peer.span for peer in peers))
    missing = [part for gap in gaps if (part := gap.overlap(span))]
    if missing:
        names = ", ".join(str(gap) for gap in missing)
        kind = f" with {weights} weights" if weights else ""
        raise RouteError(
            f"no reachable peer{kind} serves blocks {names}; start one with "
            f"`shoal serve MODEL --blocks {missing[0]}` or wait until one comes back",
            missing,
        )


def _draw_costs(
    peers: Collection[Announcement], costs: RoutingCosts, rng: random.Random
) -> tuple[dict[PeerId, float], dict[PeerId, float]]:
    """Return the noisy cost of a hop and of a block on it, for every peer."""
    measured = [costs.estimate_block_seconds(peer, 0.0) for peer in peers]
    known = [seconds for seconds in measured if seconds > 0]
    unknown = median(known) if known else 1e-3  # all alike: only ratios matter then
    overheads, blocks = {}, {}
    for peer in sorted(peers, key=lambda peer: peer.peer_id):
        noise = rng.lognormvariate(0.0, costs.noise_fraction) if costs.noise_fraction else 1.0
        overheads[peer.peer_id] = noise * costs.estimate_hop_seconds(peer)
        blocks[peer.peer_id] = noise * costs.estimate_block_seconds(peer, unknown)
    return overheads, blocks
