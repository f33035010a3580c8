"""A swarm inside this process: the peers that `shoal serve` runs, over a network in memory.

For tests, examples and experiments; it installs nothing, opens no socket and leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from ...protocol.errors import UnavailableError, UsageError
from ...protocol.identity import Identity
from ...protocol.ids import PeerId
from ...protocol.net.clock import Clock, SystemClock
from ...protocol.net.memory.loopback import Link, LoopbackNetwork, LoopbackTransport
from ...protocol.net.memory.memory_directory import MemoryDirectory, MemoryDirectoryStore
from ...protocol.net.memory.memory_network import MemoryNetwork
from ...protocol.spans import Span
from ..peer import Peer
from ..process.background import BackgroundTasks
from ..process.config import PeerConfig, PeerEvent

CLIENT_HOST = "client"
"""Host name of the client in the network of a swarm; its peers are `peer0`, `peer1`, …"""

_PATIENCE_SECONDS = 30.0
"""How long a busy loop may take to do to its network what another thread asks for."""


class NetworkControl:
    """Causes failures between the hosts of a swarm whose client is connected.

    Every method is safe to call from any thread, has taken effect when it returns, and raises
    UsageError for a host that does not exist. For their effects see `LoopbackNetwork`.
    """

    def __init__(self, network: LoopbackNetwork, hosts: Sequence[str]) -> None:
        self._network = network
        self._hosts = tuple(hosts)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_thread: int | None = None

    def attach(self) -> None:
        """Control the network of the running loop."""
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()

    def detach(self) -> None:
        """Stop controlling: the network has ended."""
        self._loop = None

    def set_link(self, source: str, target: str, link: Link) -> None:
        """Change delay, bandwidth and losses in one direction."""
        self._run((source, target), lambda: self._network.set_link(source, target, link))

    def partition(self, a: str, b: str) -> None:
        """Block all traffic between two hosts."""
        self._run((a, b), lambda: self._network.partition(a, b))

    def heal(self, a: str, b: str) -> None:
        """End a partition."""
        self._run((a, b), lambda: self._network.heal(a, b))

    def kill(self, host: str) -> None:
        """End a host like `kill -9`; it does not return."""
        self._run((host,), lambda: self._network.kill(host))

    def pause(self, host: str) -> None:
        """Stop a host like SIGSTOP."""
        self._run((host,), lambda: self._network.pause(host))

    def resume(self, host: str) -> None:
        """Resume a paused host."""
        self._run((host,), lambda: self._network.resume(host))

    def _run(self, hosts: Sequence[str], act: Callable[[], None]) -> None:
        unknown = [host for host in hosts if host not in self._hosts]
        if unknown:
            raise UsageError(f"there is no host {unknown[0]}, only {', '.join(self._hosts)}")
        loop = self._loop
        if loop is None:
            raise UsageError("the network exists only while a client is connected")
        if threading.get_ident() == self._loop_thread:
            act()
            return
        done = threading.Event()
        loop.call_soon_threadsafe(act)
        loop.call_soon_threadsafe(done.set)
        if not done.wait(_PATIENCE_SECONDS):
            raise UnavailableError("the loop of the swarm's client does not react")


class LoopbackPeer:
    """One peer of a swarm in this process, and its network.

    Another `network.serve_stream` shows what a client makes of a peer that misbehaves.
    """

    def __init__(self, peer: Peer, network: MemoryNetwork) -> None:
        self.peer = peer
        self.network = network

    @property
    def host(self) -> str:
        """Its host in the network of the swarm."""
        return self.network.host

    @property
    def peer_id(self) -> PeerId:
        """The peer's id."""
        return self.peer.announcer.peer_id


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
        self._configs = {
            f"peer{index}": PeerConfig(
                str(model),
                _make_span(span),
                weights=weights,
                kv_budget_bytes=kv_budget_bytes,
                block_cache_bytes=0,
                drain_seconds=0.0,
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

    def connect(self, config: object = None) -> MemoryNetwork:
        """Return the network of a client, for whose `connect` this function is.

        The peers start when the client joins over it, on the client's loop, and end when it closes
        the directory; the client's `config` has no effect here. Joining raises UsageError if a
        client is or was connected before, and for a model or span that cannot be served.
        """
        return _ClientNetwork(self._network, self._store, SystemClock(), self._start_all)

    async def _start_all(self) -> MemoryDirectory:
        """Start the peers on this loop; return the client's access to the directory."""
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
        return _ClientDirectory(self._store, SystemClock(), self._end)

    def find(self, peer_id: PeerId) -> LoopbackPeer:
        """Return the peer with this id; raises UsageError if there is none."""
        for peer in self.peers:
            if peer.peer_id == peer_id:
                return peer
        raise UsageError(f"no peer of this swarm is {peer_id}")

    async def _serve(self, online: asyncio.Event) -> None:
        """Be the swarm, from the first peer's start to the last one's end."""
        async with BackgroundTasks() as running:
            peers = [
                await self._start(running, host, config) for host, config in self._configs.items()
            ]
            self.peers = tuple(peers)
            self.network.attach()
            online.set()
            try:
                await running.run_until(self._stop.wait())
            finally:
                self.network.detach()

    async def _start(self, running: BackgroundTasks, host: str, config: PeerConfig) -> LoopbackPeer:
        clock = SystemClock()
        network = self._make_network(host, clock)
        # Known to whoever reads this line: such a peer vouches for nothing outside this process.
        identity = Identity(hashlib.sha256(f"{self._seed}/{host}".encode()).digest())
        started = asyncio.get_running_loop().create_future()
        online = asyncio.Event()

        def watch(event: PeerEvent) -> None:
            if event.name == "online":
                online.set()

        async def run() -> None:
            async with Peer.join(config, network, clock, watch, identity=identity) as peer:
                started.set_result(peer)
                await peer.serve(asyncio.Event())  # until it is cancelled, with the swarm

        running.begin(run())
        await running.run_until(online.wait())
        return LoopbackPeer(started.result(), network)

    def _make_network(self, host: str, clock: Clock) -> MemoryNetwork:
        return MemoryNetwork(self._network, self._store, clock, host)

    async def _end(self) -> None:
        assert self._serving is not None  # who calls this has connected
        self._stop.set()
        await self._serving


class _ClientNetwork(MemoryNetwork):
    """The network of a client, which starts the peers of its swarm by joining."""

    def __init__(
        self,
        network: LoopbackNetwork,
        store: MemoryDirectoryStore,
        clock: Clock,
        start: Callable[[], Awaitable[MemoryDirectory]],
    ) -> None:
        super().__init__(network, store, clock, CLIENT_HOST)
        self._start = start

    async def connect(self) -> tuple[LoopbackTransport, MemoryDirectory]:
        """See Network.connect."""
        directory = await self._start()
        return self.make_transport(), directory


class _ClientDirectory(MemoryDirectory):
    """A client's door to the directory; the swarm ends when it is shut."""

    def __init__(
        self, store: MemoryDirectoryStore, clock: Clock, end: Callable[[], Awaitable[None]]
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
