"""A route of three hops with a replica each, on virtual time, where nobody's speed is measured."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from functools import partial
from typing import Any

from memory_swarm import Inside
from virtual_swarm import RelayedTransport, VirtualSwarm, draw, run_scene
from virtual_time import VirtualClock

from shoal.client.session.session import RemoteSession
from shoal.client.settings.client_config import ClientConfig
from shoal.protocol.net.memory.loopback import Link
from shoal.protocol.spans import Span

LINK = Link(delay_seconds=0.002)
PARKING_SECONDS = 10.0
CLIENT = b"the only client."
SPANS = (Span(0, 1), Span(1, 3), Span(3, 4))


class RouteWorld:
    """Three hops with a replica each, and one session in a chain over them."""

    open_session: Callable[[], Awaitable[RemoteSession]]
    """Returns another one of the same client, which has not begun and is to be closed."""

    def __init__(
        self, scene: VirtualSwarm, session: RemoteSession, services: dict[str, Inside]
    ) -> None:
        self.network = scene.network
        self.session = session
        self.services = services

    def host_of(self, index: int) -> str:
        peer_id = self.session.hops[index].peer.peer_id
        return next(h for h, s in self.services.items() if s.peer_id == peer_id)

    async def generate(self, num_tokens: int) -> None:
        for number in range(num_tokens):
            await self.session.step(draw(number, 1), is_decoded=True)

    async def time_token(self) -> float:
        """Return how long a token takes."""
        asked_at = VirtualClock().now()
        await self.generate(1)
        return VirtualClock().now() - asked_at


def run(
    directory: Any,
    story: Callable[[RouteWorld], Awaitable[None]],
    delivery: str = "chain",
    relayed: Collection[int] = (),
    **settings: Any,
) -> None:
    """Run a story; hops whose numbers are in `relayed` cannot be dialled, nor their replicas."""

    async def main(scene: VirtualSwarm) -> None:
        services: dict[str, Inside] = {}
        for number in range(2 * len(SPANS)):
            hop, host = number // 2, f"peer{number}"
            services[host] = await scene.add(host, SPANS[hop], is_relayed=hop in relayed)
        await asyncio.sleep(PARKING_SECONDS if relayed else 0.0)
        transport = RelayedTransport(scene.network, "client")
        scene.stack.push_async_callback(transport.close)
        open_session = partial(scene.open_session, transport, 512, CLIENT)
        session = await open_session()
        scene.stack.push_async_callback(session.close)
        await session.step(draw(0, 5))
        world = RouteWorld(scene, session, services)
        world.open_session = open_session
        await story(world)

    run_scene(directory, ClientConfig(seed=0, delivery=delivery, **settings), main, LINK)


def delay_steps(service: Inside, seconds: float) -> None:
    """Have a peer take so long for each step, one after the other; it hears what is said."""
    compute: Any = service.compute
    submit, computing = compute.submit, asyncio.Lock()

    def submit_later(work: Any, tenant: Any) -> asyncio.Future[Any]:
        async def wait() -> Any:
            async with computing:
                await asyncio.sleep(seconds)
                return await submit(work, tenant)

        return asyncio.ensure_future(wait())

    compute.submit = submit_later
