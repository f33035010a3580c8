"""A peer that can be dialled, `public`, and whoever offers it streams, on virtual time."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from async_tests import Story, make_decorator
from scripted_swarm import ScriptedSwarm
from service_scene import MODEL_ID, Talk
from virtual_time import VirtualClock

from shoal.peer.pushing.connections import find_endpoints
from shoal.peer.pushing.parked_streams import ParkedStreams
from shoal.peer.pushing.push_links import PushLinks
from shoal.peer.streams.service import Service, StreamHandler
from shoal.peer.streams.stream_host import MAX_PENDING_BYTES, PendingBytes, StreamHost
from shoal.protocol.endpoints import Endpoint
from shoal.protocol.errors import RefusedError
from shoal.protocol.fair_share import Tenant
from shoal.protocol.identity import Identity
from shoal.protocol.ids import Capability, SessionId
from shoal.protocol.messages.codec import encode_frame
from shoal.protocol.messages.reverse_connections import make_offer
from shoal.protocol.messages.session import Hello, Lane, NextHop, Probe, Welcome
from shoal.protocol.net.memory.loopback import Link, LoopbackTransport
from shoal.protocol.records.announcements import Announcement
from shoal.protocol.spans import Span
from shoal.protocol.versions import MAX_VERSION

PERIOD_SECONDS = 30.0
NUM_BLOCKS = 8
PUBLIC, HOME = Identity(bytes([1]) * 32), Identity(bytes([2]) * 32)
FRAME = encode_frame(Probe(SessionId(b"s" * 16), 0))
HELLO = Hello(1, MAX_VERSION, "a test")


@dataclass
class Pusher:
    """A session that pushes, and what it hears."""

    tenant: Tenant = field(default_factory=lambda: Tenant("192.0.2.1"))
    num_bytes_left: int = 0
    num_losses: int = 0
    refusals: list[str] = field(default_factory=list)

    def pushes_to(self, following: NextHop) -> bool:
        return not self.num_losses and not self.refusals

    def note_left(self, num_bytes: int) -> None:
        self.num_bytes_left += num_bytes

    def note_lost(self, following: NextHop) -> None:
        self.num_losses += 1

    def refuse(self, following: NextHop, refusal: RefusedError) -> None:
        self.refusals.append(str(refusal))


@dataclass
class PublicPeer:
    """A peer that others can dial, with real streams and no engine."""

    identity: Identity
    handler: StreamHandler
    transport: LoopbackTransport
    links: PushLinks
    parked: ParkedStreams
    endpoint: Endpoint

    def open(self, span: Span) -> Service:
        """Serve a span from now on."""
        host = StreamHost(
            self.identity.peer_id, MODEL_ID, span, VirtualClock(), 600.0,
            PendingBytes(MAX_PENDING_BYTES), self.parked,
        )  # fmt: skip
        service = Service(host, (), 32, asyncio.Event())
        self.handler.service = service
        return service

    def push(self, following: NextHop, lane: Lane = Lane.INTERACTIVE) -> Pusher:
        """Push a frame to another peer; return who hears what becomes of it."""
        pusher = Pusher()
        self.links.push(following, lane, FRAME, pusher)
        return pusher


class ReverseScene(ScriptedSwarm):
    """The swarm, and the public peer in it."""

    public: PublicPeer

    def __init__(self) -> None:
        super().__init__(NUM_BLOCKS, Link(delay_seconds=0.01), MODEL_ID)

    def describe(self, identity: Identity, span: Span, **facts: Any) -> Announcement:
        return super().describe(identity, span, **({"max_version": MAX_VERSION} | facts))

    async def announce_public(self, span: Span, **facts: Any) -> Announcement:
        public = self.public
        return await self.announce(public.identity, span, endpoints=(public.endpoint,), **facts)

    async def dial(self, host: str = "home") -> Talk:
        """Return a stream from a host to the public peer."""
        return Talk(await self.make_transport(host).open_stream(self.public.endpoint))

    async def offer(
        self, identity: Identity = HOME, host: str = "home", is_bulk: bool = False, **changes: Any
    ) -> Talk:
        """Return a stream on which an offer was said; the answer is not heard."""
        talk = await self.dial(host)
        welcome = await talk.ask(HELLO)
        assert isinstance(welcome, Welcome)
        offer = make_offer(identity, self.public.endpoint.fingerprint, welcome.nonce, is_bulk)
        await talk.say(replace(offer, **changes))
        return talk


def name(identity: Identity = HOME, number: int = 1) -> NextHop:
    """Return a session at a peer that cannot be dialled."""
    session = SessionId(bytes([number]) * 16)
    return NextHop(identity.peer_id, (), session, 1, Capability(b"k" * 16))


def make_welcome(identity: Identity = HOME) -> Welcome:
    return Welcome(MAX_VERSION, "home", identity.peer_id, MODEL_ID, Span(4, 8), 0.0)


async def run_in_scene(story: Story) -> None:
    """Run a story; in the end nothing is left of any stream."""
    scene, handler = ReverseScene(), StreamHandler()
    transport = scene.make_transport("public")
    endpoint = (await transport.listen("public", 0, handler.serve)).endpoint

    parked = ParkedStreams(endpoint.fingerprint)
    links = PushLinks(
        transport,
        partial(find_endpoints, scene.directory, MODEL_ID),
        VirtualClock(),
        handler.counts.note_pushed,
        parked,
    )
    public = PublicPeer(PUBLIC, handler, transport, links, parked, endpoint)
    scene.public = public
    public.open(Span(0, 4))
    await scene.announce_public(Span(0, 4))
    await story(scene)
    await links.close()
    await scene.close()
    assert asyncio.all_tasks() == {asyncio.current_task()}


in_scene = make_decorator(run_in_scene)
