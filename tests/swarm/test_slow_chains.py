"""Hops of a chain that stand still, and others that are only slow, on virtual time.

Virtual, so that what is measured is the client's own patience and no machine's speed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest
from virtual_swarm import Scene, draw

from shoal.client.config import ClientConfig
from shoal.client.session import RemoteSession
from shoal.peer.service import Service
from shoal.protocol.net.clock import VirtualClock, run_virtual
from shoal.protocol.net.loopback import Link, LoopbackTransport
from shoal.protocol.spans import Span

LINK = Link(delay_seconds=0.002)
SPANS = (Span(0, 1), Span(1, 3), Span(3, 4))
NOTICED_SECONDS = 2.0
SHORT_OF_THE_FLOOR = 0.9
"""A busy machine has a peer stand still for so long; it is not to be replaced for that."""


class World:
    """Three hops with a replica each, and one session in a chain over them."""

    def __init__(self, scene: Scene, session: RemoteSession, services: dict[str, Service]) -> None:
        self.network = scene.network
        self.session = session
        self.services = services

    def host_of(self, index: int) -> str:
        peer_id = self.session.hops[index].peer.peer_id
        return next(h for h, s in self.services.items() if s.facts.peer_id == peer_id)

    async def generate(self, num_tokens: int) -> None:
        for number in range(num_tokens):
            await self.session.step(draw(number, 1), is_decoded=True)

    async def time_token(self) -> float:
        """Return how long a token takes."""
        asked_at = VirtualClock().now()
        await self.generate(1)
        return VirtualClock().now() - asked_at


def run(directory: Any, story: Callable[[World], Awaitable[None]], delivery: str = "chain") -> None:
    async def main() -> None:
        scene = Scene(str(directory), ClientConfig(seed=0, delivery=delivery), LINK)
        async with AsyncExitStack() as stack:
            services = {
                f"peer{number}": await stack.enter_async_context(
                    scene.serve(f"peer{number}", SPANS[number // 2])
                )
                for number in range(2 * len(SPANS))
            }
            transport = LoopbackTransport(scene.network, "client")
            stack.push_async_callback(transport.close)
            session = await scene.open_session(transport)
            stack.push_async_callback(session.close)
            await session.step(draw(0, 5))
            await story(World(scene, session, services))
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run_virtual(main())


def delay_steps(service: Service, seconds: float) -> None:
    """Have a peer answer its next steps so much later; it goes on to hear what is said."""
    compute: Any = service.compute
    submit = compute.submit

    def submit_later(work: Any, holder: Any) -> asyncio.Future[Any]:
        async def wait() -> Any:
            await asyncio.sleep(seconds)
            return await submit(work, holder)

        return asyncio.ensure_future(wait())

    compute.submit = submit_later


@pytest.mark.parametrize("index", [0, 1, 2])
def test_hop_that_stands_still_is_replaced_in_less_than_two_seconds(
    tiny_models: Any, index: int
) -> None:
    async def story(world: World) -> None:
        await world.generate(3)
        host = world.host_of(index)

        world.network.pause(host)
        seconds = await world.time_token()

        assert SHORT_OF_THE_FLOOR < seconds < NOTICED_SECONDS
        (failover,) = world.session.failovers
        assert failover.lost.span == SPANS[index]
        assert world.host_of(index) != host

    run(tiny_models.get().directory, story)


@pytest.mark.parametrize("index", [0, 1, 2])
def test_time_that_a_failover_took_is_no_hops_own(tiny_models: Any, index: int) -> None:
    """Or else the hops that are left would be given many times as long from then on."""

    async def story(world: World) -> None:
        await world.generate(3)
        world.network.pause(world.host_of((index + 1) % 3))
        await world.generate(3)

        world.network.pause(world.host_of(index))
        seconds = await world.time_token()

        assert seconds < NOTICED_SECONDS
        assert len(world.session.failovers) == 2

    run(tiny_models.get().directory, story)


@pytest.mark.parametrize("index", [0, 1, 2])
def test_hop_that_stands_still_for_a_moment_is_kept(tiny_models: Any, index: int) -> None:
    async def story(world: World) -> None:
        await world.generate(3)
        host = world.host_of(index)

        for _ in range(3):
            world.network.pause(host)
            loop = asyncio.get_running_loop()
            loop.call_later(SHORT_OF_THE_FLOOR, world.network.resume, host)
            assert await world.time_token() >= SHORT_OF_THE_FLOOR

        assert world.session.failovers == []
        assert world.host_of(index) == host

    run(tiny_models.get().directory, story)


@pytest.mark.parametrize("delivery", ["star", "chain"])
@pytest.mark.parametrize("index", [0, 1, 2])
def test_hop_that_lives_and_computes_is_given_its_whole_time(
    tiny_models: Any, index: int, delivery: str
) -> None:
    """A chain is as patient as a star: being asked how far it is costs a slow hop nothing."""

    async def story(world: World) -> None:
        await world.generate(3)

        delay_steps(world.services[world.host_of(index)], SHORT_OF_THE_FLOOR)
        await world.generate(3)

        assert world.session.failovers == []

    run(tiny_models.get().directory, story, delivery)


@pytest.mark.parametrize("index", [0, 1, 2])
def test_client_that_stood_still_itself_blames_nobody(tiny_models: Any, index: int) -> None:
    async def story(world: World) -> None:
        await world.generate(3)
        loop = asyncio.get_running_loop()

        for seconds in (0.05, 0.3, 1.05):  # before it asks, while it asks, and behind
            world.network.pause(world.host_of(index))
            loop.call_later(seconds, VirtualClock().stall, 5.0)
            loop.call_later(seconds, world.network.resume, world.host_of(index))
            await world.time_token()

        assert world.session.failovers == []

    run(tiny_models.get().directory, story)
