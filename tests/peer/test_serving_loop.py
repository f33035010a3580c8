"""Peers that place themselves, on virtual time: everything but the blocks is real."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import random
import weakref
from collections import Counter
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from announcements import announce_scripted
from async_tests import Story, make_decorator
from virtual_time import VirtualClock

from shoal.peer.announcing.announcer import Announcer
from shoal.peer.announcing.self_description import SelfDescription, make_template
from shoal.peer.engine.cache.kv_cache import KVCachePool
from shoal.peer.engine.cache.lazy_memory import LazyStore
from shoal.peer.hosting.span_loader import LoadError
from shoal.peer.hosting.throughput import Throughput
from shoal.peer.placement.placer import PlacedModel, Placer
from shoal.peer.placement.supply import BlockRoom
from shoal.peer.process.background import BackgroundTasks, LoopLag
from shoal.peer.process.config import PeerConfig, PeerEvent
from shoal.peer.process.pauses import ServingPauses
from shoal.peer.serving_loop import ServingLoop
from shoal.peer.streams.service import StreamHandler
from shoal.protocol.endpoints import Endpoint, Relay
from shoal.protocol.errors import DirectoryError, UnavailableError, UsageError
from shoal.protocol.identity import Identity
from shoal.protocol.ids import ModelId, PeerId
from shoal.protocol.messages.codec import encode_frame
from shoal.protocol.messages.session import Welcome
from shoal.protocol.net.memory.loopback import LoopbackNetwork, LoopbackTransport
from shoal.protocol.net.memory.memory_directory import MemoryDirectory, MemoryDirectoryStore
from shoal.protocol.net.network import Addresses
from shoal.protocol.net.transport import Stream
from shoal.protocol.records.announcements import Announcement, PeerState
from shoal.protocol.spans import Span

MODEL_ID = ModelId("a" * 32)
NUM_BLOCKS = 8
WORK = (1.0,) * NUM_BLOCKS
PERIOD_SECONDS = 30.0
LOAD_SECONDS = 2.0
BLOCKS_PER_SECOND = 400.0
LIAR = max(Identity(bytes([number]) * 32).peer_id for number in range(64))
"""Of two who come at the same time the higher id stays."""
RELAY = Relay("192.0.2.1", 4001, LIAR)
CONFIG = PeerConfig(model="", announce_period_seconds=PERIOD_SECONDS)


class TroubledDirectory(MemoryDirectory):
    """Cannot be read or written at times, and may show a liar where others are about to come."""

    def __init__(self, store: MemoryDirectoryStore) -> None:
        super().__init__(store, VirtualClock())
        self.is_broken = False
        self.has_liar = False

    async def announce(self, record: bytes) -> None:
        if self.is_broken:
            raise DirectoryError("nobody listens")
        await super().announce(record)

    async def lookup(self, model_id: ModelId, max_age_seconds: float = 0.0) -> list[Announcement]:
        if self.is_broken:
            raise DirectoryError("nobody answers")
        announcements = await super().lookup(model_id)
        joining = [peer for peer in announcements if peer.state is PeerState.JOINING]
        if self.has_liar and joining:
            announcements.append(replace(joining[0], peer_id=LIAR))
        return announcements


class IdleService:
    """A service without sessions."""

    is_empty = False
    workloads = ()

    def __init__(self, peer_id: PeerId, span: Span, drain_seconds: float) -> None:
        self.num_streams = 0
        self.welcome = Welcome(1, "idle", peer_id, MODEL_ID, span, 0.0)
        self.drain_seconds = drain_seconds

    def begin_draining(self) -> None:
        return

    async def wait_until_empty(self, timeout_seconds: float) -> bool:
        await asyncio.sleep(self.drain_seconds)
        return True

    async def hang_up(self) -> None:
        return

    def count_work(self) -> dict[str, object]:
        return {}

    async def serve(self, stream: Stream, first_frame: bytes | None = None) -> None:
        self.num_streams += 1
        await answer_hello(stream, self.welcome, first_frame)


async def answer_hello(stream: Stream, welcome: Welcome, first_frame: bytes | None = None) -> None:
    if first_frame is not None or await stream.receive() is not None:
        await stream.send(encode_frame(welcome))


class IdleEngine:
    """Blocks that are only counted."""

    kernels = ""
    device = SimpleNamespace(name="")
    num_weight_bytes = 0
    spec = SimpleNamespace(num_blocks=NUM_BLOCKS)

    def __init__(self, span: Span) -> None:
        self.span = span
        self.pool = KVCachePool(2**20, LazyStore(len(span), 1, 8, torch.float32))

    def keep_blocks(self, span: Span) -> dict[int, Any]:
        return {block: block for block in range(NUM_BLOCKS) if block in self.span and block in span}


class CountingLoader:
    """Takes its time for each block that is not there yet."""

    def __init__(self, peer_id: PeerId) -> None:
        self.peer_id = peer_id
        self.broken: set[int] = set()
        """Blocks that cannot be loaded."""
        self.has_memory_for_one = True
        self.has_memory_for_two = False
        self.loaded: list[set[int]] = []
        self.engines: list[weakref.ref[IdleEngine]] = []
        self.services: list[IdleService] = []
        self.died: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.drain_seconds = 0.0
        self.measured_again: Throughput | None = None

    @asynccontextmanager
    async def serve(
        self, span: Span, kept: Mapping[int, Any], report_loading: object
    ) -> AsyncGenerator[Any]:
        # Two spans at a time would not fit into memory.
        assert [engine() for engine in self.engines if engine() is not None] == []
        missing = set(range(span.start, span.stop)) - kept.keys()
        self.loaded.append(missing)
        for block in sorted(missing):
            await asyncio.sleep(LOAD_SECONDS)
            if block in self.broken:
                raise LoadError(f"block {block} cannot be loaded: the disk is full", [block])
        engine = IdleEngine(span)
        self.engines.append(weakref.ref(engine))
        throughput = Throughput(BLOCKS_PER_SECOND / len(span), 1000.0)
        yield SimpleNamespace(
            engine=engine,
            compute=SimpleNamespace(died=self.died),
            span=span,
            kernels="",
            decode_steps_per_second=throughput.decode_steps_per_second,
            prefill_tokens_per_second=throughput.prefill_tokens_per_second,
            throughput=throughput,
            load_seconds=LOAD_SECONDS,
            began_at=VirtualClock().now(),
            blocks_per_second=BLOCKS_PER_SECOND,
        )

    async def measure_again(self, served: Any, is_idle: Any) -> Throughput | None:
        return self.measured_again

    def make_service(self, served: Any) -> Any:
        self.services.append(IdleService(self.peer_id, served.span, self.drain_seconds))
        return self.services[-1]

    def keep_blocks(self, engine: IdleEngine, span: Span) -> dict[int, Any]:
        return engine.keep_blocks(engine.span if self.has_memory_for_two else span)

    def check_room(self, span: Span, kept: Mapping[int, Any]) -> None:
        missing = set(range(span.start, span.stop)) - kept.keys()
        if not self.has_memory_for_one:
            raise LoadError("there is too little memory", missing)


@dataclass
class Peer:
    """A peer that runs, and what it said."""

    name: str
    events: list[PeerEvent]
    directory: TroubledDirectory
    handler: StreamHandler
    loader: CountingLoader
    pauses: ServingPauses
    stop: asyncio.Event
    running: asyncio.Task[None]

    @property
    def span(self) -> Span:
        """Where it is, or was last."""
        return Span.parse(str([e for e in self.events if e.name == "online"][-1].facts["span"]))

    @property
    def num_moves(self) -> int:
        return sum(event.name == "moving" for event in self.events)

    def list_events(self) -> list[str]:
        return [event.name for event in self.events if event.name != "loading"]

    async def kill(self) -> None:
        """End it without a word."""
        self.directory.is_broken = True
        self.running.cancel()
        await asyncio.wait([self.running])

    async def leave(self) -> None:
        self.stop.set()
        await self.running


class World:
    """A directory, and the peers of a swarm."""

    def __init__(self) -> None:
        self.store = MemoryDirectoryStore()
        self.network = LoopbackNetwork()
        self.peers: list[Peer] = []

    def add(self, max_blocks: int = 4, span: Span | None = None) -> Peer:
        name = f"peer{len(self.peers)}"
        identity = Identity(hashlib.sha256(name.encode()).digest())
        clock, directory, events = VirtualClock(), TroubledDirectory(self.store), list[PeerEvent]()
        transport = LoopbackTransport(self.network, name)
        presence: Any = SimpleNamespace(
            identity=identity,
            transport=transport,
            directory=directory,
            addresses=Addresses([Endpoint(name, 1, self.network.fingerprint_of(name, 1))], {}),
            relays=(),
            directory_port=0,
        )
        template = make_template(CONFIG, MODEL_ID, NUM_BLOCKS, presence)
        description = SelfDescription(template, LoopLag(clock), WORK)
        announcer = Announcer(directory, identity, description.describe, clock, PERIOD_SECONDS)
        model = PlacedModel(MODEL_ID, WORK, BlockRoom(max_blocks))
        rng = random.Random(name)
        placer = Placer(model, presence, announcer, description, clock, rng)
        loader: Any = CountingLoader(identity.peer_id)
        handler = StreamHandler()
        loop = ServingLoop(
            loader,
            loader.make_service,
            handler,
            announcer,
            description,
            events.append,
            lambda: {"endpoint": name},
            0.0,
        )
        stop = asyncio.Event()

        async def live() -> None:
            await transport.listen(name, 1, handler.serve)
            try:
                async with BackgroundTasks() as tasks:
                    await loop.run(span, placer, tasks, stop)
            finally:
                await transport.close()

        running = asyncio.create_task(live())
        peer = Peer(name, events, directory, handler, loader, loop.pauses, stop, running)
        self.peers.append(peer)
        return peer

    async def make_up(self, number: int, span: Span, is_relayed: bool = False) -> None:
        """Announce a peer that is not there, once and for three minutes."""
        identity = Identity(bytes([number]) * 32)
        await announce_scripted(
            MemoryDirectory(self.store, VirtualClock()), VirtualClock(), identity,
            Endpoint("nowhere", number, "f" * 64), num_blocks=NUM_BLOCKS, span=span,
            decode_steps_per_second=BLOCKS_PER_SECOND,
            **({"endpoints": (), "relays": (RELAY,)} if is_relayed else {}),
        )  # fmt: skip

    async def read(self) -> list[Announcement]:
        return await MemoryDirectory(self.store, VirtualClock()).lookup(MODEL_ID)

    async def count_hosts(self) -> list[int]:
        """Return for each block how many peers serve it by their word."""
        hosts = Counter(
            block
            for peer in await self.read()
            if peer.state is PeerState.ONLINE
            for block in range(peer.span.start, peer.span.stop)
        )
        return [hosts[block] for block in range(NUM_BLOCKS)]

    async def close(self) -> None:
        for peer in self.peers:
            peer.running.cancel()
        await asyncio.wait([peer.running for peer in self.peers])


async def run(story: Story) -> None:
    world = World()
    gc.disable()  # memory has to be free without it
    try:
        await story(world)
    finally:
        await world.close()
        gc.enable()


in_world = make_decorator(run)


async def wait_for_move(peer: Peer) -> None:
    while not peer.num_moves:
        assert not peer.running.done()
        await asyncio.sleep(0.1)


async def bring_to_move(world: World, drain_seconds: float = 0.0) -> Peer:
    """Return a peer that serves 4:8 beside another one, and that nobody serves 0:4 any more."""
    for span in (Span(0, 4), Span(0, 4), Span(4, 8)):
        world.add(span=span)
    await asyncio.sleep(PERIOD_SECONDS)
    peer = world.add()
    peer.loader.drain_seconds = drain_seconds
    await asyncio.sleep(PERIOD_SECONDS)
    assert peer.span == Span(4, 8)
    for other in world.peers[:2]:
        await other.kill()
    return peer


@in_world()
async def test_alone_a_peer_takes_what_it_holds_at_once(world: World) -> None:
    peer = world.add(max_blocks=3)
    await asyncio.sleep(3 * LOAD_SECONDS + 0.1)
    assert peer.span == Span(0, 3)


@in_world()
async def test_gap_is_closed_by_one_peer_within_two_periods(world: World) -> None:
    lone = world.add(span=Span(0, 4))
    others = [world.add(span=None) for _ in range(5)]
    await asyncio.sleep(3 * PERIOD_SECONDS)
    at_start = [peer for peer in others if peer.span == Span(0, 4)]
    for peer in (lone, *at_start):
        await peer.kill()
    assert {peer.span for peer in others if peer not in at_start} == {Span(4, 8)}

    await asyncio.sleep(2 * PERIOD_SECONDS + 4 * LOAD_SECONDS)

    assert [peer.num_moves for peer in others if peer.num_moves] == [1]
    (mover,) = [peer for peer in others if peer.num_moves]
    assert mover.span == Span(0, 4)
    await asyncio.sleep(10 * PERIOD_SECONDS)
    assert sum(peer.num_moves for peer in world.peers) <= 2  # one may follow as a replica


@in_world()
async def test_speed_that_was_measured_under_load_does_not_stand_for_good(world: World) -> None:
    peer = world.add(span=Span(0, 8))
    await asyncio.sleep(PERIOD_SECONDS)
    peer.loader.measured_again = Throughput(1.1 * BLOCKS_PER_SECOND / 8, 1100.0)
    await asyncio.sleep(400.0)
    (told,) = await world.read()
    assert told.decode_steps_per_second == BLOCKS_PER_SECOND / 8, "that much is chance"

    peer.loader.measured_again = Throughput(2 * BLOCKS_PER_SECOND / 8, 900.0)
    await asyncio.sleep(700.0)

    (told,) = await world.read()
    assert told.decode_steps_per_second == 2 * BLOCKS_PER_SECOND / 8
    assert told.prefill_tokens_per_second == 900.0
    (event,) = [event for event in peer.events if event.name == "speed"]
    assert event.facts["decode_steps_per_second"] == 2 * BLOCKS_PER_SECOND / 8


@in_world()
async def test_host_hears_of_a_gap_and_of_its_end(world: World) -> None:
    peer = world.add(max_blocks=4)
    await asyncio.sleep(2 * PERIOD_SECONDS)
    assert peer.list_events() == ["placed", "online", "gap"]

    world.add(max_blocks=4)
    await asyncio.sleep(3 * PERIOD_SECONDS)
    assert peer.list_events() == ["placed", "online", "gap", "gap_closed"]


@in_world()
async def test_peer_with_given_blocks_never_moves(world: World) -> None:
    first = world.add(span=Span(0, 4))
    others = [world.add(span=Span(4, 8)) for _ in range(3)]
    await asyncio.sleep(PERIOD_SECONDS)
    await first.kill()
    await asyncio.sleep(10 * PERIOD_SECONDS)
    assert [peer.num_moves for peer in others] == [0, 0, 0]


@in_world()
async def test_blocks_that_both_spans_have_stay_loaded(world: World) -> None:
    first_two = [world.add(span=Span(0, 2)) for _ in range(2)]
    world.add(span=Span(2, 8))
    await asyncio.sleep(PERIOD_SECONDS)
    peer = world.add(max_blocks=6)
    await asyncio.sleep(PERIOD_SECONDS)
    before = peer.span
    assert before == Span(2, 8)
    for other in first_two:
        await other.kill()
    await asyncio.sleep(3 * PERIOD_SECONDS)

    assert peer.span == Span(0, 6)
    assert peer.loader.loaded == [set(range(2, 8)), {0, 1}]


@in_world()
async def test_streams_find_the_service_that_drains_and_are_refused_until_the_next(
    world: World,
) -> None:
    peer = await bring_to_move(world, drain_seconds=10.0)
    said: list[bytes] = []

    async def say(frame: bytes) -> None:
        said.append(frame)

    stream: Any = SimpleNamespace(
        set_gate=lambda gate: None, receive=lambda: asyncio.sleep(0), send=say
    )
    await wait_for_move(peer)

    await peer.handler.serve(stream)
    assert [service.num_streams for service in peer.loader.services] == [1]
    assert not said
    while peer.handler.service is not None:  # noqa: ASYNC110 - a test on virtual time
        await asyncio.sleep(0.1)
    await peer.handler.serve(stream)
    assert len(said) == 1
    while peer.handler.service is None:  # noqa: ASYNC110 - a test on virtual time
        await asyncio.sleep(0.1)
    await peer.handler.serve(stream)
    assert [service.num_streams for service in peer.loader.services] == [1, 1]


@in_world()
async def test_directory_in_trouble_ends_no_peer(world: World) -> None:
    world.add(span=Span(0, 4))
    await asyncio.sleep(PERIOD_SECONDS)
    peer = world.add()
    await asyncio.sleep(PERIOD_SECONDS)
    peer.directory.is_broken = True
    await asyncio.sleep(5 * PERIOD_SECONDS)
    assert not peer.running.done()

    peer.directory.is_broken = False
    await peer.leave()
    states = {announcement.state for announcement in await world.read()}
    assert states == {PeerState.ONLINE, PeerState.OFFLINE}


@in_world()
async def test_move_outlasts_a_directory_in_trouble(world: World) -> None:
    peer = await bring_to_move(world)
    await wait_for_move(peer)

    peer.directory.is_broken = True
    await asyncio.sleep(PERIOD_SECONDS)
    peer.directory.is_broken = False
    await asyncio.sleep(PERIOD_SECONDS)

    assert not peer.running.done()
    assert await world.count_hosts() == [1] * NUM_BLOCKS


@in_world()
async def test_liar_who_is_always_about_to_be_there_too_keeps_nobody_out(world: World) -> None:
    for span in (Span(0, 4), Span(4, 8), Span(0, 4), Span(4, 8)):
        world.add(span=span)
    await asyncio.sleep(PERIOD_SECONDS)
    newcomer = world.add(max_blocks=1)
    newcomer.directory.has_liar = True

    await asyncio.sleep(3 * PERIOD_SECONDS)

    assert len(newcomer.span) == 1


@pytest.mark.parametrize(
    ("num_made_up", "is_relayed"),
    [(6, False), pytest.param(24, False, marks=pytest.mark.thorough), (6, True)],
)
@in_world()
async def test_made_up_hosts_draw_nobody_away_from_the_blocks_that_they_name(
    world: World, num_made_up: int, is_relayed: bool
) -> None:
    """All honest hosts of 0:4 would leave for 4:8, where they are worth more by those words."""
    honest = [world.add() for _ in range(4)]
    await asyncio.sleep(2 * PERIOD_SECONDS)
    before = Counter(peer.span for peer in honest)
    assert before == {Span(0, 4): 2, Span(4, 8): 2}

    for _ in range(15):
        for number in range(num_made_up):
            await world.make_up(100 + number, Span(0, 4), is_relayed)
        await asyncio.sleep(180)

    assert Counter(peer.span for peer in honest) == before
    assert sum(peer.num_moves for peer in honest) == 0


@pytest.mark.parametrize("num_made_up", [2, 24])
@in_world()
async def test_newcomer_goes_where_hosts_are_only_made_up(world: World, num_made_up: int) -> None:
    world.add(span=Span(0, 4))
    for number in range(num_made_up):
        await world.make_up(100 + number, Span(4, 8))
    await asyncio.sleep(PERIOD_SECONDS)
    newcomer = world.add()
    for _ in range(4):
        for number in range(num_made_up):
            await world.make_up(100 + number, Span(4, 8))
        await asyncio.sleep(PERIOD_SECONDS)

    assert newcomer.span == Span(4, 8)


@in_world()
async def test_hosts_behind_relays_are_not_taken_for_absent(world: World) -> None:
    """They cannot be dialled from here, and a newcomer closes a gap before it doubts them."""
    for number in range(2):
        await world.make_up(100 + number, Span(4, 8), is_relayed=True)
    await asyncio.sleep(PERIOD_SECONDS)

    newcomer = world.add()
    await asyncio.sleep(PERIOD_SECONDS)

    assert newcomer.span == Span(0, 4)


@in_world()
async def test_hosts_behind_relays_that_nobody_dialled_count_as_one(world: World) -> None:
    """They may be made up, as many as somebody likes."""
    for _ in range(2):
        world.add(span=Span(0, 4))
    for number in range(3):
        await world.make_up(100 + number, Span(4, 8), is_relayed=True)
    await asyncio.sleep(PERIOD_SECONDS)

    newcomer = world.add()
    await asyncio.sleep(PERIOD_SECONDS)

    assert newcomer.span == Span(4, 8)


@in_world()
async def test_who_is_about_to_serve_for_an_hour_is_not_believed(world: World) -> None:
    world.add(span=Span(4, 8))
    for _ in range(2):  # they say they come, and never do
        world.add(span=Span(0, 4)).loader.serve = never_load  # type: ignore[method-assign]
    watcher = world.add()
    await asyncio.sleep(2 * PERIOD_SECONDS)
    assert watcher.span == Span(4, 8)

    await asyncio.sleep(3700)

    assert watcher.span == Span(0, 4)


@asynccontextmanager
async def never_load(*_: object) -> AsyncGenerator[Any]:
    await asyncio.Future[None]()
    yield


@pytest.mark.parametrize("has_memory_for_two", [False, True])
@in_world()
async def test_peer_goes_back_when_it_cannot_load_where_it_moves(
    world: World, has_memory_for_two: bool
) -> None:
    peer = await bring_to_move(world)
    peer.loader.broken = {3}
    peer.loader.has_memory_for_two = has_memory_for_two

    await asyncio.sleep(3 * PERIOD_SECONDS)

    assert peer.list_events() == ["placed", "online", "moving", "drained", "returning", "online"]
    assert peer.events[-2].facts == {
        "target": "4:8", "why": "block 3 cannot be loaded: the disk is full"
    }  # fmt: skip
    assert peer.span == Span(4, 8)
    again = set() if has_memory_for_two else {4, 5, 6, 7}
    assert peer.loader.loaded == [{4, 5, 6, 7}, {0, 1, 2, 3}, again]
    assert await world.count_hosts() == [0] * 4 + [2] * 4


@in_world()
async def test_peer_that_cannot_load_a_block_still_serves_what_is_around_it(world: World) -> None:
    peer = await bring_to_move(world)
    peer.loader.broken = {2}

    await asyncio.sleep(4 * PERIOD_SECONDS)

    assert peer.span == Span(3, 7)
    assert await world.count_hosts() == [0, 0, 0, 1, 2, 2, 2, 1]


@pytest.mark.slow
@in_world()
async def test_place_that_could_not_be_loaded_is_tried_again_later_and_later(world: World) -> None:
    peer = await bring_to_move(world)
    peer.loader.broken = {3}
    await asyncio.sleep(9 * 600)
    assert peer.num_moves == 4  # after 0, 10, 30 and 70 minutes

    peer.loader.broken = set()
    await asyncio.sleep(10 * 600)

    assert peer.span == Span(0, 4)
    assert peer.num_moves == 5


@in_world()
async def test_peer_goes_back_when_memory_does_not_hold_where_it_moves(world: World) -> None:
    peer = await bring_to_move(world)
    peer.loader.has_memory_for_one = False

    await asyncio.sleep(3 * PERIOD_SECONDS)

    assert peer.span == Span(4, 8)
    assert peer.loader.loaded == [{4, 5, 6, 7}, {4, 5, 6, 7}]


@pytest.mark.parametrize("span", [None, Span(0, 4)])
@in_world()
async def test_peer_that_cannot_load_its_first_span_says_so(
    world: World, span: Span | None
) -> None:
    peer = world.add(span=span)
    peer.loader.broken = set(range(NUM_BLOCKS))
    with pytest.raises(LoadError, match="block 0 cannot be loaded: the disk is full"):
        await peer.running


@pytest.mark.parametrize("span", [None, Span(0, 4)])
@in_world()
async def test_peer_whose_compute_thread_dies_leaves_and_says_so(
    world: World, span: Span | None
) -> None:
    peer = world.add(span=span)
    await asyncio.sleep(3 * PERIOD_SECONDS)
    peer.loader.died.set_result(None)
    with pytest.raises(UnavailableError, match="the compute thread has failed"):
        await asyncio.wait_for(peer.running, PERIOD_SECONDS)


@in_world()
async def test_peer_that_can_load_nothing_any_more_says_so(world: World) -> None:
    peer = await bring_to_move(world)
    peer.loader.broken = set(range(NUM_BLOCKS))
    with pytest.raises(LoadError, match="block 4 cannot be loaded: the disk is full"):
        await peer.running


@in_world()
async def test_peer_that_is_stopped_while_it_drains_for_a_move_leaves_at_once(world: World) -> None:
    peer = await bring_to_move(world)
    peer.loader.drain_seconds = peer.loader.services[0].drain_seconds = 20.0
    await wait_for_move(peer)
    began_at = VirtualClock().now()

    await peer.leave()

    assert VirtualClock().now() - began_at < 1.0
    assert len(peer.loader.loaded) == 1
    states = sorted(peer.state for peer in await world.read() if peer.span == Span(4, 8))
    assert states == [PeerState.OFFLINE, PeerState.ONLINE]


@in_world()
async def test_peer_drains_for_a_pause_and_goes_on_with_the_blocks_that_it_has(
    world: World,
) -> None:
    peer = world.add(max_blocks=4)
    await asyncio.sleep(PERIOD_SECONDS)

    peer.pauses.note("owner", "drained by its owner")
    await peer.pauses.resting.wait()
    await asyncio.sleep(10 * PERIOD_SECONDS)
    (told,) = await world.read()
    assert told.state is PeerState.OFFLINE
    assert peer.handler.service is None

    peer.pauses.note("owner", None)
    await peer.pauses.serving.wait()
    (told,) = await world.read()
    assert told.state is PeerState.ONLINE
    events = [event for event in peer.list_events() if not event.startswith("gap")]
    assert events == ["placed", "online", "paused", "online"]
    assert len(peer.loader.loaded) == 1
    assert len(peer.loader.services) == 2


@in_world()
async def test_peer_with_a_reason_to_pause_at_the_start_is_not_online(world: World) -> None:
    peer = world.add(max_blocks=4)
    peer.pauses.note("schedule", "outside of its hours")
    await asyncio.sleep(PERIOD_SECONDS)
    assert [event.name for event in peer.events if event.name != "loading"] == ["placed", "paused"]
    assert peer.events[-1].facts == {"why": ["outside of its hours"]}

    await peer.leave()

    (told,) = await world.read()
    assert told.state is PeerState.OFFLINE


@in_world()
async def test_peer_whose_compute_thread_dies_in_a_pause_says_so(world: World) -> None:
    peer = world.add(max_blocks=4)
    peer.pauses.note("owner", "drained by its owner")
    await peer.pauses.resting.wait()

    peer.loader.died.set_result(None)

    with pytest.raises(UnavailableError, match="the compute thread has failed"):
        await asyncio.wait_for(peer.running, PERIOD_SECONDS)


@in_world()
async def test_machine_without_memory_is_told_so(world: World) -> None:
    peer = world.add(max_blocks=0)
    with pytest.raises(UsageError, match="not even one block"):
        await peer.running
