"""A swarm inside this process: real engines and services over a network in memory.

For tests, examples and experiments; it installs nothing, opens no socket and leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from ...kernels.linear.quantize import WeightFormat
from ...protocol.errors import UnavailableError, UsageError
from ...protocol.identity import Identity
from ...protocol.ids import PeerId
from ...protocol.net.clock import SystemClock
from ...protocol.net.directory import Directory
from ...protocol.net.memory.loopback import Link, LoopbackNetwork, LoopbackTransport
from ...protocol.net.memory.memory_directory import MemoryDirectory, MemoryDirectoryStore
from ...protocol.net.transport import Stream, StreamServer, Transport
from ...protocol.records.announcements import PeerState
from ...protocol.spans import Span
from ..announcing.announcer import Announcer
from ..announcing.delays import Delays
from ..announcing.self_description import SelfDescription, make_template
from ..hosting.hosting import HostedModel, Hosting
from ..pushing.neighbours import Neighbours
from ..runtime.config import PeerConfig
from ..runtime.loop_lag import LoopLag
from ..streams.service import Service
from .network_control import NetworkControl

CLIENT_HOST = "client"
"""Host name of the client in the network of a swarm; its peers are `peer0`, `peer1`, …"""


@dataclass(eq=False)
class LoopbackPeer:
    """One peer of a swarm in this process, and its host name.

    `serve` receives every new stream. By default it is the service's own; replace it to see how a
    client handles a peer that misbehaves.
    """

    host: str
    service: Service
    announcer: Announcer
    delays: Delays
    serve: StreamServer

    @property
    def peer_id(self) -> PeerId:
        """The peer's id."""
        return self.service.facts.peer_id


class LoopbackSwarm:
    """Peers of one model for one client, on the client's own event loop.

        swarm = LoopbackSwarm("path", spans=[(0, 4), (4, 8), (4, 8)])
        model = AutoDistributedModelForCausalLM.from_pretrained("path", connect=swarm.connect)
        swarm.network.kill("peer1")
        model.close()

    The peers start when the client connects, and end when it is closed.
    """

    def __init__(
        self,
        model: str | Path,
        spans: Sequence[tuple[int, int] | Span],
        weights: str = "fp32",
        *,
        kv_budget_bytes: int = 2**26,
        link: Link | None = None,
        seed: int = 0,
    ) -> None:
        """Plan one peer per span; `link` connects any two hosts until it is changed.

        `seed` determines the peers' ids and the losses of links.
        """
        if not spans:
            raise UsageError("a swarm needs at least one span")
        formats = [known.value for known in WeightFormat]
        if weights not in formats:
            raise UsageError(f"weights are one of {', '.join(formats)}, not {weights!r}")
        self._configs = {
            f"peer{index}": PeerConfig(
                str(model),
                _make_span(span),
                weights=weights,
                kv_budget_bytes=kv_budget_bytes,
                block_cache_bytes=0,
            )
            for index, span in enumerate(spans)
        }
        self._network = LoopbackNetwork(seed, link)
        self._store = MemoryDirectoryStore()
        self._seed = seed
        self._serving: asyncio.Task[None] | None = None
        self._stop = asyncio.Event()
        self.network = NetworkControl(self._network, (CLIENT_HOST, *self._configs))
        self.peers: tuple[LoopbackPeer, ...] = ()

    def __repr__(self) -> str:
        spans = ", ".join(str(config.span) for config in self._configs.values())
        return f"<LoopbackSwarm {spans} over {self._network!r}>"

    async def connect(self, config: object) -> tuple[Transport, Directory]:
        """Start the peers on this loop and return the transport and directory of a client.

        Pass this function to a client as `connect`; closing the directory ends the swarm. The
        client's `config` has no effect here. Raises UsageError if a client is or was connected
        before, and for a model or span that cannot be served.
        """
        if self._serving is not None:
            raise UsageError("a LoopbackSwarm serves one client; make another one for the next")
        online = asyncio.Event()
        self._serving = asyncio.create_task(self._serve(online), name=repr(self))
        waiting = asyncio.create_task(online.wait())
        try:
            await asyncio.wait((self._serving, waiting), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self._serving.cancel()
            await asyncio.wait((self._serving,))
            raise
        finally:
            waiting.cancel()
        if self._serving.done():
            await self._serving  # raises what went wrong
        directory = _ClientDirectory(self._store, SystemClock(), self._end)
        return LoopbackTransport(self._network, CLIENT_HOST), directory

    def find(self, peer_id: PeerId) -> LoopbackPeer:
        """Return the peer with this id; raises UsageError if there is none."""
        for peer in self.peers:
            if peer.peer_id == peer_id:
                return peer
        raise UsageError(f"no peer of this swarm is {peer_id}")

    async def _serve(self, online: asyncio.Event) -> None:
        """Be the swarm, from the first peer's start to the last one's end."""
        async with AsyncExitStack() as stack:
            peers = [
                await self._start(stack, host, config) for host, config in self._configs.items()
            ]
            async with asyncio.TaskGroup() as tasks:
                running = [run() for peer in peers for run in (peer.announcer.run, peer.delays.run)]
                chores = [tasks.create_task(chore) for chore in running]
                self.peers = tuple(peers)
                self.network.attach()
                stack.callback(self.network.detach)
                online.set()
                await self._stop.wait()
                for chore in chores:
                    chore.cancel()

    async def _start(self, stack: AsyncExitStack, host: str, config: PeerConfig) -> LoopbackPeer:
        """Start a peer on a host and announce it; the stack ends what was begun."""
        clock = SystemClock()
        # Known to whoever reads this line: such a peer vouches for nothing outside this process.
        identity = Identity(hashlib.sha256(f"{self._seed}/{host}".encode()).digest())
        model = await asyncio.to_thread(HostedModel.open, config)
        transport = LoopbackTransport(self._network, host)
        stack.push_async_callback(transport.close)
        directory = _PeerDirectory(self._store, clock, self._network, host)
        period_seconds = config.announce_period_seconds
        rng = random.Random(f"{self._seed}/{host}")
        delays = Delays(directory, transport, clock, period_seconds, rng)
        neighbours = Neighbours(transport, clock, delays.note_pushed)
        stack.push_async_callback(neighbours.close)
        hosting = Hosting(config, model, identity.peer_id, clock, neighbours)
        assert config.span is not None  # every peer of a LoopbackSwarm is given one
        stay = await stack.enter_async_context(hosting.serve(config.span, {}, lambda *_: None))

        async def serve(stream: Stream) -> None:
            await peer.serve(stream)

        listener = await transport.listen(host, 0, serve)
        template = make_template(
            config,
            identity.peer_id,
            model.model_id,
            model.spec.num_blocks,
            listener.endpoint,
        )
        # All peers share one loop, so that none is slower by its lag than another.
        description = SelfDescription(template, LoopLag(clock), model.sizes.work, delays)
        description.begin_serving(stay)
        announcer = Announcer(directory, identity, description.describe, clock, period_seconds)
        peer = LoopbackPeer(host, stay.service, announcer, delays, stay.service.serve)
        await announcer.announce(PeerState.ONLINE)
        return peer

    async def _end(self) -> None:
        assert self._serving is not None  # who calls this has connected
        self._stop.set()
        await self._serving


class _PeerDirectory(MemoryDirectory):
    """A peer's door to the directory, shut while its host is dead or stands still."""

    def __init__(
        self,
        store: MemoryDirectoryStore,
        clock: SystemClock,
        network: LoopbackNetwork,
        host: str,
    ) -> None:
        super().__init__(store, clock)
        self._network = network
        self._host = host

    async def announce(self, record: bytes) -> None:
        """Publish, or do nothing: who is dead has nothing to say, nor to complain of."""
        with contextlib.suppress(UnavailableError):
            self._network.check_alive(self._host)
            if not self._network.is_paused(self._host):
                await super().announce(record)


class _ClientDirectory(MemoryDirectory):
    """A client's door to the directory; the swarm ends when it is shut."""

    def __init__(
        self, store: MemoryDirectoryStore, clock: SystemClock, end: Callable[[], Awaitable[None]]
    ) -> None:
        super().__init__(store, clock)
        self._end = end

    async def close(self) -> None:
        """See Directory.close."""
        await super().close()
        await self._end()


def _make_span(span: tuple[int, int] | Span) -> Span:
    try:
        return span if isinstance(span, Span) else Span(*span)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{span!r} is not a span of blocks: {error}") from error
