"""What a step over a route takes, and a published table to hold that against."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from shoal.client.routing.router import Route, RoutingCosts, plan_route
from shoal.protocol.ids import PeerId
from shoal.protocol.records.announcements import PeerState
from shoal.protocol.records.swarm_view import SwarmView
from shoal.protocol.spans import Span
from simulation.machines import Machine
from simulation.world import MODEL_ID, make_announcement


@dataclass(frozen=True)
class StepCost:
    """What a step costs at each hop beside the blocks."""

    hidden_bytes: int = 2 * 8192
    """One hidden state on the wire."""
    overhead_seconds: float = 0.001
    """Of software, at each hop."""


def time_network(
    route: Route, client: Machine, machines: Mapping[PeerId, Machine], cost: StepCost
) -> float:
    """Return the seconds of a step that are spent between the machines.

    In star delivery the client sends to each hop in turn and has the answer from each.
    """
    seconds = 0.0
    for hop in route.hops:
        machine = machines[hop.peer.peer_id]
        bits_per_second = min(machine.bits_per_second, client.bits_per_second)
        one_way_seconds = client.one_way_seconds(machine) + 8 * cost.hidden_bytes / bits_per_second
        seconds += 2 * one_way_seconds + cost.overhead_seconds
    return seconds


def time_compute(route: Route, machines: Mapping[PeerId, Machine]) -> float:
    """Return the seconds of a step that the blocks take on idle machines."""
    return sum(len(hop.span) / machines[hop.peer.peer_id].blocks_per_second for hop in route.hops)


@dataclass(frozen=True)
class PublishedRow:
    """PETALS with BLOOM-176B, arXiv 2209.01188 table 3: steps per second of one session."""

    num_hops: int
    bits_per_second: float
    rtt_seconds: float
    steps_per_second: float


# What the table calls less than 5 ms is taken for half of that.
PUBLISHED = (
    PublishedRow(3, 1e9, 0.0025, 1.71),
    PublishedRow(3, 1e8, 0.0025, 1.66),
    PublishedRow(3, 1e8, 0.1, 1.23),
    PublishedRow(12, 1e9, 0.0025, 1.24),
    PublishedRow(12, 1e8, 0.1, 0.57),
)
_BLOOM_BLOCKS = 70
_BLOOM_HIDDEN_BYTES = 2 * 14336


def reproduce_published() -> list[tuple[PublishedRow, float]]:
    """Return each row and what the simulator makes of it, in steps per second.

    Two numbers are taken from the table: from the rows of 3 and 12 hops over the fastest links
    follow the time of a block and the overhead of a hop. The effects of round trips and bandwidth
    are the simulator's own.
    """
    few, many = (row for row in PUBLISHED if row.bits_per_second == 1e9)
    of_a_hop = (1 / many.steps_per_second - 1 / few.steps_per_second) / (
        many.num_hops - few.num_hops
    )
    of_blocks = 1 / few.steps_per_second - few.num_hops * of_a_hop
    on_the_wire = few.rtt_seconds + 2 * 8 * _BLOOM_HIDDEN_BYTES / few.bits_per_second
    cost = StepCost(_BLOOM_HIDDEN_BYTES, of_a_hop - on_the_wire)
    return [(row, 1 / _time_row(row, _BLOOM_BLOCKS / of_blocks, cost)) for row in PUBLISHED]


def _time_row(row: PublishedRow, blocks_per_second: float, cost: StepCost) -> float:
    edges = [_BLOOM_BLOCKS * index // row.num_hops for index in range(row.num_hops + 1)]
    spans = [Span(start, stop) for start, stop in pairwise(edges)]
    client = _make_machine(0.0, row, blocks_per_second)
    server = _make_machine(row.rtt_seconds / 2 - 0.001, row, blocks_per_second)
    peer_ids = [PeerId(f"server-{index:02}") for index in range(row.num_hops)]
    machines = dict.fromkeys(peer_ids, server)
    view = _view_of(peer_ids, spans, server)
    costs = RoutingCosts(rtt_seconds=dict.fromkeys(peer_ids, row.rtt_seconds))
    route = plan_route(view, Span(0, _BLOOM_BLOCKS), costs, random.Random(0))
    return time_network(route, client, machines, cost) + time_compute(route, machines)


def _make_machine(distance: float, row: PublishedRow, blocks_per_second: float) -> Machine:
    return Machine(
        blocks_per_second, _BLOOM_BLOCKS, 1.0, row.bits_per_second, place=(distance, 0.0)
    )


def _view_of(peer_ids: Sequence[PeerId], spans: Sequence[Span], machine: Machine) -> SwarmView:
    announcements = [
        make_announcement(
            peer_id,
            machine,
            span,
            PeerState.ONLINE,
            num_blocks=_BLOOM_BLOCKS,
            sequence=1,
            issued_at=0.0,
            expires_at=90.0,
        )
        for peer_id, span in zip(peer_ids, spans, strict=True)
    ]
    return SwarmView.from_announcements(MODEL_ID, announcements, 0.0, _BLOOM_BLOCKS)
