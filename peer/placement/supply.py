"""Supply: the hosts and steps per second that peers give to each block, and their room.

Announcements are claims, so each is worth only so much here, and only while it is renewed.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...protocol.ids import PeerId
from ...protocol.records.announcements import Announcement, PeerState
from ...protocol.records.swarm_view import SwarmView

MIN_REPLICAS = 2
"""How many hosts every block is to have before anything else counts."""

_MOST_SPEEDUP = 4.0
"""How many times faster than the median a peer is believed to be. A peer that claims more would
make others leave the blocks that it says it serves."""

_PUNCTUAL_FRACTION = 1.15 / 3
"""Part of its life after which an announcement should have been renewed. It lives for three
periods: who is a seventh of one late is taken for lost, long before the record expires. A wrong
guess costs little, for who turns out to be there counts again."""

LEAST_SPEED = 1e-6
"""Blocks per second. A peer that needs two weeks for a block hosts nothing, and would only make
the arithmetic overflow."""

Column = NDArray[Any]
"""A number for each peer or for each block."""


@dataclass(frozen=True)
class BlockRoom:
    """Memory of a peer for blocks, and what each of them takes of it."""

    amount: int
    """A number of blocks; of bytes, if there are `sizes`."""
    sizes: tuple[int, ...] = ()
    """Bytes of each block of the model."""

    def find_stops(self, num_blocks: int) -> Column:
        """Return for each block where the longest span ends that begins there and fits.

        A block that does not fit alone ends where it begins.

        >>> BlockRoom(2).find_stops(4).tolist()
        [2, 3, 4, 4]
        >>> BlockRoom(7, sizes=(1, 5, 5, 9)).find_stops(4).tolist()
        [2, 2, 3, 3]
        """
        sizes = self.sizes or (1,) * num_blocks
        filled = np.concatenate(([0], np.cumsum(sizes, dtype=np.int64)))
        return np.searchsorted(filled, filled[:-1] + self.amount, side="right") - 1


@dataclass(frozen=True)
class Supply:
    """The peers of one view that can be counted on, a row each. Never changes.

    JOINING peers are in it with the span that they intend to serve. Where blocks differ in what
    they cost, a block per second is a step of one token through one of average cost.
    """

    rows: dict[PeerId, int]
    starts: Column
    stops: Column
    rates: Column
    """For each peer, steps per second through its span."""
    is_online: Column
    is_counted: Column
    """False for peers that a question leaves out."""
    fastest: float
    """Highest believed blocks per second; infinite if no peer has announced a speed."""
    work: Column
    """For each block, what a step costs there; the mean is 1."""
    steps_per_second: Column
    """For each block, what its hosts do together when each is used from end to end."""
    num_hosts: Column
    """For each block, how many peers serve it or intend to."""
    num_online: Column
    """For each block, how many peers serve it now."""

    @classmethod
    def of_view(
        cls,
        view: SwarmView,
        doubted: Collection[PeerId] = (),
        work: Sequence[float] | None = None,
    ) -> Supply:
        """Return what the punctual peers of a view give, ONLINE and JOINING ones.

        `doubted` peers do not count: those that have been JOINING for too long. `work` is what a
        step costs in each block, if they are not all alike.
        """
        costs = np.ones(view.num_blocks) if work is None else np.array(work, dtype=float)
        peers = [
            peer for peer in view.peers if may_count(peer, view) and peer.peer_id not in doubted
        ]
        starts = np.array([peer.span.start for peer in peers], dtype=int)
        stops = np.array([min(peer.span.stop, view.num_blocks) for peer in peers], dtype=int)
        sums = compute_prefix_sums(costs)
        costs_of_spans = sums[stops] - sums[starts]
        claims = costs_of_spans * np.array([_read_rate(peer) for peer in peers], dtype=float)
        known = claims[~np.isnan(claims)]
        # Nobody measured: all alike, for only ratios matter then.
        typical = float(np.median(known)) if known.size else 1.0
        fastest = _MOST_SPEEDUP * typical if known.size else np.inf
        speeds = np.where(np.isnan(claims), typical, claims).clip(max=fastest)
        rates = speeds / costs_of_spans
        is_online = np.array([peer.state is PeerState.ONLINE for peer in peers], dtype=bool)
        edges = starts, stops, view.num_blocks
        return cls(
            rows={peer.peer_id: row for row, peer in enumerate(peers)},
            starts=starts,
            stops=stops,
            rates=rates,
            is_online=is_online,
            is_counted=np.ones(len(peers), dtype=bool),
            fastest=fastest,
            work=costs,
            steps_per_second=_sum_over_blocks(rates, *edges),
            num_hosts=_sum_over_blocks(np.ones(len(peers)), *edges).round(),
            num_online=_sum_over_blocks(is_online, *edges).round(),
        )

    @property
    def num_blocks(self) -> int:
        """Blocks of the model."""
        return len(self.num_hosts)

    def without(self, peer_ids: Collection[PeerId]) -> Supply:
        """Return the supply as if these peers were not there."""
        rows = {self.rows[peer_id] for peer_id in peer_ids if peer_id in self.rows}
        is_counted = self.is_counted.copy()
        is_counted[list(rows)] = False
        return replace(self, is_counted=is_counted)._change(self, rows, -1)

    def with_earlier(self, peer_ids: Collection[PeerId], earlier: Supply) -> Supply:
        """Return the supply as if these peers were still where they were in an earlier one."""
        rows = {earlier.rows[peer_id] for peer_id in peer_ids if peer_id in earlier.rows}
        return self.without(peer_ids)._change(earlier, rows, 1)

    def _change(self, known: Supply, rows: Collection[int], sign: int) -> Supply:
        """Return the supply with what some peers give added to the blocks, or taken away."""
        sums = self.steps_per_second.copy(), self.num_hosts.copy(), self.num_online.copy()
        steps_per_second, num_hosts, num_online = sums
        for row in rows:
            start, stop = known.starts[row], known.stops[row]
            steps_per_second[start:stop] += sign * known.rates[row]
            num_hosts[start:stop] += sign
            num_online[start:stop] += sign * int(known.is_online[row])
        return replace(
            self,
            # No rounding error may remain where no peer is left.
            steps_per_second=np.where(num_hosts > 0, steps_per_second, 0.0).clip(min=0.0),
            num_hosts=num_hosts,
            num_online=num_online,
        )

    def list_joining(self) -> list[PeerId]:
        """Return the peers that intend to serve a span."""
        is_joining = self.is_counted & ~self.is_online
        return [peer_id for peer_id, row in self.rows.items() if is_joining[row]]

    @cached_property
    def reach(self) -> Column:
        """For each block, where the span ends that holds it and goes furthest; else the block."""
        reach = np.arange(self.num_blocks)
        np.maximum.at(reach, self.starts[self.is_counted], self.stops[self.is_counted])
        return np.maximum(np.maximum.accumulate(reach), np.arange(self.num_blocks))

    @cached_property
    def edges(self) -> tuple[frozenset[int], frozenset[int]]:
        """The blocks at which spans begin, and those at which they end."""
        starts, stops = self.starts[self.is_counted], self.stops[self.is_counted]
        return frozenset(starts.tolist()), frozenset(stops.tolist())

    @property
    def typical_blocks_per_second(self) -> float:
        """The speed assumed for a peer without a measurement; 1 where nobody has one."""
        return self.fastest / _MOST_SPEEDUP if np.isfinite(self.fastest) else 1.0

    @property
    def total_blocks_per_second(self) -> float:
        """The throughput of all peers together."""
        return float((self.steps_per_second * self.work).sum())

    @cached_property
    def has_gap(self) -> bool:
        """Whether there is a block that nobody serves or intends to."""
        return bool((self.num_hosts == 0).any())

    @cached_property
    def num_serving(self) -> int:
        """How many peers are ONLINE."""
        return int((self.is_counted & self.is_online).sum())

    @cached_property
    def num_dispensable(self) -> int:
        """How many ONLINE peers serve only blocks that have enough replicas without them."""
        is_thin = np.concatenate(([0], np.cumsum(self.num_hosts <= MIN_REPLICAS)))
        is_needed = is_thin[self.stops] > is_thin[self.starts]
        return int((self.is_counted & self.is_online & ~is_needed).sum())


def compute_prefix_sums(amounts: Column) -> Column:
    """Return sums of which two make that of a span: the one at its stop less that at its start."""
    zeros = np.zeros((*amounts.shape[:-1], 1))
    return np.concatenate((zeros, np.cumsum(amounts, axis=-1)), axis=-1)


def _sum_over_blocks(amounts: Column, starts: Column, stops: Column, num_blocks: int) -> Column:
    changes = np.bincount(starts, amounts, num_blocks + 1)
    changes -= np.bincount(stops, amounts, num_blocks + 1)
    return np.cumsum(changes)[:num_blocks].clip(min=0.0)


def may_count(peer: Announcement, view: SwarmView) -> bool:
    """Return whether a peer of a view hosts blocks, or is about to, as far as it says in time."""
    lifetime_seconds = peer.expires_at - peer.issued_at
    return (
        peer.state in (PeerState.ONLINE, PeerState.JOINING)
        and peer.span.start < view.num_blocks
        and view.taken_at - peer.issued_at <= _PUNCTUAL_FRACTION * lifetime_seconds
        and not _read_rate(peer) * len(peer.span) < LEAST_SPEED
    )


def list_surplus(undialled: Sequence[Announcement]) -> set[PeerId]:
    """Return which hosts that cannot be dialled do not count: all but one for each block.

    Two that are made up would else keep everybody away from a gap; to a block with a single one a
    newcomer goes as long as it finds no gap.
    """
    covered: set[int] = set()
    surplus: set[PeerId] = set()
    for host in sorted(undialled, key=lambda host: len(host.span), reverse=True):
        blocks = range(host.span.start, host.span.stop)
        if covered.isdisjoint(blocks):
            covered.update(blocks)
        else:
            surplus.add(host.peer_id)
    return surplus


def _read_rate(peer: Announcement) -> float:
    """Return a peer's steps per second by its announcement; NaN when it has not measured yet."""
    rate = peer.decode_steps_per_second
    return np.nan if rate is None else rate
