"""What clients and peers know outlives the directory, and everybody whom they have met first."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
import torch
from memory_swarm import MODEL_ID, Inside, MemorySwarm
from virtual_swarm import HIDDEN, PERIOD_SECONDS, WHOLE, draw
from virtual_time import VirtualClock

from shoal.client.routing.route_finder import SwarmModel
from shoal.client.runtime.async_client import AsyncClient
from shoal.client.session.session import RemoteSession
from shoal.client.settings.client_config import ClientConfig
from shoal.peer.process.config import PeerConfig
from shoal.protocol.errors import DirectoryError
from shoal.protocol.identity import Identity
from shoal.protocol.ids import ModelId
from shoal.protocol.net.memory.loopback import Link, LoopbackTransport
from shoal.protocol.net.memory.memory_directory import MemoryDirectory
from shoal.protocol.net.network import Presence
from shoal.protocol.net.transport import StreamServer
from shoal.protocol.records.announcements import Announcement
from shoal.protocol.spans import Span

pytestmark = pytest.mark.slow

OVERLAP_SECONDS = 35.0
HALVES = (Span(0, 2), Span(2, 4))


class LostDirectory(MemoryDirectory):
    """A directory whose contacts all die: the swarm goes on without this member."""

    is_lost = False
    is_silent = False
    silent_seconds = 3600.0

    async def lookup(self, model_id: ModelId, max_age_seconds: float = 0.0) -> list[Announcement]:
        if self.is_silent:
            await asyncio.sleep(self.silent_seconds)
            raise DirectoryError("every contact is gone")
        return await super().lookup(model_id)

    def _check_is_reachable(self) -> None:
        if self.is_lost:
            raise DirectoryError("every contact is gone")
        super()._check_is_reachable()


class World:
    """Peers of a model of 4 blocks, and clients; all are closed when the test is over."""

    def __init__(self, model: str, stack: AsyncExitStack) -> None:
        self.swarm = MemorySwarm()
        self._model = model
        self._stack = stack

    async def add(self, host: str, span: Span) -> Inside:
        config = PeerConfig(
            self._model, span, weights="fp32", kv_budget_bytes=2**22, block_cache_bytes=0,
            drain_seconds=0.0, announce_period_seconds=PERIOD_SECONDS,
        )  # fmt: skip
        return await self._stack.enter_async_context(self.swarm.serve(host, config))

    async def join(self, host: str = "client", **settings: Any) -> Client:
        directory = LostDirectory(self.swarm.store, VirtualClock())
        client = Client(self.swarm, host, directory)
        client.joined = await AsyncClient.join(
            ClientConfig(seed=7, **settings),
            client,
            VirtualClock(),
            SwarmModel(MODEL_ID, WHOLE.stop, HIDDEN),
        )
        self._stack.push_async_callback(client.joined.close)
        return client

    def kill(self, *hosts: str) -> None:
        for host in hosts:
            self.swarm.network.kill(host)


class Client:
    """A client whose directory can be lost. Implements Network."""

    joined: AsyncClient

    def __init__(self, swarm: MemorySwarm, host: str, directory: LostDirectory) -> None:
        self._swarm = swarm
        self._host = host
        self.directory = directory

    async def connect(self) -> tuple[LoopbackTransport, MemoryDirectory]:
        return LoopbackTransport(self._swarm.network, self._host), self.directory

    async def serve(self, identity: Identity, serve: StreamServer) -> Presence:
        raise NotImplementedError

    @asynccontextmanager
    async def open_session(self) -> AsyncGenerator[RemoteSession]:
        session = self.joined.open_session(64, WHOLE)
        try:
            yield session
        finally:
            await session.close()


@asynccontextmanager
async def open_world(models: Any) -> AsyncGenerator[World]:
    async with AsyncExitStack() as stack:
        yield World(str(models.get("llama").directory), stack)


async def replace_everybody(world: World, client: Client) -> None:
    """Let others serve all blocks; then those that were there first die, and the directory with
    them.
    """
    for number, span in enumerate(HALVES):
        await world.add(f"new{number}", span)
    await asyncio.sleep(OVERLAP_SECONDS)
    world.kill("old0", "old1")
    client.directory.is_lost = True


async def test_session_and_idle_client_outlive_everybody_whom_they_have_met(
    tiny_models: Any,
) -> None:
    async with open_world(tiny_models) as world:
        for number, span in enumerate(HALVES):
            await world.add(f"old{number}", span)
        client = await world.join()
        inputs = draw(1, 6)
        async with client.open_session() as undisturbed:
            expected = await undisturbed.step(inputs)
        async with client.open_session() as running:
            begun = await running.step(inputs[:, :4])

            await replace_everybody(world, client)
            rest = await running.step(inputs[:, 4:])

        async with client.open_session() as another:
            assert torch.allclose(await another.step(inputs), expected, atol=1e-5)
        assert torch.allclose(torch.cat([begun, rest], dim=1), expected, atol=1e-5)


async def test_swarm_whose_directory_is_dead_goes_on_and_heals(tiny_models: Any) -> None:
    async with open_world(tiny_models) as world:
        peers = [await world.add(f"peer{number}", span) for number, span in enumerate(HALVES)]
        client = await world.join()

        world.swarm.store.is_reachable = False
        await asyncio.sleep(10 * PERIOD_SECONDS)
        view = await client.joined.swarm.book.refresh()

        assert {peer.peer_id for peer in view.online} == {peer.peer_id for peer in peers}
        async with client.open_session() as session:
            await session.step(draw(1, 3))
        with pytest.raises(DirectoryError):
            await world.join("too early")
        world.swarm.store.is_reachable = True
        await asyncio.sleep(PERIOD_SECONDS)
        newcomer = await world.join("newcomer")
        assert newcomer.joined.swarm.book.view.is_usable(VirtualClock().wall())


@pytest.mark.parametrize("seed", range(3))
async def test_new_peer_is_used_at_once_by_a_client_that_needs_it(
    tiny_models: Any, seed: int
) -> None:
    async with open_world(tiny_models) as world:
        await world.add("first", HALVES[0])
        await world.add(f"lost{seed}", HALVES[1])
        client = await world.join()
        async with client.open_session() as session:
            await session.step(draw(1, 3))
            client.directory.is_lost = True
            world.kill(f"lost{seed}")
            waiting = asyncio.create_task(session.step(draw(2, 1)))
            await asyncio.sleep(5.0)
            assert not waiting.done()

            await world.add("new", HALVES[1])
            async with asyncio.timeout(1.0):
                await waiting


async def test_dead_peer_is_not_routed_to_by_hearsay(tiny_models: Any) -> None:
    """What nobody renews expires everywhere, however often it is told."""
    async with open_world(tiny_models) as world:
        for number, span in enumerate((WHOLE, *HALVES)):
            await world.add(f"peer{number}", span)
        client = await world.join()
        world.swarm.store.is_reachable = False

        world.kill("peer0")
        await asyncio.sleep(4 * PERIOD_SECONDS)
        view = await client.joined.swarm.book.refresh()

        assert sorted(peer.span for peer in view.online) == sorted(HALVES)


async def test_client_that_was_away_finds_back_by_what_has_expired(tiny_models: Any) -> None:
    async with open_world(tiny_models) as world:
        for number, span in enumerate(HALVES):
            await world.add(f"peer{number}", span)
        client = await world.join()
        client.directory.is_lost = True
        for host in ("peer0", "peer1"):
            world.swarm.network.partition("client", host)

        await asyncio.sleep(10 * PERIOD_SECONDS)
        records, now = client.directory.records, VirtualClock().wall()
        assert records.list_current(MODEL_ID, now) == []
        assert len(records.list_hints(MODEL_ID, now)) == 2
        for host in ("peer0", "peer1"):
            world.swarm.network.heal("client", host)

        view = await client.joined.swarm.book.refresh()

        assert sorted(peer.span for peer in view.online) == sorted(HALVES)


async def test_peers_are_asked_beside_a_directory_that_is_silent(tiny_models: Any) -> None:
    async with open_world(tiny_models) as world:
        for number, span in enumerate(HALVES):
            await world.add(f"peer{number}", span)
        client = await world.join()
        client.directory.is_silent = True
        await asyncio.sleep(1.0)  # or the view is new enough

        async with asyncio.timeout(3.0):
            view = await client.joined.swarm.book.refresh()

        assert sorted(peer.span for peer in view.online) == sorted(HALVES)


async def test_directory_that_fails_while_peers_are_asked_is_no_unread_error(
    tiny_models: Any,
) -> None:
    problems: list[str] = []
    asyncio.get_running_loop().set_exception_handler(
        lambda _, context: problems.append(context["message"])
    )
    async with open_world(tiny_models) as world:
        for number, span in enumerate(HALVES):
            await world.add(f"peer{number}", span)
            world.swarm.network.set_link(f"peer{number}", "client", Link(delay_seconds=0.1))
        client = await world.join()
        client.directory.is_silent = True
        client.directory.silent_seconds = 2.05
        await asyncio.sleep(1.0)  # or the view is new enough

        await client.joined.swarm.book.refresh()

    gc.collect()
    assert problems == []


async def test_blocked_peer_is_asked_nothing(tiny_models: Any) -> None:
    async with open_world(tiny_models) as world:
        peer = await world.add("peer0", WHOLE)
        client = await world.join(blocked_servers=[peer.peer_id])
        client.directory.is_lost = True

        await asyncio.sleep(PERIOD_SECONDS)

        with pytest.raises(DirectoryError):
            await client.joined.swarm.book.refresh()
