"""A swarm of real peers whose connections all go over slow lines, and clients of it.

A peer listens on one loopback address and announces another one, where a line begins that leads to
it. All connections to a peer, those of clients and of other peers, share that line.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

from ...peer.local_swarm.swarm import LocalPeer, LocalSwarm
from .benchmark_model import BenchmarkModel
from .clients import SwarmAddress
from .slow_lines import LineConfig, SlowLines, start_slow_lines

_NEAR_HOST = "127.0.0.1"
_ANNOUNCED_HOST = "127.0.0.2"
"""All of 127.0.0.0/8 is this machine, and a port is free on each of its addresses."""


@dataclass(frozen=True)
class DistantSwarm:
    """A running swarm: where it is, and the lines to its peers, in their order."""

    address: SwarmAddress
    lines: SlowLines
    line: LineConfig


@contextmanager
def start_distant_swarm(
    model: BenchmarkModel, num_hops: int, line: LineConfig
) -> Iterator[DistantSwarm]:
    """Run peers that share the blocks of a model evenly, int8, one thread each."""
    ends = [model.num_blocks * hop // num_hops for hop in range(num_hops + 1)]
    spans = list(pairwise(ends))
    arguments = ("--announce-host", _ANNOUNCED_HOST)
    with LocalSwarm(
        model.directory, spans=spans, weights="int8", serve_arguments=arguments
    ) as swarm:
        ports = [_read_port(peer) for peer in swarm.peers]
        targets = {(_ANNOUNCED_HOST, port): (_NEAR_HOST, port) for port in ports}
        # Nobody dials before: the peers have just come online, and there is no client yet.
        with start_slow_lines(line, targets) as lines:
            yield DistantSwarm(SwarmAddress.of(swarm, model), lines, line)


def _read_port(peer: LocalPeer) -> int:
    return int(str(peer.facts["endpoint"]).rpartition(":")[2])
