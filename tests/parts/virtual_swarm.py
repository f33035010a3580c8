"""Real peers and a client in one process, on virtual time: what is measured is nobody's speed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

import torch
from memory_swarm import MODEL_ID, Inside, MemorySwarm
from torch import Tensor
from virtual_time import VirtualClock, run_virtual

from shoal.client.routing.route_finder import SwarmModel
from shoal.client.runtime.async_client import AsyncClient
from shoal.client.session.session import RemoteSession
from shoal.client.session.state import SessionFacts
from shoal.client.settings.client_config import ClientConfig
from shoal.peer.process.config import PeerConfig
from shoal.protocol.endpoints import Endpoint, Libp2pEndpoint
from shoal.protocol.ids import SessionId
from shoal.protocol.net.memory.loopback import Link, LoopbackStream, LoopbackTransport
from shoal.protocol.spans import Span

HIDDEN = 64
WHOLE = Span(0, 4)
PERIOD_SECONDS = 30.0


class RelayedTransport(LoopbackTransport):
    """Reaches those behind relays, too, and tells how often."""

    num_relayed = 0

    async def open_stream(self, endpoint: Endpoint, timeout_seconds: float = 5.0) -> LoopbackStream:
        if isinstance(endpoint, Libp2pEndpoint):
            self.num_relayed += 1
            fingerprint = self._network.fingerprint_of(endpoint.host, endpoint.port)
            endpoint = Endpoint(endpoint.host, endpoint.port, fingerprint)
        return await super().open_stream(endpoint, timeout_seconds)


class VirtualSwarm:
    """A network on which a test runs peers of a model of 4 blocks, and sessions of clients.

    What is added, joined or put on its stack is closed when the test is over.
    """

    def __init__(self, directory: str, config: ClientConfig, link: Link | None = None) -> None:
        self._swarm = MemorySwarm(link)
        self.network = self._swarm.network
        self._config = config
        self._num_sessions = 0
        self._model = directory
        self.stack = AsyncExitStack()

    async def add(
        self, host: str, span: Span = WHOLE, max_sessions: int = 8, *, is_relayed: bool = False
    ) -> Inside:
        """Start a peer and wait until it is online; one that is relayed parks streams."""
        config = PeerConfig(
            self._model, span, weights="fp32", kv_budget_bytes=2**22, block_cache_bytes=0,
            max_sessions=max_sessions, session_idle_seconds=600.0, drain_seconds=0.0,
            announce_period_seconds=PERIOD_SECONDS,
        )  # fmt: skip
        peer = self._swarm.serve(host, config, is_relayed=is_relayed)
        return await self.stack.enter_async_context(peer)

    async def join(self, host: str) -> RemoteSession:
        """Return a session of a client on a host of its own."""
        transport = RelayedTransport(self.network, host)
        self.stack.push_async_callback(transport.close)
        session = await self.open_session(transport)
        self.stack.push_async_callback(session.close)
        return session

    def make_client(self, transport: LoopbackTransport) -> AsyncClient:
        """Return a client, which closes the transport when it is closed."""
        directory, model = self._swarm.open_directory(), SwarmModel(MODEL_ID, WHOLE.stop, HIDDEN)
        return AsyncClient(self._config, model, transport, directory, VirtualClock())

    async def open_session(
        self, transport: LoopbackTransport, max_length: int = 64, client: bytes = b""
    ) -> RemoteSession:
        """Return a session over all blocks, of a client of its own unless one is named."""
        joined = self.make_client(transport)
        await joined.swarm.book.refresh()
        self._num_sessions += 1
        name = self._num_sessions.to_bytes(16, "big")
        facts = SessionFacts(
            MODEL_ID, WHOLE, HIDDEN, max_length, client or name, session=SessionId(name)
        )
        return joined.open_session_as(facts)


def run_scene(
    directory: object,
    config: ClientConfig,
    story: Callable[[VirtualSwarm], Awaitable[None]],
    link: Link | None = None,
) -> None:
    """Run a story on virtual time; no task is left when it is over."""

    async def main() -> None:
        scene = VirtualSwarm(str(directory), config, link)
        async with scene.stack:
            await story(scene)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run_virtual(main())


def draw(seed: int, num_tokens: int) -> Tensor:
    return torch.randn(1, num_tokens, HIDDEN, generator=torch.Generator().manual_seed(seed))
