"""A peer that can be dialled, `public`, and whoever offers it streams, on virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

from announcements import describe_peer
from service_scene import MODEL_ID, Talk

from shoal.peer.accounts.shared_bytes import SharedBytes
from shoal.peer.pushing.neighbours import Neighbours
from shoal.peer.pushing.parked_streams import ParkedStreams
from shoal.peer.streams.conversation import StreamHost
from shoal.peer.streams.service import MAX_PENDING_BYTES, Service
from shoal.peer.streams.stream_handler import StreamHandler
from shoal.protocol.endpoints import Endpoint
from shoal.protocol.errors import ShoalError
from shoal.protocol.fair_share import Holder
from shoal.protocol.identity import Identity
from shoal.protocol.ids import Capability, SessionId
from shoal.protocol.messages.offers import make_offer
from shoal.protocol.messages.session import Hello, Lane, NextHop, Probe, Welcome
from shoal.protocol.net.clock import VirtualClock, run_virtual
from shoal.protocol.net.memory.loopback import Link, LoopbackNetwork, LoopbackTransport
from shoal.protocol.net.memory.memory_directory import MemoryDirectory, MemoryDirectoryStore
from shoal.protocol.records.announcements import Announcement, sign_announcement
from shoal.protocol.spans import Span
from shoal.protocol.versions import MAX_VERSION
from shoal.protocol.wire.codec import encode_frame

PERIOD_SECONDS = 30.0
NUM_BLOCKS = 8
PUBLIC, HOME = Identity(bytes([1]) * 32), Identity(bytes([2]) * 32)
FRAME = encode_frame(Probe(SessionId(b"s" * 16), 0))
HELLO = Hello(1, MAX_VERSION, "a test")


@dataclass
class Pusher:
    """A session that pushes, and what it hears."""

    holder: Holder = field(default_factory=lambda: Holder("192.0.2.1"))
    num_bytes_left: int = 0
    losses: list[str] = field(default_factory=list)

    def pushes_to(self, following: NextHop) -> bool:
        return not self.losses

    def note_left(self, num_bytes: int) -> None:
        self.num_bytes_left += num_bytes

    def note_lost(self, following: NextHop, error: ShoalError) -> None:
        self.losses.append(str(error))


@dataclass
class PublicPeer:
    """A peer that others can dial, with real streams and no engine."""

    identity: Identity
    handler: StreamHandler
    transport: LoopbackTransport
    neighbours: Neighbours
    parked: ParkedStreams
    endpoint: Endpoint
    num_looks: int = 0
    may_look: asyncio.Event = field(default_factory=asyncio.Event)

    def open(self, span: Span) -> Service:
        """Serve a span from now on."""
        host = StreamHost(
            self.identity.peer_id, MODEL_ID, span, VirtualClock(), 600.0,
            SharedBytes(MAX_PENDING_BYTES), self.parked,
        )  # fmt: skip
        service = Service(host, (), 32, asyncio.Event())
        self.handler.open(service)
        return service

    def push(self, following: NextHop, lane: Lane = Lane.INTERACTIVE) -> Pusher:
        """Push a frame to another peer; return who hears what becomes of it."""
        pusher = Pusher()
        self.neighbours.push(following, lane, FRAME, pusher)
        return pusher


@dataclass
class Scene:
    """The network, the directory, and the public peer."""

    network: LoopbackNetwork
    store: MemoryDirectoryStore
    public: PublicPeer
    transports: list[LoopbackTransport] = field(default_factory=list)

    @property
    def directory(self) -> MemoryDirectory:
        return MemoryDirectory(self.store, VirtualClock())

    def describe(self, identity: Identity, span: Span, **facts: Any) -> Announcement:
        now = VirtualClock().wall()
        usual: dict[str, Any] = {"max_version": MAX_VERSION, "sequence": int(1000 * now)}
        return describe_peer(
            peer_id=identity.peer_id,
            model_id=MODEL_ID,
            num_blocks=NUM_BLOCKS,
            span=span,
            issued_at=now,
            expires_at=now + 600,
            **(usual | facts),
        )

    async def announce(self, identity: Identity, span: Span, **facts: Any) -> Announcement:
        """Have a peer say what it is, which it does not say again."""
        announcement = self.describe(identity, span, **facts)
        await self.directory.announce(sign_announcement(identity, announcement))
        return announcement

    async def announce_public(self, span: Span, **facts: Any) -> Announcement:
        public = self.public
        return await self.announce(public.identity, span, endpoints=(public.endpoint,), **facts)

    def make_transport(self, host: str) -> LoopbackTransport:
        self.transports.append(LoopbackTransport(self.network, host))
        return self.transports[-1]

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


def in_scene(story: Callable[[Scene], Awaitable[None]]) -> None:
    """Run a story; in the end nothing is left of any stream."""

    async def main() -> None:
        network = LoopbackNetwork(link=Link(delay_seconds=0.01))
        store = MemoryDirectoryStore()
        transport, handler = LoopbackTransport(network, "public"), StreamHandler()
        listener = await transport.listen("public", 0, handler.serve)
        directory = MemoryDirectory(store, VirtualClock())

        async def look() -> list[Announcement]:
            public.num_looks += 1
            await public.may_look.wait()
            return await directory.lookup(MODEL_ID)

        fingerprint = listener.endpoint.fingerprint
        parked = ParkedStreams(fingerprint, look, VirtualClock(), PERIOD_SECONDS)
        neighbours = Neighbours(transport, VirtualClock(), parked=parked)
        public = PublicPeer(PUBLIC, handler, transport, neighbours, parked, listener.endpoint)
        public.may_look.set()
        scene = Scene(network, store, public)
        public.open(Span(0, 4))
        await scene.announce_public(Span(0, 4))
        await story(scene)
        for opened in scene.transports:
            await opened.close()
        await neighbours.close()
        await listener.close()
        await transport.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run_virtual(main())
