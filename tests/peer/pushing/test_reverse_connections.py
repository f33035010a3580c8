"""A peer that cannot be dialled keeps streams where others push from: which, and for how long."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from async_tests import Story, make_decorator
from reverse_scene import (
    FRAME,
    HOME,
    PERIOD_SECONDS,
    PUBLIC,
    ReverseScene,
    in_scene,
    make_welcome,
    name,
    run_in_scene,
)
from virtual_time import VirtualClock

from shoal.peer.pushing.reverse_connections import ReverseConnections, choose_hosts
from shoal.protocol.endpoints import Endpoint
from shoal.protocol.errors import DirectoryError
from shoal.protocol.identity import Identity
from shoal.protocol.messages.codec import decode_frame, encode_frame
from shoal.protocol.messages.reverse_connections import Parked
from shoal.protocol.messages.session import Attach, Hello, Lane, Welcome
from shoal.protocol.net.memory.loopback import LoopbackStream, LoopbackTransport
from shoal.protocol.net.transport import Stream
from shoal.protocol.records.announcements import Announcement, PeerState, shorten
from shoal.protocol.records.coordinates import Coordinate
from shoal.protocol.spans import Span
from shoal.protocol.versions import REVERSE_VERSION

HOME_SPAN = Span(4, 8)
ENDPOINT = Endpoint("192.0.2.7", 4040, "f" * 64)
OTHER = Identity(bytes([3]) * 32)


@dataclass
class Home:
    """A peer that cannot be dialled, and what it was pushed."""

    reverse: ReverseConnections
    own: Announcement
    num_changes: int = 0
    streams: list[Stream] = field(default_factory=list)
    heard: list[bytes] = field(default_factory=list)

    async def serve(self, stream: Stream) -> None:
        self.streams.append(stream)
        while (frame := await stream.receive()) is not None:
            message = decode_frame(frame)
            if isinstance(message, Hello):
                await stream.send(encode_frame(make_welcome()))
            elif not isinstance(message, Attach):
                self.heard.append(frame)

    @property
    def parked_at(self) -> tuple[str, ...]:
        """What it would announce now."""
        return self.reverse.describe(self.own).parked_at

    def note_change(self, parked_at: Sequence[str]) -> None:
        self.num_changes += 1


@asynccontextmanager
async def run_home(
    scene: ReverseScene, transport: LoopbackTransport | None = None, **facts: Any
) -> AsyncGenerator[Home]:
    """Run a peer at home, which has announced itself."""
    homes: list[Home] = []

    async def serve(stream: Stream) -> None:
        await homes[0].serve(stream)

    transport = transport or scene.make_transport("home")
    reverse = ReverseConnections(
        HOME, transport, scene.directory, serve, VirtualClock(), PERIOD_SECONDS
    )
    home = Home(reverse, await scene.announce(HOME, HOME_SPAN, **facts))
    homes.append(home)
    reverse.describe(home.own)
    running = asyncio.create_task(reverse.run(home.note_change))
    await asyncio.sleep(1)
    try:
        yield home
    finally:
        running.cancel()
        await asyncio.wait([running])


async def run_at_home(story: Story) -> None:
    """Run a story about a scene, and a peer at home in it."""

    async def run(scene: ReverseScene) -> None:
        async with run_home(scene) as home:
            await story(scene, home)

    await run_in_scene(run)


at_home = make_decorator(run_at_home, 2)


def has_parked(scene: ReverseScene) -> bool:
    return all(scene.public.parked.has(HOME.peer_id, lane) for lane in Lane)


# ---- where


def describe(scene: ReverseScene, number: int, span: Span, **facts: Any) -> Announcement:
    usual: dict[str, Any] = {"endpoints": (ENDPOINT,)}
    return scene.describe(Identity(bytes([number]) * 32), span, **(usual | facts))


def choose(
    scene: ReverseScene,
    others: list[Announcement],
    kept: tuple[int, ...] = (),
    failing: tuple[int, ...] = (),
) -> list[int]:
    """Return the places in a list of those where streams would be parked."""
    own = scene.describe(HOME, HOME_SPAN, coordinate=Coordinate(0.0, 0.0, 0.0, 0.001, 0.1))
    of_kept, of_failing = ([others[index].peer_id for index in some] for some in (kept, failing))
    return [others.index(host) for host in choose_hosts(own, others, of_kept, of_failing)]


@in_scene()
async def test_streams_are_parked_where_a_chain_may_come_from(scene: ReverseScene) -> None:
    others = [
        describe(scene, 10, Span(0, 4)),
        describe(scene, 11, Span(2, 6)),
        describe(scene, 12, Span(0, 3)),  # does not reach it
        describe(scene, 13, Span(4, 8)),  # the same blocks
        describe(scene, 14, Span(5, 8)),  # comes behind
        describe(scene, 15, Span(0, 4), endpoints=()),  # cannot be dialled either
        describe(scene, 16, Span(0, 4), max_version=REVERSE_VERSION - 1),
        describe(scene, 17, Span(0, 4), state=PeerState.JOINING),
        replace(describe(scene, 18, Span(0, 4)), peer_id=HOME.peer_id),
    ]

    assert set(choose(scene, others)) == {0, 1}


@in_scene()
async def test_nearest_are_chosen_of_many_and_those_that_hold_streams_stay(
    scene: ReverseScene,
) -> None:
    places = [Coordinate(0.01 * number, 0.0, 0.0, 0.001, 0.1) for number in range(12)]
    others = [
        describe(scene, 10 + number, Span(0, 4), coordinate=place)
        for number, place in enumerate(places)
    ]
    others.append(describe(scene, 40, Span(0, 4)))  # nobody knows where

    assert choose(scene, others) == list(range(8))
    assert choose(scene, others, kept=(11, 12)) == [11, 12, 0, 1, 2, 3, 4, 5]
    assert choose(scene, others, failing=(0, 1)) == [2, 3, 4, 5, 6, 7, 8, 9]
    assert choose(scene, others[:3], failing=(0, 1)) == [2, 0, 1]


@in_scene()
async def test_nothing_is_parked_before_the_peer_serves(scene: ReverseScene) -> None:
    async with run_home(scene, state=PeerState.JOINING):
        assert not has_parked(scene)


# ---- and for how long


@at_home()
async def test_parked_streams_are_announced(scene: ReverseScene, home: Home) -> None:
    await asyncio.sleep(5)

    assert has_parked(scene)
    assert home.num_changes > 0
    assert home.parked_at == (shorten(PUBLIC.peer_id),)
    assert replace(home.own, parked_at=home.parked_at).is_parked_at(PUBLIC.peer_id)


@at_home()
async def test_stream_that_is_used_is_replaced_and_announced_meanwhile(
    scene: ReverseScene, home: Home
) -> None:
    scene.public.push(name())
    await asyncio.sleep(0.5)
    assert home.heard == [FRAME]
    assert not scene.public.parked.has(HOME.peer_id, Lane.INTERACTIVE)
    assert home.parked_at == (shorten(PUBLIC.peer_id),)

    await asyncio.sleep(2)

    assert has_parked(scene)
    assert len(home.streams) == 1


@at_home()
async def test_pushes_go_on_over_a_new_stream_when_one_breaks(
    scene: ReverseScene, home: Home
) -> None:
    scene.public.push(name())
    await asyncio.sleep(2)

    await home.streams[0].close()
    await asyncio.sleep(2)
    scene.public.push(name())
    await asyncio.sleep(1)

    assert home.heard == [FRAME, FRAME]


@at_home()
async def test_peer_that_is_killed_is_announced_no_more(scene: ReverseScene, home: Home) -> None:
    await asyncio.sleep(5)
    num_before = home.num_changes

    scene.network.kill("public")
    await asyncio.sleep(10)

    assert home.num_changes > num_before
    assert home.parked_at == ()


@at_home()
async def test_peer_behind_a_line_that_was_cut_gets_streams_again_when_it_is_whole(
    scene: ReverseScene, home: Home
) -> None:
    scene.network.partition("home", "public")
    await asyncio.sleep(60)
    assert home.parked_at == ()

    scene.network.heal("home", "public")
    await asyncio.sleep(130)

    assert has_parked(scene)
    assert home.parked_at == (shorten(PUBLIC.peer_id),)


@at_home()
async def test_streams_are_taken_away_from_who_serves_something_else_now(
    scene: ReverseScene, home: Home
) -> None:
    await scene.announce_public(Span(4, 8))
    await asyncio.sleep(PERIOD_SECONDS + 5)

    assert not scene.public.parked.has(HOME.peer_id, Lane.INTERACTIVE)
    assert home.parked_at == ()


@at_home()
async def test_streams_stay_while_the_directory_cannot_be_read(
    scene: ReverseScene, home: Home
) -> None:
    scene.store.is_reachable = False
    with pytest.raises(DirectoryError):
        await scene.directory.lookup(home.own.model_id)

    await asyncio.sleep(3 * PERIOD_SECONDS)

    assert has_parked(scene)


@in_scene()
async def test_end_leaves_nothing_behind_even_in_the_middle_of_a_push(scene: ReverseScene) -> None:
    async with run_home(scene) as home:
        pusher = scene.public.push(name())
        await asyncio.sleep(2)
        assert home.heard == [FRAME]
    await asyncio.sleep(1)

    assert not has_parked(scene)
    assert pusher.num_losses == 1


# ---- peers that misbehave


@dataclass
class Rogue:
    """A peer that says what it likes to an offer, and how often it was dialled."""

    scene: ReverseScene
    welcome: Welcome
    answer: bytes
    num_dialled: int = 0

    async def serve(self, stream: Stream) -> None:
        self.num_dialled += 1
        await stream.receive()
        await stream.send(encode_frame(self.welcome))
        await stream.receive()
        await stream.send(self.answer)
        await stream.send(encode_frame(Hello(1, 1, "got you")))
        await asyncio.sleep(0.5)

    async def listen(self, identity: Identity = OTHER) -> None:
        listener = await self.scene.make_transport("rogue").listen("rogue", 0, self.serve)
        await self.scene.announce(identity, Span(0, 4), endpoints=(listener.endpoint,))


def make_rogue_welcome(**changes: Any) -> Welcome:
    return replace(make_welcome(OTHER), **({"nonce": bytes(32)} | changes))


@pytest.mark.parametrize(
    ("welcome", "answer"),
    [
        (make_rogue_welcome(peer_id=PUBLIC.peer_id), encode_frame(Parked())),
        (make_rogue_welcome(nonce=b""), encode_frame(Parked())),
        (make_rogue_welcome(), encode_frame(Hello(1, 1, "no"))),
        (make_rogue_welcome(), b"garbage"),
        (make_rogue_welcome(), bytes(2**20)),
    ],
    ids=["another peer", "no nonce", "no answer", "garbage", "too much"],
)
@in_scene()
async def test_peer_that_does_not_keep_to_the_protocol_is_left_alone(
    scene: ReverseScene, welcome: Welcome, answer: bytes
) -> None:
    rogue = Rogue(scene, welcome, answer)
    await rogue.listen()
    async with run_home(scene) as home:
        await asyncio.sleep(500)

        assert home.parked_at == (shorten(PUBLIC.peer_id),)
        assert 2 <= rogue.num_dialled < 50
        assert home.streams == []


@at_home()
async def test_peer_that_listens_elsewhere_now_is_dialled_there(
    scene: ReverseScene, home: Home
) -> None:
    restarted = Rogue(scene, make_rogue_welcome(peer_id=PUBLIC.peer_id), encode_frame(Parked()))

    await restarted.listen(PUBLIC)
    await asyncio.sleep(PERIOD_SECONDS + 5)

    assert restarted.num_dialled >= len(Lane)
    assert not has_parked(scene)


class FailingTransport(LoopbackTransport):
    """A transport whose first streams fail with something nobody foresaw."""

    num_failures = 2

    async def open_stream(self, endpoint: Endpoint, timeout_seconds: float = 5.0) -> LoopbackStream:
        if self.num_failures:
            self.num_failures -= 1
            raise ZeroDivisionError("on purpose")
        return await super().open_stream(endpoint, timeout_seconds)


@in_scene()
async def test_streams_are_kept_after_an_error_that_nobody_foresaw(
    scene: ReverseScene, caplog: pytest.LogCaptureFixture
) -> None:
    async with run_home(scene, FailingTransport(scene.network, "home")):
        await asyncio.sleep(5)
        assert has_parked(scene)

    assert "on purpose" in caplog.text


@in_scene()
async def test_peer_that_uses_up_every_stream_gets_them_later_and_later(
    scene: ReverseScene,
) -> None:
    rogue = Rogue(scene, make_rogue_welcome(), encode_frame(Parked()))
    await rogue.listen()
    async with run_home(scene):
        await asyncio.sleep(500)

        assert 2 <= rogue.num_dialled < 50
