"""The network inside one process: hosts of a loopback network around a shared directory."""

from __future__ import annotations

import contextlib

from ...errors import UnavailableError
from ...identity import Identity
from ..clock import Clock
from ..network import Addresses, Presence
from ..transport import Stream, StreamServer
from .loopback import LoopbackNetwork, LoopbackTransport
from .memory_directory import MemoryDirectory, MemoryDirectoryStore


class MemoryNetwork:
    """One host of a loopback network. Implements Network.

    `serve_stream` takes every new stream of a peer here. It is the peer's own; put something else
    there to see what others make of a peer that misbehaves.
    """

    def __init__(
        self, network: LoopbackNetwork, store: MemoryDirectoryStore, clock: Clock, host: str
    ) -> None:
        self.network = network
        self.host = host
        self.serve_stream: StreamServer = _hang_up
        self._store = store
        self._clock = clock

    async def connect(self) -> tuple[LoopbackTransport, MemoryDirectory]:
        return self.make_transport(), self.make_directory()

    async def serve(self, identity: Identity, serve: StreamServer) -> Presence:
        self.serve_stream = serve
        transport, directory = self.make_transport(), self.make_directory()
        listener = await transport.listen(self.host, 0, self._serve_stream)
        opened = contextlib.AsyncExitStack()
        opened.push_async_callback(transport.close)
        opened.push_async_callback(directory.close)
        facts = {"addresses": [], "dialled": []}  # other processes cannot join
        addresses = Addresses([listener.endpoint], facts)
        return Presence(identity, transport, directory, [listener], addresses, opened)

    def make_transport(self) -> LoopbackTransport:
        """Return what this host dials and listens with."""
        return LoopbackTransport(self.network, self.host, self._store.records.membership)

    def make_directory(self) -> MemoryDirectory:
        """Return this host's access to the directory: a host that is dead or paused has none."""
        return _HostDirectory(self._store, self._clock, self.network, self.host)

    async def _serve_stream(self, stream: Stream) -> None:
        await self.serve_stream(stream)


class _HostDirectory(MemoryDirectory):
    """Publishes nothing while its host is dead or stands still."""

    def __init__(
        self, store: MemoryDirectoryStore, clock: Clock, network: LoopbackNetwork, host: str
    ) -> None:
        super().__init__(store, clock)
        self._network = network
        self._host = host

    async def announce(self, record: bytes) -> None:
        """Publish, or do nothing: a dead host has nothing to say, and no reason to complain."""
        with contextlib.suppress(UnavailableError):
            self._network.check_alive(self._host)
            if not self._network.is_paused(self._host):
                await super().announce(record)


async def _hang_up(stream: Stream) -> None:
    """Serve nobody yet."""
