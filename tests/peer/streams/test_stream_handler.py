"""Streams that come while a peer has nothing to serve: none of them waits for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from service_scene import HELLO, Talk, assert_declined
from virtual_time import VirtualClock, run_virtual

from shoal.peer.streams.service import StreamHandler
from shoal.protocol.errors import ErrorCode
from shoal.protocol.net.memory.loopback import LoopbackNetwork, LoopbackTransport
from shoal.protocol.net.transport import Listener, Stream

LONG_SECONDS = 60.0


class EchoService:
    """Sends back what it hears."""

    async def serve(self, stream: Stream) -> None:
        while (frame := await stream.receive()) is not None:
            await stream.send(frame)


@dataclass
class Scene:
    """A handler for which nothing is served, a client, and what is running when nobody waits."""

    handler: StreamHandler
    listener: Listener
    client: LoopbackTransport
    idle: set[Any]

    async def dial(self) -> Talk:
        talk = Talk(await self.client.open_stream(self.listener.endpoint))
        await talk.say(HELLO)
        await asyncio.sleep(0.1)
        return talk

    async def is_idle(self) -> bool:
        """Return whether nothing is left of any stream."""
        await asyncio.sleep(0.1)
        return asyncio.all_tasks() == self.idle


def run(test: Callable[[Scene], Awaitable[None]]) -> None:
    async def main() -> None:
        network = LoopbackNetwork()
        server, client = (LoopbackTransport(network, name) for name in ("peer", "client"))
        handler = StreamHandler()
        listener = await server.listen("peer", 0, handler.serve)
        await test(Scene(handler, listener, client, asyncio.all_tasks()))
        await client.close()
        await server.close()

    run_virtual(main())


def test_stream_waits_for_a_service_that_comes_soon() -> None:
    async def test(scene: Scene) -> None:
        talk = await scene.dial()
        service: Any = EchoService()

        scene.handler.open(service)

        assert await talk.hear() == HELLO
        await talk.stream.close()
        assert await scene.is_idle()

    run(test)


def test_nothing_is_left_of_a_client_that_vanished() -> None:
    async def test(scene: Scene) -> None:
        await scene.dial()

        await scene.client.close()

        assert await scene.is_idle()

    run(test)


def test_nothing_is_left_once_the_listener_closes() -> None:
    async def test(scene: Scene) -> None:
        talk = await scene.dial()
        began_at = VirtualClock().now()

        await scene.listener.close()
        await talk.stream.close()

        assert await scene.is_idle()
        assert VirtualClock().now() - began_at < 1.0

    run(test)


def test_who_waits_for_long_is_told_to_come_again() -> None:
    async def test(scene: Scene) -> None:
        talk = await scene.dial()

        async with asyncio.timeout(LONG_SECONDS):
            answer = await talk.hear()

        assert assert_declined(answer, ErrorCode.BUSY).retry_after_seconds
        await talk.stream.close()
        assert await scene.is_idle()

    run(test)


def test_nothing_is_left_of_a_client_that_hung_up_in_good_order() -> None:
    async def test(scene: Scene) -> None:
        talk = await scene.dial()

        await talk.stream.close()
        await asyncio.sleep(LONG_SECONDS)

        assert await scene.is_idle()

    run(test)
