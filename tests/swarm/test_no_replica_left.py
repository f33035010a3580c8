"""The last peer of some blocks is gone: the client says so within the time it was given.

Real services and engines on virtual time, so that what is measured is the client's own patience
and no machine's speed.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
import torch
from service_scene import HoldingComputeThread
from torch import Tensor

from shoal.client.config import ClientConfig
from shoal.client.live_hops import LiveHops, SessionFacts
from shoal.client.session import RemoteSession
from shoal.client.swarm import Swarm
from shoal.kernels.quantize import WeightFormat
from shoal.peer.engine.engine import Engine
from shoal.peer.engine.loader import open_checkpoint
from shoal.peer.service import Service, ServiceFacts
from shoal.protocol.announcements import Announcement, PeerState, sign_announcement
from shoal.protocol.errors import RouteError
from shoal.protocol.identity import Identity
from shoal.protocol.ids import ModelId, SessionId
from shoal.protocol.net.clock import VirtualClock, run_virtual
from shoal.protocol.net.loopback import LoopbackNetwork, LoopbackTransport
from shoal.protocol.net.memory_directory import MemoryDirectory, MemoryDirectoryStore
from shoal.protocol.spans import Span

HIDDEN = 64
MODEL_ID = ModelId("a" * 32)
WHOLE = Span(0, 4)
SPANS = {"first": Span(0, 2), "last": Span(2, 4)}
PATIENCE_SECONDS = 7.0
CONFIG = ClientConfig(seed=0, failover_timeout_seconds=PATIENCE_SECONDS)
SLACK_SECONDS = 2 * CONFIG.connect_timeout_seconds
"""The attempt that is under way when the time is over may end, at the network and at the DHT."""


class Scene:
    """A network with one peer per span, and a session that a client has with them."""

    def __init__(self, directory: str) -> None:
        self.network = LoopbackNetwork()
        self._store = MemoryDirectoryStore()
        self._model = directory

    @asynccontextmanager
    async def serve(self, host: str) -> AsyncGenerator[None]:
        """Be a peer, from its announcement to its end."""
        checkpoint = open_checkpoint(self._model)
        engine = Engine.load(checkpoint, SPANS[host], WeightFormat.FP32, kv_budget_bytes=2**22)
        identity = Identity(host.encode().ljust(32))
        async with HoldingComputeThread(engine) as compute:
            facts = ServiceFacts(identity.peer_id, MODEL_ID, 8, 600.0)
            service = Service(facts, engine, compute, VirtualClock())
            transport = LoopbackTransport(self.network, host)
            listener = await transport.listen(host, 0, service.serve)
            now = VirtualClock().wall()
            announcement = Announcement(
                peer_id=identity.peer_id,
                model_id=MODEL_ID,
                num_blocks=WHOLE.stop,
                span=SPANS[host],
                state=PeerState.ONLINE,
                endpoints=(listener.endpoint,),
                min_version=1,
                max_version=1,
                weights="fp32",
                compute_dtype="fp32",
                sequence=1,
                issued_at=now,
                expires_at=now + 600,
            )
            await self._open_directory().announce(sign_announcement(identity, announcement))
            try:
                yield
            finally:
                self.network.resume(host)
                await transport.close()

    def _open_directory(self) -> MemoryDirectory:
        return MemoryDirectory(self._store, VirtualClock())

    async def open_session(self, transport: LoopbackTransport) -> RemoteSession:
        swarm = Swarm(
            self._open_directory(), MODEL_ID, WHOLE.stop, VirtualClock(), random.Random(0)
        )
        await swarm.refresh()
        facts = SessionFacts(SessionId(bytes(16)), MODEL_ID, WHOLE, HIDDEN, 64)
        return RemoteSession(LiveHops(facts, swarm, transport, VirtualClock(), CONFIG))


def draw(seed: int, num_tokens: int) -> Tensor:
    return torch.randn(1, num_tokens, HIDDEN, generator=torch.Generator().manual_seed(seed))


def run(directory: Any, story: Callable[[Scene, RemoteSession], Awaitable[None]]) -> None:
    async def main() -> None:
        scene = Scene(str(directory))
        async with AsyncExitStack() as stack:
            for host in SPANS:
                await stack.enter_async_context(scene.serve(host))
            transport = LoopbackTransport(scene.network, "client")
            stack.push_async_callback(transport.close)
            session = await scene.open_session(transport)
            stack.push_async_callback(session.close)
            await story(scene, session)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run_virtual(main())


@pytest.mark.parametrize("host", SPANS)
@pytest.mark.parametrize("trouble", [LoopbackNetwork.kill, LoopbackNetwork.pause])
@pytest.mark.parametrize("num_tokens", [1, 9], ids=["token", "prompt"])
def test_last_replica_that_is_gone_is_named_in_time(
    tiny_models: Any, host: str, trouble: Callable[[LoopbackNetwork, str], None], num_tokens: int
) -> None:
    async def story(scene: Scene, session: RemoteSession) -> None:
        await session.step(draw(1, 5))
        trouble(scene.network, host)
        asked_at = VirtualClock().now()

        with pytest.raises(RouteError) as caught:
            await session.step(draw(2, num_tokens))

        seconds = VirtualClock().now() - asked_at
        assert PATIENCE_SECONDS <= seconds <= PATIENCE_SECONDS + SLACK_SECONDS
        assert caught.value.missing == (SPANS[host],)
        assert session.position == 5

    run(tiny_models.get().directory, story)
