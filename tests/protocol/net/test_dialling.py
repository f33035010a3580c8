"""Dialling and greeting a peer, over the loopback transport."""

from __future__ import annotations

import asyncio

import pytest
from announcements import describe_peer
from virtual_time import VirtualClock, run_virtual

from shoal.protocol.endpoints import Endpoint
from shoal.protocol.errors import SilentError
from shoal.protocol.identity import Identity
from shoal.protocol.ids import ModelId
from shoal.protocol.messages.session import Welcome
from shoal.protocol.net.dialling import open_greeted
from shoal.protocol.net.memory.loopback import LoopbackNetwork, LoopbackTransport
from shoal.protocol.net.transport import Stream
from shoal.protocol.records.announcements import Announcement
from shoal.protocol.spans import Span
from shoal.protocol.wire.codec import encode_frame

SPAN = Span(0, 4)
PEER_ID = Identity(bytes(32)).peer_id
MODEL = ModelId("a" * 32)


def make_peer(*endpoints: Endpoint) -> Announcement:
    return describe_peer(
        peer_id=PEER_ID,
        model_id=MODEL,
        num_blocks=4,
        span=SPAN,
        endpoints=endpoints,
        issued_at=0.0,
        expires_at=90.0,
    )


def test_peer_that_never_answers_the_greeting_is_hung_up_on_in_time() -> None:
    hung_up_at: list[float] = []

    async def say_nothing(stream: Stream) -> None:
        while await stream.receive() is not None:
            pass
        hung_up_at.append(VirtualClock().now())

    async def main() -> None:
        network = LoopbackNetwork()
        near, far = LoopbackTransport(network, "near"), LoopbackTransport(network, "far")
        listener = await far.listen("far", 0, say_nothing)
        with pytest.raises(SilentError, match="did not answer in time"):
            await open_greeted(near, VirtualClock(), make_peer(listener.endpoint), SPAN, 2.0)
        await asyncio.sleep(1.0)
        await near.close()
        await far.close()

    run_virtual(asyncio.wait_for(main(), 60.0))

    assert hung_up_at == [2.0]


def test_silent_endpoint_leaves_time_for_the_next() -> None:
    async def welcome(stream: Stream) -> None:
        await stream.receive()
        await stream.send(encode_frame(Welcome(1, "far", PEER_ID, MODEL, SPAN, 0.0)))
        await stream.receive()

    async def main() -> None:
        network = LoopbackNetwork()
        near, far = LoopbackTransport(network, "near"), LoopbackTransport(network, "far")
        listener = await far.listen("far", 0, welcome)
        silent = Endpoint("silent", 4000, "c" * 64)
        network.partition("near", "silent")
        peer = make_peer(silent, listener.endpoint)

        stream, _ = await open_greeted(near, VirtualClock(), peer, SPAN, 2.0)

        assert VirtualClock().now() == 1.0
        await stream.close()
        await near.close()
        await far.close()

    run_virtual(asyncio.wait_for(main(), 60.0))
