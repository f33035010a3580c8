"""Bytes per second of one idle peer and one idle client, in swarms of several sizes.

Both are those that ship, over TCP and TLS; each has a line of its own that counts. All other peers
are one `Crowd` in this process, which answers at the address of each from one book that has all
announcements. A `Neighbour` asks the idle peer as often as members of such a swarm do on average.
The directory is in memory, and its traffic is not counted.
"""

import argparse
import asyncio
import gc
import random
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, replace
from ipaddress import IPv4Address

from measuring.benchmark_model import open_bundled_model
from measuring.counted_line import CountedLine, LinedTransport, Traffic
from measuring.crowd import PERIOD_SECONDS, Crowd
from measuring.program import run_program
from measuring.report import TargetFigure, at_most
from shoal.cli.benchmarking.figure import Figure, describe_machine
from shoal.client.routing.route_finder import SwarmModel
from shoal.client.runtime.async_client import AsyncClient
from shoal.client.settings.client_config import ClientConfig
from shoal.peer.announcing.round_trip_times import MEASURED_PER_PERIOD
from shoal.peer.hosting.span_loader import SpanLoader
from shoal.peer.peer import GOSSIPS_PER_PERIOD, Peer
from shoal.peer.process.config import PeerConfig, PeerEvent
from shoal.protocol.errors import ShoalError
from shoal.protocol.identity import Identity
from shoal.protocol.net.clock import SystemClock
from shoal.protocol.net.dialling import measure_rtt
from shoal.protocol.net.gossip import GossipDirectory
from shoal.protocol.net.memory.memory_directory import MemoryDirectory, MemoryDirectoryStore
from shoal.protocol.net.network import Addresses, Presence
from shoal.protocol.net.tcp.tcp_transport import TcpTransport
from shoal.protocol.net.tcp.tls import make_tls_identity
from shoal.protocol.net.transport import Stream, StreamServer
from shoal.protocol.records.announcements import Announcement, sign_announcement
from shoal.protocol.spans import Span

_FIRST_ADDRESS = int(IPv4Address("127.1.0.0"))
_CLOCK = SystemClock()


class DialledCrowd(Crowd):
    """The crowd behind one port: a stranger comes over a line, from the address that it dialled."""

    async def open(self, stack: AsyncExitStack) -> int:
        """Announce everybody and answer until the stack is closed; return the port."""
        listener = await self.open_transport(stack).listen("127.0.0.1", 0, self._serve_dialled)
        await self.announce_all(stack)
        return listener.endpoint.port

    async def _serve_dialled(self, stream: Stream) -> None:
        await self.serve(int(IPv4Address(stream.remote_host or "")) - _FIRST_ADDRESS, stream)


def _name_place(number: int) -> tuple[str, int]:
    return str(IPv4Address(_FIRST_ADDRESS + number)), 31337  # a line has a port of its own


class Neighbour:
    """Asks one peer as often as a peer is asked on average: what others know, and for the time.

    It knows about as much as any idle peer does: it asks the crowd as often, without a network.
    """

    def __init__(self, crowd: Crowd, peer: Announcement, line: CountedLine) -> None:
        self._crowd = crowd
        self._peer = peer
        self._rng = random.Random(1)
        self._identity = Identity(self._rng.randbytes(32))
        self._transport = LinedTransport(TcpTransport(), line)
        self._directory = GossipDirectory(
            MemoryDirectory(MemoryDirectoryStore(), _CLOCK),
            peer.model_id,
            self._transport,
            _CLOCK,
            self._rng,
            lambda other: other.peer_id == peer.peer_id,
        )

    async def run(self) -> None:
        """Ask until cancelled."""
        model_id, gossip_seconds = self._peer.model_id, PERIOD_SECONDS / GOSSIPS_PER_PERIOD
        known = self._crowd.records.list_records(model_id, _CLOCK.wall())
        for _ in self._directory.records.take_in_turns(
            model_id, [one.value for one in known], _CLOCK.wall()
        ):
            await asyncio.sleep(0)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._directory.run(gossip_seconds))
            tasks.create_task(self._announce())
            tasks.create_task(self._ask_crowd(gossip_seconds))
            tasks.create_task(self._measure_round_trips())

    async def _announce(self) -> None:
        while True:
            now = _CLOCK.wall()
            own = replace(
                self._peer,
                peer_id=self._identity.peer_id,
                endpoints=(),  # nobody asks it: the crowd is asked for it
                sequence=int(now * 1000),
                issued_at=now,
                expires_at=now + 3 * PERIOD_SECONDS,
            )
            await self._directory.announce(sign_announcement(self._identity, own))
            await asyncio.sleep(PERIOD_SECONDS)

    async def _ask_crowd(self, gossip_seconds: float) -> None:
        records, model_id = self._directory.records, self._peer.model_id
        while True:
            fetch = records.make_fetch(model_id, _CLOCK.wall(), self._rng)
            records.take_all(model_id, self._crowd.answer(0, fetch).records, _CLOCK.wall())
            await asyncio.sleep(gossip_seconds)

    async def _measure_round_trips(self) -> None:
        while True:
            await asyncio.sleep(PERIOD_SECONDS / MEASURED_PER_PERIOD)
            peer = self._peer
            with suppress(ShoalError):
                await measure_rtt(self._transport, _CLOCK, peer.peer_id, peer.endpoints, 5.0)


@dataclass
class Lines:
    """The access of one peer or client to the crowd: a line there, and one of those who dial it."""

    crowd: Crowd
    store: MemoryDirectoryStore
    outward: CountedLine
    stack: AsyncExitStack
    inward: CountedLine | None = None

    async def connect(self) -> tuple[LinedTransport, MemoryDirectory]:
        """See Network.connect."""
        return LinedTransport(TcpTransport(), self.outward), self._open_directory()

    async def serve(self, identity: Identity, serve: StreamServer) -> Presence:
        """See Network.serve."""
        transport = TcpTransport(make_tls_identity(identity.derive_secret("shoal TLS key")))
        listener = await transport.listen("127.0.0.1", 0, serve)
        self.inward = await CountedLine.open(listener.endpoint.port, self.stack)
        opened = AsyncExitStack()
        opened.push_async_callback(transport.close)
        endpoints = [replace(listener.endpoint, port=self.inward.port)]
        return Presence(
            identity,
            LinedTransport(transport, self.outward),
            self._open_directory(),
            [listener],
            Addresses(endpoints, {"addresses": [], "dialled": []}),
            opened,
        )

    def _open_directory(self) -> MemoryDirectory:
        return MemoryDirectory(self.store, _CLOCK)

    def count(self) -> tuple[int, int, int]:
        """Return how many bytes were sent and received, and the connections."""
        out, back = self.outward.traffic, self.inward.traffic if self.inward else Traffic()
        return (
            out.there_bytes + back.back_bytes,
            out.back_bytes + back.there_bytes,
            out.num_connections + back.num_connections,
        )


async def _live_as_peer(lines: Lines, config: PeerConfig, stop: asyncio.Event) -> None:
    """Be an idle peer, and its neighbour."""
    online = asyncio.Event()

    def note(event: PeerEvent) -> None:
        if event.name == "online":
            online.set()

    async with (
        Peer.join(config, lines, _CLOCK, note) as peer,
        asyncio.TaskGroup() as tasks,
    ):
        serving = tasks.create_task(peer.serve(stop))
        await online.wait()
        own = next(
            one
            for one in lines.crowd.records.list_current(lines.crowd.model.model_id, _CLOCK.wall())
            if one.peer_id == peer.announcer.peer_id
        )
        assert lines.inward is not None
        asking = tasks.create_task(Neighbour(lines.crowd, own, lines.inward).run())
        await asyncio.wait([serving])
        asking.cancel()


async def measure(
    num_peers: int, config: PeerConfig, model: SwarmModel, warm_up: float, seconds: float
) -> list[Figure]:
    """Return what an idle peer and an idle client send and receive in a swarm of so many."""
    stop = asyncio.Event()
    store = MemoryDirectoryStore()
    async with AsyncExitStack() as stack:
        others = num_peers - 2  # and the peer that is measured, and its neighbour
        crowd = DialledCrowd(others, model, [store.records], _name_place)
        port = await crowd.open(stack)
        lines = {
            who: Lines(crowd, store, await CountedLine.open(port, stack), stack)
            for who in ("peer", "client")
        }
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_live_as_peer(lines["peer"], config, stop))
            client = await AsyncClient.join(
                ClientConfig(seed=num_peers), lines["client"], _CLOCK, model
            )
            async with client:
                await asyncio.sleep(warm_up)
                before = {who: line.count() for who, line in lines.items()}
                await asyncio.sleep(seconds)
                after = {who: line.count() for who, line in lines.items()}
            stop.set()
        known = [
            len(one.value) for one in crowd.records.list_records(model.model_id, _CLOCK.wall())
        ]
    name = f"{num_peers:,} peers"
    figures = [Figure(f"{name}: mean record", sum(known) / len(known), "bytes")]
    for who in lines:
        sent, received, num_dialled = (
            (late - early) / seconds for early, late in zip(before[who], after[who], strict=True)
        )
        figures += [
            Figure(f"{name}: {who}, sent", sent / 1e3, "KB/s"),
            Figure(f"{name}: {who}, received", received / 1e3, "KB/s"),
            Figure(f"{name}: {who}, connections", num_dialled, "/s"),
        ]
    both = (sum(after["client"][:2]) - sum(before["client"][:2])) / seconds
    return [*figures, TargetFigure(f"{name}: client, both", both / 1e3, "KB/s", at_most(1))]


async def _measure_all(options: argparse.Namespace) -> None:
    bundled = open_bundled_model()
    config = PeerConfig(
        str(bundled.directory), Span(0, bundled.num_blocks // 2), num_threads=1,
        announce_period_seconds=PERIOD_SECONDS,
    )  # fmt: skip
    model_id = SpanLoader.open(config, _CLOCK).model.model_id
    model = SwarmModel(model_id, bundled.num_blocks, bundled.hidden_size)
    measured = await asyncio.gather(
        *(
            measure(num_peers, config, model, options.warm_up, options.seconds)
            for num_peers in options.peers
        )
    )
    for figures in measured:
        for figure in figures:
            print(figure.to_line())


def main() -> None:
    """Print the figures of each size; all sizes are measured at once."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", type=int, nargs="+", default=[100, 1_000, 10_000])
    parser.add_argument("--warm-up", type=float, default=60.0, help="seconds before counting")
    parser.add_argument(
        "--seconds", type=float, default=300.0,
        help="how long to count (300: from one reading of the directory to the next)",
    )  # fmt: skip
    options = parser.parse_args()
    print(describe_machine())
    gc.freeze()
    asyncio.run(_measure_all(options))


if __name__ == "__main__":
    run_program(main)
