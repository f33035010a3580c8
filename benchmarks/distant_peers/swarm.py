"""A swarm of real peers whose connections all go over slow lines, and a bare line beside it.

A peer listens on one loopback address and announces another one, where a line begins that leads to
it. All connections to a peer, those of clients and of other peers, share that line.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import cast

from distant_peers.lines import LineConfig, SlowLines, start_slow_lines
from measuring.benchmark_model import BenchmarkModel
from measuring.clients import SwarmAddress
from shoal.peer.local_swarm.swarm import LocalPeer, LocalSwarm

_NEAR_HOST = "127.0.0.1"
_FAR_HOST = "127.0.0.2"
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
    arguments = ("--announce-host", _FAR_HOST)
    with LocalSwarm(
        model.directory, spans=spans, weights="int8", serve_arguments=arguments
    ) as swarm:
        ports = [_read_port(peer) for peer in swarm.peers]
        targets = {(_FAR_HOST, port): (_NEAR_HOST, port) for port in ports}
        # Nobody dials before: the peers have just come online, and there is no client yet.
        with start_slow_lines(line, targets) as lines:
            yield DistantSwarm(SwarmAddress.of(swarm, model), lines, line)


def _read_port(peer: LocalPeer) -> int:
    return int(str(peer.facts["endpoint"]).rpartition(":")[2])


class _Echo(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._transport.write(data)


@asynccontextmanager
async def open_bare_line(line: LineConfig) -> AsyncGenerator[Callable[[bytes], Awaitable[float]]]:
    """Yield a function that sends a frame over a line of its own and returns half the round trip.

    Without peers: how long one way really takes.
    """
    async with await asyncio.get_running_loop().create_server(_Echo, _NEAR_HOST, 0) as server:
        port = server.sockets[0].getsockname()[1]
        with start_slow_lines(line, {(_FAR_HOST, port): (_NEAR_HOST, port)}):
            reader, writer = await asyncio.open_connection(_FAR_HOST, port)

            async def time_way(frame: bytes) -> float:
                started_at = time.perf_counter()
                writer.write(frame)
                await reader.readexactly(len(frame))
                return (time.perf_counter() - started_at) / 2

            yield time_way
            writer.close()
            await writer.wait_closed()
