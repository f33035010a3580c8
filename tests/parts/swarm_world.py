"""A directory, its peers and a client's view of them, on virtual time."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from async_tests import make_decorator
from scripted_swarm import MODEL_ID, ScriptedSwarm

from shoal.client.routing.route import Hop
from shoal.client.routing.route_finder import RouteFinder, SwarmModel
from shoal.client.settings.client_config import ClientConfig
from shoal.protocol.identity import Identity
from shoal.protocol.ids import ModelId
from shoal.protocol.net.memory.loopback import LoopbackTransport
from shoal.protocol.net.memory.memory_directory import MemoryDirectory
from shoal.protocol.records.announcements import Announcement
from shoal.protocol.spans import Span

MODEL = MODEL_ID
WHOLE = Span(0, 4)
FIRST_SECONDS, LONGEST_SECONDS = 15.0, 600.0


class CountingDirectory(MemoryDirectory):
    """Counts how often it is read."""

    num_lookups = 0
    is_silent = False

    async def lookup(self, model_id: ModelId, max_age_seconds: float = 0.0) -> list[Announcement]:
        self.num_lookups += 1
        if self.is_silent:
            await asyncio.sleep(3600.0)
        return await super().lookup(model_id)


class SwarmWorld:
    """Peers that announce by hand, and one client's swarm."""

    def __init__(self) -> None:
        self._peers = ScriptedSwarm(WHOLE.stop)
        self.clock, self.store = self._peers.clock, self._peers.store
        self.directory = CountingDirectory(self.store, self.clock)
        self.choose()
        self._num_announced = 0

    def choose(self, **settings: Any) -> None:
        """Let the client have these settings."""
        self.swarm = RouteFinder(
            self.directory,
            LoopbackTransport(self._peers.network, "client"),
            SwarmModel(MODEL, 4, 8),
            self.clock,
            ClientConfig(seed=0, **settings),
        )

    async def announce(self, number: int, **changes: Any) -> Announcement:
        """Let peer `number` announce that it serves all blocks, with changes."""
        self._num_announced += 1
        expires_at = self.clock.wall() + 500 + 0.001 * self._num_announced
        facts = {"span": WHOLE, "compute_dtype": "bf16", "expires_at": expires_at} | changes
        return await self._peers.announce(Identity(bytes([number]) * 32), **facts)

    def note_answer(self, peer: Announcement) -> None:
        """Let a peer have taken a token through all blocks."""
        self.swarm.book.note_answer(Hop(peer, WHOLE), 1, 0.1)

    async def route(self, patience_seconds: float = 0.0, **options: Any) -> list[str]:
        """Return the peers of a route through all blocks."""
        options = {"max_age_seconds": 0.0, "weights": (None,)} | options
        deadline = self.clock.now() + patience_seconds
        route = await self.swarm.wait_for_route(WHOLE, deadline, **options)
        return [hop.peer.peer_id for hop in route.hops]


async def run_in_world(story: Callable[[SwarmWorld], Awaitable[None]]) -> None:
    """Run a story in a world of its own, on virtual time that starts at an odd hour."""
    await asyncio.sleep(1000.0)
    await story(SwarmWorld())


in_world = make_decorator(run_in_world)
