"""A network and a directory in memory, on virtual time, for peers that a test scripts."""

from __future__ import annotations

from typing import Any

from announcements import describe_peer
from virtual_time import VirtualClock

from shoal.protocol.endpoints import Endpoint
from shoal.protocol.identity import Identity
from shoal.protocol.ids import ModelId
from shoal.protocol.membership.membership import Membership
from shoal.protocol.net.memory.loopback import Link, LoopbackNetwork, LoopbackTransport
from shoal.protocol.net.memory.memory_directory import MemoryDirectory, MemoryDirectoryStore
from shoal.protocol.net.transport import StreamServer
from shoal.protocol.records.announcements import Announcement, sign_announcement
from shoal.protocol.spans import Span

MODEL_ID = ModelId("a" * 32)


class ScriptedSwarm:
    """What a scripted peer needs of a swarm: a host, a listener, and a way to announce itself."""

    def __init__(
        self, num_blocks: int, link: Link | None = None, model_id: ModelId = MODEL_ID
    ) -> None:
        self.network = LoopbackNetwork(link=link)
        self.store = MemoryDirectoryStore()
        self.clock = VirtualClock()
        self._opened: list[tuple[str, LoopbackTransport]] = []
        self._model_id = model_id
        self._num_blocks = num_blocks
        self._num_announced = 0

    @property
    def directory(self) -> MemoryDirectory:
        return MemoryDirectory(self.store, self.clock)

    @property
    def num_transports(self) -> int:
        return len(self._opened)

    def make_transport(self, host: str, membership: Membership | None = None) -> LoopbackTransport:
        """Return a transport of a host, which `close` closes."""
        transport = LoopbackTransport(self.network, host, membership)
        self._opened.append((host, transport))
        return transport

    async def listen(
        self, host: str, serve: StreamServer, membership: Membership | None = None
    ) -> Endpoint:
        """Serve streams at a host, until `close`."""
        transport = self.make_transport(host, membership)
        return (await transport.listen(host, 0, serve)).endpoint

    def describe(self, identity: Identity, span: Span, **facts: Any) -> Announcement:
        """Return an announcement that is newer than the ones before, for ten minutes."""
        self._num_announced += 1
        now = self.clock.wall()
        usual: dict[str, Any] = {
            "peer_id": identity.peer_id,
            "model_id": self._model_id,
            "num_blocks": self._num_blocks,
            "span": span,
            "sequence": int(1000 * now) + self._num_announced,
            "issued_at": now,
            "expires_at": now + 600,
        }
        return describe_peer(**(usual | facts))

    async def announce(self, identity: Identity, span: Span, **facts: Any) -> Announcement:
        """Let a peer announce itself once."""
        announcement = self.describe(identity, span, **facts)
        await self.directory.announce(sign_announcement(identity, announcement))
        return announcement

    async def close(self) -> None:
        """Close all transports, also those of hosts that were killed."""
        for host, transport in self._opened:
            self.network.revive(host)
            await transport.close()
