"""Real peers and a client in one process, on virtual time: what is measured is nobody's speed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

import torch
from service_scene import HoldingComputeThread
from torch import Tensor

from shoal.client.concurrency.tasks import Closer
from shoal.client.routing.swarm import Swarm
from shoal.client.runtime.client import open_remote_session
from shoal.client.session.session import RemoteSession
from shoal.client.session.state import SessionFacts, SessionState
from shoal.client.settings.config import ClientConfig
from shoal.kernels.linear.quantize import WeightFormat
from shoal.models.checkpoints.checkpoint import Checkpoint
from shoal.peer.engine.loading.engine_loader import load_engine
from shoal.peer.pushing.neighbours import Neighbours
from shoal.peer.pushing.parked_streams import ParkedStreams
from shoal.peer.pushing.reverse_connections import ReverseConnections
from shoal.peer.streams.door import Door
from shoal.peer.streams.service import Service, ServiceFacts
from shoal.protocol.endpoints import Endpoint, Libp2pEndpoint, Relay
from shoal.protocol.identity import Identity
from shoal.protocol.ids import ModelId, SessionId
from shoal.protocol.net.clock import VirtualClock
from shoal.protocol.net.memory.loopback import Link, LoopbackNetwork, LoopbackTransport
from shoal.protocol.net.memory.loopback_wire import LoopbackStream
from shoal.protocol.net.memory.memory_directory import MemoryDirectory, MemoryDirectoryStore
from shoal.protocol.records.announcements import Announcement, PeerState, sign_announcement
from shoal.protocol.spans import Span
from shoal.protocol.versions import MAX_VERSION, MIN_VERSION

HIDDEN = 64
MODEL_ID = ModelId("a" * 32)
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
        self, host: str, span: Span = WHOLE, max_sessions: int = 8, *, is_relayed: bool = False
    ) -> AsyncGenerator[Service]:
        """Be a peer, from its announcement to its end; one that is relayed parks streams."""
        checkpoint = Checkpoint.open(self._model)
        engine = load_engine(checkpoint, span, WeightFormat.FP32, kv_budget_bytes=2**22)
        identity = Identity(host.encode().ljust(32))
        async with HoldingComputeThread(engine) as compute:
            facts = ServiceFacts(identity.peer_id, MODEL_ID, max_sessions, 600.0)
            transport = LoopbackTransport(self.network, host)
            door, directory = Door(), self._open_directory()
            endpoint = (await transport.listen(host, 0, door.serve)).endpoint
            look = partial(directory.lookup, MODEL_ID)
            parked = ParkedStreams(endpoint.fingerprint, look, VirtualClock(), PERIOD_SECONDS)
            neighbours = Neighbours(
                transport, VirtualClock(), parked=None if is_relayed else parked
            )
            service = Service(facts, engine, compute, VirtualClock(), neighbours)
            door.open(service)
            now = VirtualClock().wall()
            announcement = Announcement(
                peer_id=identity.peer_id,
                model_id=MODEL_ID,
                num_blocks=WHOLE.stop,
                span=span,
                state=PeerState.ONLINE,
                endpoints=() if is_relayed else (endpoint,),
                relays=(Relay(host, endpoint.port, identity.peer_id),) if is_relayed else (),
                min_version=MIN_VERSION,
                max_version=MAX_VERSION,
                weights="fp32",
                compute_dtype="fp32",
                sequence=1,
                issued_at=now,
                expires_at=now + 600,
            )
            await directory.announce(sign_announcement(identity, announcement))
            reverse = ReverseConnections(
                identity, transport, directory, door.serve, VirtualClock(), PERIOD_SECONDS
            )
            chore = None
            if is_relayed:
                chore = asyncio.create_task(self._park(identity, announcement, reverse))
            try:
                yield service
            finally:
                self.network.resume(host)
                if chore is not None:
                    chore.cancel()
                    await asyncio.wait([chore])
                await neighbours.close()
                await transport.close()

    async def _park(
        self, identity: Identity, announcement: Announcement, reverse: ReverseConnections
    ) -> None:
        """Keep streams parked, and announce it."""
        announcing: list[asyncio.Task[None]] = []

        def announce(_: Sequence[str]) -> None:
            nonlocal announcement
            later = replace(
                announcement,
                sequence=announcement.sequence + 1,
                issued_at=VirtualClock().wall(),
                expires_at=VirtualClock().wall() + 600,
            )
            announcement = reverse.describe(later)
            record = sign_announcement(identity, announcement)
            announcing.append(asyncio.create_task(self._open_directory().announce(record)))

        reverse.describe(announcement)
        await reverse.run(announce)

    def _open_directory(self) -> MemoryDirectory:
        return MemoryDirectory(self._store, VirtualClock())

    async def open_session(
        self, transport: LoopbackTransport, max_length: int = 64, client: bytes = b""
    ) -> RemoteSession:
        """Return a session over all blocks, of a client of its own unless one is named."""
        swarm = Swarm(
            self._open_directory(), MODEL_ID, WHOLE.stop, VirtualClock(), random.Random(0)
        )
        await swarm.refresh()
        self._num_sessions += 1
        name = self._num_sessions.to_bytes(16, "big")
        facts = SessionFacts(
            SessionId(name), MODEL_ID, WHOLE, HIDDEN, max_length, client_secret=client or name
        )
        state = SessionState(facts, swarm, VirtualClock(), self._config)
        return open_remote_session(state, transport, Closer())


def draw(seed: int, num_tokens: int) -> Tensor:
    return torch.randn(1, num_tokens, HIDDEN, generator=torch.Generator().manual_seed(seed))
