"""Streams that come while a peer has nothing to serve: each is told to come again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, cast

from service_scene import HELLO, Talk, assert_declined
from virtual_time import run_virtual

from shoal.peer.streams.service import Service, StreamHandler
from shoal.protocol.errors import ErrorCode
from shoal.protocol.net.memory.loopback import LoopbackNetwork, LoopbackTransport
from shoal.protocol.net.transport import Listener, Stream


class EchoService:
    """Sends back what it hears."""

    async def serve(self, stream: Stream, first_frame: bytes | None = None) -> None:
        assert first_frame is None
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


def test_stream_is_told_to_come_again_and_served_then() -> None:
    async def test(scene: Scene) -> None:
        talk, service = await scene.dial(), EchoService()
        assert assert_declined(await talk.hear(), ErrorCode.BUSY).retry_after_seconds
        await talk.stream.close()

        scene.handler.service = cast(Service, service)
        talk = await scene.dial()

        assert await talk.hear() == HELLO
        await talk.stream.close()
        assert await scene.is_idle()

    run(test)
