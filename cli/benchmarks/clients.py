"""Clients of a swarm, all of them in this process and on one event loop."""

import asyncio
import contextlib
import hashlib
import random
import secrets
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from ...client.routing.swarm import Swarm
from ...client.runtime.joining import connect_over_network
from ...client.session.farewells import Farewells
from ...client.session.live_hops import LiveHops, SessionFacts
from ...client.session.session import RemoteSession
from ...client.settings.config import ClientConfig
from ...peer.local_swarm.swarm import LocalSwarm
from ...protocol.errors import UnavailableError
from ...protocol.ids import ModelId, SessionId
from ...protocol.net.clock import SystemClock
from ...protocol.net.transport import Transport
from ...protocol.spans import Span
from .benchmark_model import BenchmarkModel


@dataclass(frozen=True)
class SwarmAddress:
    """Where a swarm is and what it serves; everything that a client in another process needs."""

    model: BenchmarkModel
    model_id: ModelId
    initial_peers: tuple[str, ...]

    @classmethod
    def of(cls, swarm: LocalSwarm, model: BenchmarkModel) -> "SwarmAddress":
        """Return where a running swarm is."""
        model_id = ModelId(swarm.peers[0].facts["model_id"])
        return cls(model, model_id, tuple(swarm.initial_peers))


class Clients:
    """Opens sessions under the names of several clients, which peers cannot tell from processes
    of their own. Made by `join_swarm`.
    """

    def __init__(
        self, address: SwarmAddress, config: ClientConfig, swarm: Swarm, transport: Transport
    ) -> None:
        self._address = address
        self._config = config
        self._swarm = swarm
        self._transport = transport
        self._farewells = Farewells()
        self._sessions: list[RemoteSession] = []

    def open(
        self,
        max_tokens: int,
        client: str = "one",
        span: Span | None = None,
        kind: type[RemoteSession] = RemoteSession,
    ) -> RemoteSession:
        """Return a session of a client over all blocks, or over a span of them."""
        facts = SessionFacts(
            SessionId(secrets.token_bytes(16)),
            self._address.model_id,
            span or Span(0, self._address.model.num_blocks),
            self._address.model.hidden_size,
            max_tokens,
            hashlib.sha256(client.encode()).digest()[:16],
        )
        hops = LiveHops(
            facts, self._swarm, self._transport, SystemClock(), self._config, self._farewells
        )
        session = kind(hops)
        self._sessions.append(session)
        return session

    async def close_sessions(self) -> None:
        """Close every session that was opened so far."""
        sessions, self._sessions = self._sessions, []
        await asyncio.gather(*(session.close() for session in sessions))
        await self._farewells.finish()

    def check_nothing_was_lost(self) -> None:
        """Raise UnavailableError when a session had to change its peer: its times are no good."""
        for session in self._sessions:
            if session.failovers:
                raise UnavailableError(
                    f"a peer was lost while it was measured: {session.failovers[0].reason}"
                )


@contextlib.asynccontextmanager
async def join_swarm(
    address: SwarmAddress,
    wrap: Callable[[Transport], Transport] = lambda transport: transport,
    **settings: Any,
) -> AsyncIterator[Clients]:
    """Join with the client's own network stack and with settings of `ClientConfig`; `wrap` puts
    something around its transport.
    """
    config = ClientConfig(initial_peers=address.initial_peers, **settings)
    transport, directory = await connect_over_network(config)
    try:
        swarm = Swarm(
            directory, address.model_id, address.model.num_blocks, SystemClock(), random.Random(0)
        )
        await swarm.refresh()
        clients = Clients(address, config, swarm, wrap(transport))
        try:
            yield clients
        finally:
            await clients.close_sessions()
    finally:
        await transport.close()
        await directory.close()
