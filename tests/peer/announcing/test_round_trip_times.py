"""Round trips between peers, measured on virtual time over links that a test knows."""

from __future__ import annotations

import asyncio
import contextlib
import random
from dataclasses import replace
from typing import Any

import pytest
from announcements import describe_peer
from async_tests import Story, make_decorator
from service_scene import MODEL_ID
from virtual_time import VirtualClock

from shoal.peer.announcing.round_trip_times import (
    MAX_ANNOUNCED_RTTS,
    RoundTripTimes,
    choose_peer_to_measure,
)
from shoal.protocol.endpoints import Endpoint
from shoal.protocol.errors import DirectoryError
from shoal.protocol.identity import Identity
from shoal.protocol.ids import PeerId
from shoal.protocol.messages.codec import decode_frame, encode_frame
from shoal.protocol.messages.session import Hello, Welcome
from shoal.protocol.net.memory.loopback import Link, LoopbackNetwork, LoopbackTransport
from shoal.protocol.net.memory.memory_directory import MemoryDirectory, MemoryDirectoryStore
from shoal.protocol.net.transport import Stream
from shoal.protocol.records.announcements import Announcement, sign_announcement
from shoal.protocol.records.coordinates import Coordinate, estimate_rtt_seconds
from shoal.protocol.spans import Span

PERIOD_SECONDS = 30.0
NUM_BLOCKS = 12
MEASURED = 20 * PERIOD_SECONDS
"""After so long everybody in a small swarm was measured."""


class SimplePeer:
    """A peer that only says hello, measures others, and is announced by hand."""

    def __init__(self, scene: Scene, number: int, span: Span) -> None:
        self.host = f"peer{number}"
        self.identity = Identity(bytes([number + 1]) * 32)
        self.peer_id = self.answers_as = self.identity.peer_id
        self.span = span
        self.num_streams = 0
        self.endpoint = Endpoint("nowhere", 1)
        self._scene = scene
        self._sequence = 0
        self.transport = LoopbackTransport(scene.network, self.host)
        self.round_trip_times = RoundTripTimes(
            MemoryDirectory(scene.store, VirtualClock()),
            self.transport,
            VirtualClock(),
            PERIOD_SECONDS,
            random.Random(number),
        )

    async def listen(self) -> None:
        self.endpoint = (await self.transport.listen(self.host, 0, self.serve)).endpoint

    async def serve(self, stream: Stream) -> None:
        self.num_streams += 1
        while (frame := await stream.receive()) is not None:
            assert isinstance(decode_frame(frame), Hello)
            welcome = Welcome(2, "", self.answers_as, MODEL_ID, self.span, 0.0)
            await stream.send(encode_frame(welcome))

    async def announce(self, **changes: Any) -> Announcement:
        self._sequence += 1
        now = VirtualClock().wall()
        announcement = describe_peer(
            peer_id=self.peer_id,
            model_id=MODEL_ID,
            num_blocks=NUM_BLOCKS,
            span=self.span,
            endpoints=(self.endpoint,),
            sequence=self._sequence,
            issued_at=now,
            expires_at=now + 3 * PERIOD_SECONDS,
        )
        announcement = replace(self.round_trip_times.describe(announcement), **changes)
        directory = MemoryDirectory(self._scene.store, VirtualClock())
        await directory.announce(sign_announcement(self.identity, announcement))
        return announcement

    async def renew(self) -> None:
        while True:
            with contextlib.suppress(DirectoryError):
                await self.announce()
            await asyncio.sleep(PERIOD_SECONDS)


class Scene:
    """Peers of a model of twelve blocks, and a network between them."""

    def __init__(self) -> None:
        self.network = LoopbackNetwork()
        self.store = MemoryDirectoryStore()
        self.peers: list[SimplePeer] = []

    def set_delay(self, a: int, b: int, seconds: float) -> None:
        for source, target in ((a, b), (b, a)):
            self.network.set_link(f"peer{source}", f"peer{target}", Link(delay_seconds=seconds))


async def run(story: Story, *spans: tuple[int, int]) -> None:
    """Run a story beside peers that serve these spans, measure and announce."""
    scene = Scene()
    scene.peers = [SimplePeer(scene, n, Span(*span)) for n, span in enumerate(spans)]
    for peer in scene.peers:
        await peer.listen()
    running = [run() for peer in scene.peers for run in (peer.renew, peer.round_trip_times.run)]
    tasks = [asyncio.ensure_future(run) for run in running]
    await story(scene)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    for peer in scene.peers:
        await peer.transport.close()
    assert asyncio.all_tasks() == {asyncio.current_task()}


beside = make_decorator(run)


@beside((4, 8), (0, 4), (8, 12), (2, 6), (6, 10), (7, 9), (5, 7))
async def test_peer_tells_the_nearest_of_those_that_a_chain_leads_to_or_from(scene: Scene) -> None:
    for number, delay_seconds in enumerate((0.03, 0.01, 0.05, 0.02, 0.04, 0.001), 1):
        scene.set_delay(0, number, delay_seconds)
    await asyncio.sleep(MEASURED)

    told = (await scene.peers[0].announce()).rtts

    # The last one serves blocks of ours only: no chain has a use for both.
    expected = [(scene.peers[2].peer_id, 0.02), (scene.peers[4].peer_id, 0.04)]
    assert told == (*expected, (scene.peers[1].peer_id, 0.06))
    assert len(told) == MAX_ANNOUNCED_RTTS


@beside(*[(0, 6), (6, 12)] * 4)
async def test_measuring_is_bounded_and_ends_when_everybody_is_known(scene: Scene) -> None:
    target = scene.peers[0]
    others = len(scene.peers) - 1
    await asyncio.sleep(PERIOD_SECONDS)
    assert sum(peer.num_streams for peer in scene.peers) <= 8 * len(scene.peers)

    await asyncio.sleep(MEASURED / 2)
    assert target.num_streams == others
    await asyncio.sleep(MEASURED)
    assert target.num_streams <= 3 * others


@pytest.mark.slow
@beside(*[(0, 6), (6, 12)] * 3)
async def test_coordinates_come_out_of_what_everybody_measures(scene: Scene) -> None:
    """Three places in a row, 20 ms between two that are side by side."""

    for a in range(6):
        for b in range(a):
            scene.set_delay(a, b, 0.001 + 0.01 * abs(a // 2 - b // 2))
    await asyncio.sleep(10 * MEASURED)

    places = [(await peer.announce()).coordinate for peer in scene.peers]

    for a in range(6):
        for b in range(a):
            one, other = places[a], places[b]
            assert one is not None
            assert other is not None
            assert one.is_settled
            rtt_seconds = 2 * (0.001 + 0.01 * abs(a // 2 - b // 2))
            assert estimate_rtt_seconds(one, other) == pytest.approx(rtt_seconds, abs=0.01)


@beside((0, 6))
async def test_who_has_measured_nothing_says_nothing(scene: Scene) -> None:
    await asyncio.sleep(MEASURED)

    announcement = await scene.peers[0].announce()

    assert announcement.rtts == ()
    assert announcement.coordinate is None


@pytest.mark.parametrize("trouble", ["paused", "gone", "another"])
@beside((0, 6), (6, 12), (6, 12))
async def test_peer_that_does_not_answer_is_not_told_and_holds_nobody_up(
    scene: Scene, trouble: str
) -> None:
    broken = scene.peers[1]
    if trouble == "paused":
        scene.network.pause(broken.host)
    elif trouble == "gone":
        scene.network.kill(broken.host)
    else:
        broken.answers_as = scene.peers[2].peer_id
    await asyncio.sleep(MEASURED)

    told = (await scene.peers[0].announce()).rtts

    assert [peer_id for peer_id, _ in told] == [scene.peers[2].peer_id]


@beside((0, 6), (6, 12))
async def test_peer_that_many_made_up_announcements_name_is_measured_no_more_often(
    scene: Scene,
) -> None:
    honest = scene.peers[1]
    for number in range(10, 70):
        made_up = SimplePeer(scene, number, honest.span)
        made_up.endpoint = honest.endpoint
        await made_up.announce()

    await asyncio.sleep(2 * PERIOD_SECONDS)

    assert honest.num_streams == 1


@beside((0, 6), (6, 12))
async def test_peer_that_answers_no_more_is_no_longer_told(scene: Scene) -> None:
    """It goes on to announce itself, so that it is tried again and again."""

    me, other = scene.peers
    await asyncio.sleep(MEASURED)
    assert [peer_id for peer_id, _ in (await me.announce()).rtts] == [other.peer_id]

    scene.network.pause(other.host)
    await asyncio.sleep(3 * MEASURED)

    assert (await me.announce()).rtts == ()


@beside((0, 6), (6, 12))
async def test_way_that_became_slower_is_told_as_it_is(scene: Scene) -> None:
    me, other = scene.peers
    scene.set_delay(0, 1, 0.01)
    await asyncio.sleep(MEASURED)
    assert (await me.announce()).rtts == ((other.peer_id, 0.02),)

    scene.set_delay(0, 1, 0.05)
    await asyncio.sleep(3 * MEASURED)

    assert (await me.announce()).rtts == ((other.peer_id, 0.1),)


@beside((0, 6), (6, 12))
async def test_peers_go_on_to_measure_once_the_directory_can_be_read_again(scene: Scene) -> None:
    scene.store.is_reachable = False
    await asyncio.sleep(MEASURED)
    assert scene.peers[1].num_streams == 0

    scene.store.is_reachable = True
    await asyncio.sleep(MEASURED)

    assert (await scene.peers[0].announce()).rtts


def make_peer(number: int, span: tuple[int, int], place: float | None) -> Announcement:
    return describe_peer(
        peer_id=PeerId(f"p{number}"),
        model_id=MODEL_ID,
        num_blocks=NUM_BLOCKS,
        span=Span(*span),
        coordinate=None if place is None else Coordinate(place, error=0.1),
        issued_at=1.0,
        expires_at=2.0,
    )


def test_nearest_likely_neighbour_is_measured_first_and_now_and_then_anybody() -> None:
    own = make_peer(0, (4, 8), 0.0)
    near, far = make_peer(1, (8, 12), 0.01), make_peer(2, (8, 12), 0.1)
    useless = make_peer(3, (4, 8), 0.001)
    rng = random.Random(0)

    chosen = [choose_peer_to_measure(own, [far, useless, near], rng) for _ in range(400)]

    counts = [chosen.count(peer) for peer in (near, far, useless)]
    assert counts[0] > 300
    assert min(counts) > 15


def test_of_neighbours_nobody_knows_each_has_its_turn() -> None:
    own = make_peer(0, (4, 8), None)
    others = [make_peer(number, (8, 12), None) for number in range(1, 5)]
    rng = random.Random(0)

    chosen = [choose_peer_to_measure(own, others, rng) for _ in range(400)]

    assert min(chosen.count(peer) for peer in others) > 50
    assert choose_peer_to_measure(own, [], rng) is None
