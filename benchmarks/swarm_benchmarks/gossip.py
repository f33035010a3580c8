"""Bytes per second of one idle peer and one idle client, in swarms of several sizes.

Both are those that ship, over TCP and TLS; each has a line of its own that counts. All other peers
are one `Crowd` in this process: their announcements are signed by keys of their own and renewed in
time, and it answers at the address of each, from one book that has all of them. What one member of
such a swarm asks the idle peer on average, a `Neighbour` asks. The directory is in memory, and its
traffic is not counted.
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
from measuring.report import TargetFigure, at_most
from shoal.cli.benchmarking.figure import Figure, describe_machine
from shoal.client.routing.route_finder import SwarmModel
from shoal.client.runtime.async_client import AsyncClient
from shoal.client.settings.client_config import ClientConfig
from shoal.peer.announcing.round_trip_times import MEASURED_PER_PERIOD
from shoal.peer.hosting.span_loader import SpanLoader
from shoal.peer.peer import GOSSIPS_PER_PERIOD, Peer
from shoal.peer.process.config import PeerConfig, PeerEvent
from shoal.protocol import versions
from shoal.protocol.endpoints import Endpoint
from shoal.protocol.errors import ShoalError
from shoal.protocol.identity import Identity
from shoal.protocol.messages.codec import check_kind, decode_frame, encode_frame
from shoal.protocol.messages.records import RecordFetch, Records
from shoal.protocol.messages.session import Welcome
from shoal.protocol.net.clock import SystemClock
from shoal.protocol.net.dialling import measure_rtt
from shoal.protocol.net.gossip import GossipDirectory
from shoal.protocol.net.memory.memory_directory import MemoryDirectory, MemoryDirectoryStore
from shoal.protocol.net.network import Addresses, Presence
from shoal.protocol.net.tcp.tcp_transport import TcpTransport
from shoal.protocol.net.tcp.tls import make_tls_identity
from shoal.protocol.net.transport import Stream, StreamServer
from shoal.protocol.records.announcements import Announcement, PeerState, sign_announcement
from shoal.protocol.records.coordinates import Coordinate
from shoal.protocol.spans import Span

PERIOD_SECONDS = 30.0
_FIRST_ADDRESS = int(IPv4Address("127.1.0.0"))
_RENEWAL_SECONDS = 0.2
_CLOCK = SystemClock()


class Crowd:
    """All other peers of one swarm, and the directory that has them."""

    def __init__(self, num_peers: int, model: SwarmModel) -> None:
        self.model = model
        self.store = MemoryDirectoryStore()
        self.records = self.store.records
        self._rng = random.Random(num_peers)
        self._identities = [Identity(self._rng.randbytes(32)) for _ in range(num_peers)]
        self._tls = make_tls_identity()

    async def open(self, stack: AsyncExitStack) -> int:
        """Announce everybody and answer until the stack is closed; return the port."""
        transport = TcpTransport(self._tls)
        stack.push_async_callback(transport.close)
        listener = await transport.listen("127.0.0.1", 0, self._serve)
        for number in range(len(self._identities)):
            self._renew(number)
            await asyncio.sleep(0)
        renewing = asyncio.create_task(self._keep_renewing())
        stack.callback(renewing.cancel)
        return listener.endpoint.port

    async def _keep_renewing(self) -> None:
        num_peers, started_at, num_renewed = len(self._identities), _CLOCK.now(), 0
        while True:
            await asyncio.sleep(_RENEWAL_SECONDS)
            due = int((_CLOCK.now() - started_at) * num_peers / PERIOD_SECONDS)
            for number in range(num_renewed, due):
                self._renew(number % num_peers)
                await asyncio.sleep(0)
            num_renewed = due

    def _renew(self, number: int) -> None:
        identity, now = self._identities[number], _CLOCK.wall()
        record = sign_announcement(identity, self._describe(number, now))
        if number == 0:
            self.records.add_own(record, now)  # an answer begins with one's own
        else:
            self.records.take(self.model.model_id, self.records.seal(record), now)

    def _describe(self, number: int, now: float) -> Announcement:
        """Return all that a peer tells: its speeds, three round trips and where it stands."""
        rng, middle = self._rng, self.model.num_blocks // 2
        others = rng.sample(self._identities, min(3, len(self._identities)))
        return Announcement(
            peer_id=self._identities[number].peer_id,
            model_id=self.model.model_id,
            num_blocks=self.model.num_blocks,
            span=Span(0, middle) if number % 2 else Span(middle, self.model.num_blocks),
            state=PeerState.ONLINE,
            endpoints=(Endpoint(_name_host(number), 31337, self._tls.fingerprint),),
            min_version=versions.MIN_VERSION,
            max_version=versions.MAX_VERSION,
            weights="int8",
            compute_dtype="fp32",
            sequence=int(now * 1000),
            issued_at=now,
            expires_at=now + 3 * PERIOD_SECONDS,
            free_kv_tokens=rng.randrange(10**6),
            decode_steps_per_second=100 * rng.random(),
            loaded_decode_steps_per_second=100 * rng.random(),
            prefill_tokens_per_second=1000 * rng.random(),
            queue_seconds=rng.random(),
            rtts=tuple((other.peer_id, round(rng.random(), 4)) for other in others),
            coordinate=Coordinate(*(rng.random() for _ in range(5))).rounded(),
            software=versions.SOFTWARE,
            kernels="native int8 with avx512_vnni",
        )

    async def _serve(self, stream: Stream) -> None:
        """Be the peer whose address was dialled."""
        number = int(IPv4Address(stream.remote_host or "")) - _FIRST_ADDRESS
        await stream.receive()
        welcome = Welcome(
            versions.MAX_VERSION,
            versions.SOFTWARE,
            self._identities[number].peer_id,
            self.model.model_id,
            Span(0, self.model.num_blocks),
            _CLOCK.wall(),
        )
        await stream.send(encode_frame(welcome))
        if (frame := await stream.receive()) is not None:
            fetch = check_kind(decode_frame(frame), RecordFetch, "the one that is measured")
            await stream.send(encode_frame(self.answer(number, fetch)))

    def answer(self, stranger: int, fetch: RecordFetch) -> Records:
        """Answer as the member that a stranger has asked."""
        now = _CLOCK.wall()
        return self.records.answer(_name_host(stranger), self.model.model_id, fetch, now, self._rng)


def _name_host(number: int) -> str:
    return str(IPv4Address(_FIRST_ADDRESS + number))


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
        return MemoryDirectory(self.crowd.store, _CLOCK)

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
    async with AsyncExitStack() as stack:
        crowd = Crowd(num_peers - 2, model)  # and the peer that is measured, and its neighbour
        port = await crowd.open(stack)
        lines = {
            who: Lines(crowd, await CountedLine.open(port, stack), stack)
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
    main()
