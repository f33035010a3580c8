"""Dialling and greeting a peer, over the loopback transport."""

from __future__ import annotations

import asyncio

import pytest
from announcements import describe_peer
from virtual_time import VirtualClock, run_virtual

from shoal.protocol.errors import SilentError
from shoal.protocol.identity import Identity
from shoal.protocol.ids import ModelId
from shoal.protocol.net.dialling import open_greeted
from shoal.protocol.net.memory.loopback import LoopbackNetwork, LoopbackTransport
from shoal.protocol.net.transport import Stream
from shoal.protocol.spans import Span

SPAN = Span(0, 4)


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
        peer = describe_peer(
            peer_id=Identity(bytes(32)).peer_id,
            model_id=ModelId("a" * 32),
            num_blocks=4,
            span=SPAN,
            endpoints=(listener.endpoint,),
            issued_at=0.0,
            expires_at=90.0,
        )
        with pytest.raises(SilentError, match="did not answer in time"):
            await open_greeted(near, VirtualClock(), peer, SPAN, 2.0)
        await asyncio.sleep(1.0)
        await near.close()
        await far.close()

    run_virtual(asyncio.wait_for(main(), 60.0))

    assert hung_up_at == [2.0]
