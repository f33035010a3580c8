"""A peer's connections to other peers, with senders whose frames are made up."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial

import pytest
from announcements import announce_scripted
from async_tests import Story, make_decorator
from reverse_scene import Pusher
from service_scene import MODEL_ID, SPAN
from virtual_time import VirtualClock

from shoal.peer.pushing.connections import find_endpoints
from shoal.peer.pushing.push_links import PushLinks
from shoal.peer.streams.stream_host import ServiceCounts
from shoal.protocol.endpoints import Endpoint
from shoal.protocol.errors import ErrorCode
from shoal.protocol.fair_share import Tenant
from shoal.protocol.identity import Identity
from shoal.protocol.ids import Capability, SessionId
from shoal.protocol.limits import MAX_PIECE_BYTES
from shoal.protocol.messages.codec import decode_frame, encode_frame
from shoal.protocol.messages.session import Attach, Declined, Hello, Lane, NextHop, Probe, Welcome
from shoal.protocol.net.memory.loopback import (
    WINDOW_BYTES,
    Link,
    LoopbackNetwork,
    LoopbackTransport,
)
from shoal.protocol.net.memory.memory_directory import MemoryDirectory, MemoryDirectoryStore
from shoal.protocol.net.transport import Stream

NEXT = Identity(bytes([9]) * 32)
NEXT_ID = NEXT.peer_id
KEY = Capability(b"k" * 16)
DELAY_SECONDS = 0.02


@dataclass
class Scene:
    """PushLinks of a host `me`, and a peer on the host `next` that hears what they push."""

    network: LoopbackNetwork
    transport: LoopbackTransport
    links: PushLinks
    endpoint: Endpoint
    store: MemoryDirectoryStore
    directory: MemoryDirectory
    counts: ServiceCounts
    heard: list[bytes] = field(default_factory=list)
    declines: bool = False
    last_word: bytes = b""
    streams: list[Stream] = field(default_factory=list)

    async def serve(self, stream: Stream) -> None:
        self.streams.append(stream)
        while (frame := await stream.receive()) is not None:
            message = decode_frame(frame)
            if isinstance(message, Hello):
                welcome = Welcome(2, "next", NEXT_ID, MODEL_ID, SPAN, 0.0)
                await stream.send(encode_frame(welcome))
                if self.last_word:
                    await stream.send(self.last_word)
            elif not isinstance(message, Attach):
                self.heard.append(frame)
            elif self.declines:
                no = Declined(message.session, 0, ErrorCode.UNKNOWN_SESSION, "no")
                await stream.send(encode_frame(no))

    async def announce(self, *endpoints: Endpoint, number: int = 9, sequence: int = 1) -> Identity:
        """Announce a peer at these endpoints, or anew."""
        identity = Identity(bytes([number]) * 32)
        await announce_scripted(
            self.directory, VirtualClock(), identity, endpoints[0], endpoints=endpoints,
            sequence=sequence,
        )  # fmt: skip
        return identity

    def name(self, number: int = 1) -> NextHop:
        return NextHop(NEXT_ID, (self.endpoint,), SessionId(bytes([number]) * 16), 1, KEY)


def make_frame(number: int = 0) -> bytes:
    return encode_frame(Probe(SessionId(b"s" * 16), number))


@pytest.fixture
def no_garbage_collection() -> Iterator[None]:
    """Whatever refers to itself stays in memory."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


async def run(story: Story) -> None:
    """Run a story on virtual time; whoever was dialled is hung up on at its end."""
    network = LoopbackNetwork(link=Link(delay_seconds=DELAY_SECONDS))
    transport = LoopbackTransport(network, "me")
    far = LoopbackTransport(network, "next")
    store = MemoryDirectoryStore()
    directory = MemoryDirectory(store, VirtualClock())
    counts = ServiceCounts()
    links = PushLinks(
        transport, partial(find_endpoints, directory, MODEL_ID), VirtualClock(), counts.note_pushed
    )
    scene = Scene(
        network, transport, links, Endpoint("next", 1, "a" * 64), store, directory, counts
    )
    scene.endpoint = (await far.listen("next", 0, scene.serve)).endpoint
    await scene.announce(scene.endpoint)
    await story(scene)
    await links.close()
    await transport.close()
    await far.close()
    assert asyncio.all_tasks() == {asyncio.current_task()}


in_scene = make_decorator(run)


# ---- dials


GREEDY, HONEST = Tenant("203.0.113.1"), Tenant("192.0.2.1")


async def ask_for_black_holes(scene: Scene, num_dials: int = 100) -> None:
    """Have an address ask for connections that nobody answers, as many as it gets."""
    scene.network.pause("black-hole")
    for number in range(num_dials):
        hole = await scene.announce(Endpoint("black-hole", 1, "a" * 64), number=100 + number)
        following = replace(scene.name(), peer_id=hole.peer_id)
        scene.links.push(following, Lane.INTERACTIVE, make_frame(), Pusher(GREEDY))


@in_scene()
async def test_address_that_has_black_holes_dialled_leaves_dials_to_others(scene: Scene) -> None:
    await ask_for_black_holes(scene)
    session = Pusher(HONEST)

    scene.links.push(scene.name(), Lane.INTERACTIVE, make_frame(), session)
    await asyncio.sleep(1)

    assert scene.heard == [make_frame()]
    await asyncio.sleep(60)


@in_scene()
async def test_peer_that_many_made_up_announcements_name_is_dialled_as_often_as_one_may_be(
    scene: Scene,
) -> None:
    """Its TLS key is right, so no dial fails before the greeting."""
    for number in range(100):
        made_up = await scene.announce(scene.endpoint, number=100 + number)
        following = replace(scene.name(), peer_id=made_up.peer_id)
        scene.links.push(following, Lane.INTERACTIVE, make_frame(), Pusher(GREEDY))
    await asyncio.sleep(1)
    assert len(scene.streams) == 18

    scene.links.push(scene.name(), Lane.INTERACTIVE, make_frame(), Pusher(HONEST))
    await asyncio.sleep(1)
    assert scene.heard == [make_frame()]
    assert len(scene.streams) == 19


@in_scene()
async def test_peer_is_dialled_where_it_announces_itself_and_nowhere_else(scene: Scene) -> None:
    """Where a client says it is, somebody listens who has not asked to be dialled."""
    bystander = LoopbackTransport(scene.network, "bystander")
    num_dials = 0

    async def count(stream: Stream) -> None:
        nonlocal num_dials
        num_dials += 1

    elsewhere = (await bystander.listen("bystander", 0, count)).endpoint
    known, unknown = Pusher(), Pusher()
    scene.links.push(
        replace(scene.name(), endpoints=(elsewhere,)), Lane.INTERACTIVE, make_frame(), known
    )
    nobody = Identity(bytes([7]) * 32).peer_id
    scene.links.push(
        replace(scene.name(2), peer_id=nobody, endpoints=(elsewhere,)),
        Lane.INTERACTIVE, make_frame(), unknown,
    )  # fmt: skip
    await asyncio.sleep(1)

    assert scene.heard == [make_frame()]
    assert scene.counts.sent_bytes == {"pushes": len(make_frame())}
    assert known.num_losses == 0
    assert unknown.num_losses == 1
    assert num_dials == 0
    await bystander.close()


@in_scene()
async def test_peer_that_came_back_elsewhere_is_looked_up(scene: Scene) -> None:
    before, after = Endpoint("next", 1, "a" * 64), scene.endpoint
    other = MemoryDirectory(scene.store, VirtualClock())
    await scene.announce(before, sequence=2)
    await scene.directory.lookup(MODEL_ID)
    await announce_scripted(other, VirtualClock(), NEXT, after, sequence=3)
    session = Pusher()

    scene.links.push(scene.name(), Lane.INTERACTIVE, make_frame(), session)
    await asyncio.sleep(1)

    assert (scene.heard, session.num_losses) == ([make_frame()], 0)


@in_scene()
async def test_two_endpoints_of_a_peer_are_tried(scene: Scene) -> None:
    tried: list[Endpoint] = []
    open_stream = scene.transport.open_stream

    async def count(endpoint: Endpoint, timeout_seconds: float) -> Stream:
        tried.append(endpoint)
        return await open_stream(endpoint, timeout_seconds)

    scene.transport.open_stream = count  # type: ignore[method-assign]
    key = scene.endpoint.fingerprint
    nowhere = [Endpoint("nobody", 1 + number, key) for number in range(8)]
    many = await scene.announce(*nowhere, number=7)
    scene.links.prepare(replace(scene.name(), peer_id=many.peer_id), Pusher())
    await asyncio.sleep(0.5)
    assert tried == nowhere[:2]

    await scene.announce(nowhere[0], scene.endpoint, sequence=2)
    scene.links.push(scene.name(), Lane.INTERACTIVE, make_frame(), Pusher())
    await asyncio.sleep(0.5)
    assert scene.heard == [make_frame()]


# ---- endings


@in_scene()
async def test_step_that_comes_while_an_idle_connection_closes_is_pushed_over_a_new_one(
    scene: Scene,
) -> None:
    session = Pusher()
    open_stream = scene.transport.open_stream

    async def open_one_that_closes_late(endpoint: Endpoint, timeout_seconds: float) -> Stream:
        stream = await open_stream(endpoint, timeout_seconds)
        close = stream.close

        async def push_and_close() -> None:
            scene.transport.open_stream = open_stream  # type: ignore[method-assign]
            scene.links.push(scene.name(), Lane.INTERACTIVE, make_frame(), session)
            await close()

        stream.close = push_and_close  # type: ignore[method-assign]
        return stream

    scene.transport.open_stream = open_one_that_closes_late  # type: ignore[method-assign]
    scene.links.prepare(scene.name(), session)
    await asyncio.sleep(15)

    assert len(scene.streams) == 2
    assert session.num_losses == 0
    assert scene.heard == [make_frame()]


@in_scene()
async def test_nobody_is_dialled_once_all_were_hung_up_on(scene: Scene) -> None:
    before, after = Pusher(), Pusher()
    scene.links.push(scene.name(), Lane.INTERACTIVE, make_frame(), before)
    await asyncio.sleep(1)

    await scene.links.close()
    scene.links.push(scene.name(), Lane.INTERACTIVE, make_frame(), after)
    await asyncio.sleep(1)

    assert len(scene.streams) == 1
    assert (before.num_losses, after.num_losses) == (1, 1)
    assert after.num_bytes_left == len(make_frame())


# ---- what next hops say


@pytest.mark.parametrize("how", ["breaks", "says what was not asked", "reads nothing"])
@in_scene()
async def test_link_that_is_lost_leaves_nothing_in_memory(
    scene: Scene, how: str, no_garbage_collection: None
) -> None:
    scene.links.prepare(scene.name(), Pusher())
    await asyncio.sleep(1)
    scene.network.set_link("me", "next", Link(bandwidth_bytes_per_second=1.0))
    session = Pusher()
    is_in_memory = weakref.ref(session)
    for _ in range(3):  # one is on its way, one is being sent, one waits
        scene.links.push(scene.name(), Lane.INTERACTIVE, bytes(WINDOW_BYTES), session)
    del session
    await asyncio.sleep(1)
    assert is_in_memory()

    if how == "breaks":
        scene.network.kill("next")
    elif how == "says what was not asked":
        await scene.streams[0].send(make_frame())
    await asyncio.sleep(60)

    assert not is_in_memory()


@in_scene()
async def test_link_that_sends_a_large_frame_is_hung_up_on(scene: Scene) -> None:
    """Before anything of it is kept: that would be in no account."""

    scene.last_word = bytes(MAX_PIECE_BYTES + 1)
    session = Pusher()

    scene.links.push(scene.name(), Lane.INTERACTIVE, make_frame(), session)
    await asyncio.sleep(1)

    assert session.num_losses == 1


# ---- turns


async def push_beside_fifty_frames(scene: Scene, is_replay: bool) -> int:
    """Push two frames behind fifty of another client; return how many came before the last one."""
    lane = Lane.BULK if is_replay else Lane.INTERACTIVE
    greedy, honest = Pusher(GREEDY), Pusher(HONEST)
    if is_replay:
        frames = [make_frame(number) for number in range(50)]
        scene.links.replay(scene.name(1), frames, 50, greedy)
    else:
        for number in range(50):
            scene.links.push(scene.name(1), lane, make_frame(number), greedy)
    for number in (50, 51):
        scene.links.push(scene.name(2), lane, make_frame(number), honest)
    await asyncio.sleep(5)

    for numbers in (range(50), (50, 51)):
        sent = [make_frame(number) for number in numbers]
        assert [frame for frame in scene.heard if frame in sent] == sent
    assert (greedy.num_losses, honest.num_losses) == (0, 0)
    return scene.heard.index(make_frame(51))


@pytest.mark.parametrize("is_replay", [False, True], ids=["steps", "a replay"])
@in_scene()
async def test_client_that_pushes_much_delays_others_by_a_frame_for_each_of_theirs(
    scene: Scene, is_replay: bool
) -> None:
    assert await push_beside_fifty_frames(scene, is_replay) == 3


# ---- replays


@in_scene()
async def test_frames_of_a_replay_are_made_one_by_one_and_the_loop_goes_on_between_them(
    scene: Scene,
) -> None:
    session, order = Pusher(), list[str]()
    loop = asyncio.get_running_loop()

    def make_frames() -> Iterator[bytes]:
        for number in range(3):
            order.append("frame")
            loop.call_soon(order.append, "loop")
            yield make_frame(number)

    scene.links.replay(scene.name(), make_frames(), 300, session)
    assert order == []
    await asyncio.sleep(1)

    assert order == ["frame", "loop"] * 3
    assert scene.heard == [make_frame(number) for number in range(3)]
    assert session.num_bytes_left == 300


@in_scene()
async def test_session_whose_frames_cannot_be_made_is_lost_and_no_other(scene: Scene) -> None:
    broken, other = Pusher(), Pusher()

    def make_frames() -> Iterator[bytes]:
        yield make_frame(1)
        raise ValueError("no such dtype")

    scene.links.replay(scene.name(1), make_frames(), 300, broken)
    scene.links.replay(scene.name(2), [make_frame(2)], 300, other)
    await asyncio.sleep(1)

    assert broken.refusals == ["the peer failed to push what it computed"]
    assert broken.num_bytes_left == 300
    assert (other.num_losses, other.refusals) == (0, [])
    assert scene.heard == [make_frame(1), make_frame(2)]


@in_scene()
async def test_who_does_not_want_a_replay_is_sent_one_frame_of_it(scene: Scene) -> None:
    session, scene.declines = Pusher(), True
    frames = (make_frame(number) for number in range(50))

    scene.links.replay(scene.name(), frames, 50, session)
    await asyncio.sleep(1)

    assert session.num_losses == 1
    assert scene.heard == [make_frame(0)]
    assert session.num_bytes_left == 50
