"""Real peers and a client in one process, on virtual time: what is measured is nobody's speed."""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import torch
from service_scene import HoldingComputeThread
from torch import Tensor

from shoal.client.config import ClientConfig
from shoal.client.farewells import Farewells
from shoal.client.live_hops import LiveHops
from shoal.client.route_opening import SessionFacts
from shoal.client.session import RemoteSession
from shoal.client.swarm import Swarm
from shoal.kernels.quantize import WeightFormat
from shoal.peer.engine.engine import Engine
from shoal.peer.engine.loader import open_checkpoint
from shoal.peer.neighbours import Neighbours
from shoal.peer.service import Service, ServiceFacts
from shoal.protocol.announcements import Announcement, PeerState, sign_announcement
from shoal.protocol.identity import Identity
from shoal.protocol.ids import ModelId, SessionId
from shoal.protocol.net.clock import VirtualClock
from shoal.protocol.net.loopback import Link, LoopbackNetwork, LoopbackTransport
from shoal.protocol.net.memory_directory import MemoryDirectory, MemoryDirectoryStore
from shoal.protocol.spans import Span
from shoal.protocol.versions import MAX_VERSION, MIN_VERSION

HIDDEN = 64
MODEL_ID = ModelId("a" * 32)
WHOLE = Span(0, 4)


class Scene:
    """A network on which a test runs peers of a model of 4 blocks, and sessions of clients."""

    def __init__(self, directory: str, config: ClientConfig, link: Link | None = None) -> None:
        self.network = LoopbackNetwork(link=link)
        self._config = config
        self._num_sessions = 0
        self._store = MemoryDirectoryStore()
        self._model = directory

    @asynccontextmanager
    async def serve(
        self, host: str, span: Span = WHOLE, max_sessions: int = 8
    ) -> AsyncGenerator[Service]:
        """Be a peer, from its announcement to its end."""
        checkpoint = open_checkpoint(self._model)
        engine = Engine.load(checkpoint, span, WeightFormat.FP32, kv_budget_bytes=2**22)
        identity = Identity(host.encode().ljust(32))
        async with HoldingComputeThread(engine) as compute:
            facts = ServiceFacts(identity.peer_id, MODEL_ID, max_sessions, 600.0)
            transport = LoopbackTransport(self.network, host)
            neighbours = Neighbours(transport, VirtualClock())
            service = Service(facts, engine, compute, VirtualClock(), neighbours)
            listener = await transport.listen(host, 0, service.serve)
            now = VirtualClock().wall()
            announcement = Announcement(
                peer_id=identity.peer_id,
                model_id=MODEL_ID,
                num_blocks=WHOLE.stop,
                span=span,
                state=PeerState.ONLINE,
                endpoints=(listener.endpoint,),
                min_version=MIN_VERSION,
                max_version=MAX_VERSION,
                weights="fp32",
                compute_dtype="fp32",
                sequence=1,
                issued_at=now,
                expires_at=now + 600,
            )
            await self._open_directory().announce(sign_announcement(identity, announcement))
            try:
                yield service
            finally:
                self.network.resume(host)
                await neighbours.close()
                await transport.close()

    def _open_directory(self) -> MemoryDirectory:
        return MemoryDirectory(self._store, VirtualClock())

    async def open_session(
        self, transport: LoopbackTransport, max_length: int = 64
    ) -> RemoteSession:
        """Return a session over all blocks."""
        swarm = Swarm(
            self._open_directory(), MODEL_ID, WHOLE.stop, VirtualClock(), random.Random(0)
        )
        await swarm.refresh()
        self._num_sessions += 1
        name = self._num_sessions.to_bytes(16, "big")
        facts = SessionFacts(
            SessionId(name), MODEL_ID, WHOLE, HIDDEN, max_length, client_secret=name
        )
        return RemoteSession(
            LiveHops(facts, swarm, transport, VirtualClock(), self._config, Farewells())
        )


def draw(seed: int, num_tokens: int) -> Tensor:
    return torch.randn(1, num_tokens, HIDDEN, generator=torch.Generator().manual_seed(seed))
