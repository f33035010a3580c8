"""Clients of a swarm, all in this process and on one event loop, and timing of their sessions."""

import asyncio
import contextlib
import hashlib
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from measuring.benchmark_model import BenchmarkModel
from shoal.client.adapters.adapter_versions import AdapterVersion
from shoal.client.routing.route_finder import SwarmModel
from shoal.client.runtime.async_client import AsyncClient
from shoal.client.runtime.client import Connect, find_network
from shoal.client.session.session import RemoteSession
from shoal.client.session.state import SessionFacts
from shoal.client.settings.client_config import ClientConfig
from shoal.peer.local_swarm.swarm import LocalSwarm
from shoal.protocol.errors import UnavailableError
from shoal.protocol.ids import ModelId
from shoal.protocol.net.clock import SystemClock
from shoal.protocol.spans import Span


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

    def __init__(self, address: SwarmAddress, client: AsyncClient) -> None:
        self._address = address
        self._client = client
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
            self._address.model_id,
            span or Span(0, self._address.model.num_blocks),
            self._address.model.hidden_size,
            max_tokens,
            hashlib.sha256(client.encode()).digest()[:16],
        )
        session = self._client.open_session_as(facts, kind)
        self._sessions.append(session)
        return session

    def open_adapted(self, max_tokens: int, adapter: AdapterVersion) -> RemoteSession:
        """Return a session over all blocks whose rows have an adapter, of one more client."""
        span = Span(0, self._address.model.num_blocks)
        session = self._client.open_session(max_tokens, span, adapter=adapter)
        self._sessions.append(session)
        return session

    async def close_sessions(self) -> None:
        """Close every session that was opened so far."""
        sessions, self._sessions = self._sessions, []
        await asyncio.gather(*(session.close() for session in sessions))
        await self._client.close_sessions()

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
    connect: Connect = find_network,
    **settings: Any,
) -> AsyncIterator[Clients]:
    """Join like a `Client`, but on this event loop, with settings of `ClientConfig`."""
    config, clock = ClientConfig(address.initial_peers, seed=0, **settings), SystemClock()
    known = SwarmModel(address.model_id, address.model.num_blocks, address.model.hidden_size)
    async with await AsyncClient.join(config, connect(config), clock, known) as client:
        clients = Clients(address, client)
        try:
            yield clients
        finally:
            await clients.close_sessions()


async def time_prompt(session: RemoteSession, model: BenchmarkModel, num_tokens: int) -> float:
    """Return the seconds until the last token of a new prompt is answered."""
    hidden_BTH = model.make_hidden(num_tokens)
    started_at = time.perf_counter()
    await session.step(hidden_BTH, last_token_only=True)
    return time.perf_counter() - started_at


async def time_steps(session: RemoteSession, model: BenchmarkModel, num_steps: int) -> list[float]:
    """Return the seconds of steps of one token."""
    return [await time_step(session, model) for _ in range(num_steps)]


async def time_step(session: RemoteSession, model: BenchmarkModel) -> float:
    """Return the seconds of one step of one token."""
    hidden_BTH = model.make_hidden(1)
    started_at = time.perf_counter()
    await session.step(hidden_BTH, is_decoded=True)
    return time.perf_counter() - started_at


async def time_load(
    sessions: Sequence[RemoteSession], model: BenchmarkModel, load_seconds: float
) -> tuple[list[float], float]:
    """Let all sessions step for a while, each as fast as it is answered.

    Returns the seconds of every step, and those that it took together.
    """
    started_at = time.perf_counter()
    seconds: list[float] = []

    async def live(session: RemoteSession) -> None:
        while time.perf_counter() < started_at + load_seconds:
            seconds.append(await time_step(session, model))

    await asyncio.gather(*map(live, sessions))
    return seconds, time.perf_counter() - started_at
