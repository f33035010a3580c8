"""One hop on the wire: a scripted peer on a loopback network and virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

from announcements import describe_peer
from async_tests import make_decorator
from virtual_time import VirtualClock

from shoal.client.routing.route import Hop
from shoal.client.session.hop_link import HopLink
from shoal.protocol.endpoints import Endpoint
from shoal.protocol.errors import ErrorCode
from shoal.protocol.identity import Identity
from shoal.protocol.ids import CAPABILITY_BYTES, Capability, ClientToken, ModelId, PeerId, SessionId
from shoal.protocol.messages.codec import decode_frame, encode_frame
from shoal.protocol.messages.fields import Message
from shoal.protocol.messages.session import (
    BULK_FRAME_BYTES,
    Attach,
    Close,
    Declined,
    Hello,
    Open,
    Opened,
    Output,
    Step,
    Welcome,
)
from shoal.protocol.net.memory.loopback import Link, LoopbackNetwork, LoopbackTransport
from shoal.protocol.net.transport import Stream
from shoal.protocol.records.announcements import Announcement
from shoal.protocol.spans import Span
from shoal.protocol.tensors import WireDtype, WireTensor

MODEL_ID = ModelId("a" * 32)
PEER_ID = Identity(bytes(32)).peer_id
OTHER_ID = Identity(bytes([1]) * 32).peer_id
SESSION, OTHER_SESSION = SessionId(b"s" * 16), SessionId(b"t" * 16)
SPAN = Span(0, 4)
WIDTH = 32
CLIENT = ClientToken(b"c" * 16)
OPEN = Open(SESSION, 3, MODEL_ID, Span(0, 9), 1, 100, WireDtype.FP32)
IN_CHAIN = replace(OPEN, capability=Capability(b"k" * CAPABILITY_BYTES))
TIMEOUT = 5.0

Answer = Message | bytes | None
Script = Callable[[Message], Answer]


def answer_honestly(message: Message) -> Answer:
    """Greet, open, and answer every step with its own input."""
    if isinstance(message, Hello):
        return Welcome(1, "scripted", PEER_ID, MODEL_ID, SPAN, 0.0)
    if isinstance(message, Open):
        return Opened(message.session, message.epoch, 0.25, 77)
    if isinstance(message, Step):
        return Output(message.session, message.epoch, message.sequence, 0, message.hidden)
    return None


def make_step(num_tokens: int = 1) -> Step:
    hidden = WireTensor(WireDtype.FP32, 1, num_tokens, WIDTH, bytes(4 * num_tokens * WIDTH))
    return Step(SESSION, 3, 1, 0, hidden)


def make_bulk_step() -> Step:
    """Return a step that is too large for the first stream."""
    return make_step(BULK_FRAME_BYTES // (4 * WIDTH) + 1)


@dataclass
class HopScene:
    """A scripted peer, the network to it, and everything that it heard."""

    network: LoopbackNetwork
    transport: LoopbackTransport
    endpoint: Endpoint
    script: Script = answer_honestly
    heard: list[list[Message]] = field(default_factory=list)

    async def serve(self, stream: Stream) -> None:
        heard: list[Message] = []
        self.heard.append(heard)
        while (frame := await stream.receive()) is not None:
            message = decode_frame(frame)
            heard.append(message)
            answer = self.script(message)
            if answer is None and not isinstance(message, Attach | Close):
                return  # hang up
            if isinstance(answer, bytes):
                await stream.send(answer)
            elif answer is not None:
                await stream.send(encode_frame(answer))

    def make_hop(self, *endpoints: Endpoint, peer_id: PeerId = PEER_ID) -> Hop:
        return Hop(make_announcement(endpoints or (self.endpoint,), peer_id), SPAN)

    async def open(self, hop: Hop | None = None, opening: Open = OPEN) -> tuple[HopLink, float]:
        return await HopLink.open(
            self.transport, VirtualClock(), hop or self.make_hop(), opening, CLIENT, TIMEOUT
        )


def make_announcement(endpoints: tuple[Endpoint, ...], peer_id: PeerId = PEER_ID) -> Announcement:
    return describe_peer(
        peer_id=peer_id,
        model_id=MODEL_ID,
        num_blocks=9,
        span=SPAN,
        endpoints=endpoints,
        weights="fp32",
        issued_at=1.0,
        expires_at=2.0,
    )


async def run(test: Callable[[HopScene], Awaitable[None]], link: Link | None = None) -> None:
    """Run a test; whatever it did, no stream may be left open when it ends."""
    network = LoopbackNetwork(link=link)
    server = LoopbackTransport(network, "peer")
    transport = LoopbackTransport(network, "client")
    scene = HopScene(network, transport, Endpoint("peer", 1))
    listener = await server.listen("peer", 0, scene.serve)
    scene.endpoint = listener.endpoint
    await test(scene)
    await asyncio.sleep(60)
    assert repr(network).startswith("LoopbackNetwork(streams=0,"), network
    await server.close()
    assert asyncio.all_tasks() == {asyncio.current_task()}


in_scene = make_decorator(run)


def change(kind: type[Message], answer: Callable[[Any], Answer]) -> Script:
    """Return a script that is honest but for one kind of message."""
    return lambda message: answer(message) if type(message) is kind else answer_honestly(message)


def decline(code: ErrorCode, session: SessionId | None = SESSION) -> Callable[[Any], Answer]:
    return lambda _: Declined(session, 0, code, "no", None)


WELCOME = Welcome(1, "scripted", PEER_ID, MODEL_ID, SPAN, 0.0)
