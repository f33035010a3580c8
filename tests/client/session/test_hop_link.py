"""One hop on the wire, against scripted peers: its opening, its two streams, its end."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from hop_scene import (
    CLIENT,
    IN_CHAIN,
    OPEN,
    OTHER_ID,
    OTHER_SESSION,
    SESSION,
    SPAN,
    TIMEOUT,
    WELCOME,
    Answer,
    HopScene,
    Script,
    answer_honestly,
    change,
    decline,
    in_scene,
    make_announcement,
    make_bulk_step,
    make_step,
)
from virtual_time import VirtualClock

from shoal.client.routing.route import Hop
from shoal.client.session.hop_link import HopLink
from shoal.protocol.endpoints import Endpoint
from shoal.protocol.errors import (
    CacheFullError,
    ErrorCode,
    RefusedError,
    RemoteProtocolError,
    SilentError,
    StaleAnnouncementError,
    UnavailableError,
    UsageError,
)
from shoal.protocol.ids import ModelId
from shoal.protocol.messages.fields import Message
from shoal.protocol.messages.session import Attach, Close, Hello, Open, Opened, Queued, Step
from shoal.protocol.net.memory.loopback import Link, LoopbackTransport
from shoal.protocol.net.transport import FrameGate


@in_scene(Link(delay_seconds=0.05))
async def test_opening_asks_for_the_span_of_the_hop_in_one_round_trip(scene: HopScene) -> None:
    link, rtt_seconds = await scene.open()

    assert rtt_seconds == pytest.approx(0.1)
    # One round trip for the connection, one for the rest.
    assert VirtualClock().now() == pytest.approx(0.2)
    assert scene.heard[0][1] == replace(OPEN, span=SPAN)
    assert link.session == SESSION
    await link.close()


@in_scene()
async def test_every_stream_says_under_which_name_it_counts(scene: HopScene) -> None:
    link, _ = await scene.open(opening=IN_CHAIN)
    await link.send(make_bulk_step(), TIMEOUT)
    await asyncio.sleep(1)

    hellos = [heard[0] for heard in scene.heard]
    assert [hello.client for hello in hellos if isinstance(hello, Hello)] == [CLIENT, CLIENT]
    await link.close()


@pytest.mark.parametrize(
    ("script", "error"),
    [
        (change(Hello, lambda _: replace(WELCOME, peer_id=OTHER_ID)), StaleAnnouncementError),
        (
            change(Hello, lambda _: replace(WELCOME, model_id=ModelId("b" * 32))),
            StaleAnnouncementError,
        ),
        (change(Hello, lambda _: Opened(SESSION, 3, 0.0, 0)), RemoteProtocolError),
        (change(Hello, lambda _: b"HTTP/1.1 400 Bad Request"), RemoteProtocolError),
        (change(Hello, lambda _: None), UnavailableError),
        (change(Hello, decline(ErrorCode.BAD_VERSION, None)), RefusedError),
        (change(Open, lambda _: Opened(OTHER_SESSION, 3, 0.0, 0)), RemoteProtocolError),
        (change(Open, lambda _: WELCOME), RemoteProtocolError),
        (change(Open, lambda _: b""), RemoteProtocolError),
        (change(Open, lambda _: None), UnavailableError),
        (change(Open, decline(ErrorCode.BUSY)), RefusedError),
        (change(Open, decline(ErrorCode.CACHE_FULL)), CacheFullError),
        (change(Open, decline(ErrorCode.BUSY, OTHER_SESSION)), RemoteProtocolError),
        (change(Open, lambda _: Queued(SESSION, 3, 1.0)), RemoteProtocolError),
    ],
    ids=[
        "other peer",
        "other model",
        "no welcome",
        "other protocol",
        "hangs up",
        "version",
        "other session",
        "welcomes twice",
        "empty",
        "hangs up later",
        "busy",
        "full",
        "declines another",
        "queues who would not wait",
    ],
)
@in_scene()
async def test_opening_that_fails_says_whose_fault_it_is_and_leaves_nothing(
    scene: HopScene, script: Script, error: type[Exception]
) -> None:
    scene.script = script

    with pytest.raises(error) as caught:
        await scene.open()

    assert type(caught.value) is error


@pytest.mark.parametrize("at", [Hello, Open])
@in_scene()
async def test_peer_that_falls_silent_while_opening_is_silent(
    scene: HopScene, at: type[Message]
) -> None:
    def pause(message: Message) -> Answer:
        if type(message) is at:
            scene.network.pause("peer")
        return answer_honestly(message)

    scene.script = pause
    with pytest.raises(SilentError, match=r"blocks 0:4"):
        await scene.open()
    assert VirtualClock().now() == pytest.approx(TIMEOUT)
    scene.network.resume("peer")


@in_scene()
async def test_endpoints_are_tried_in_their_order(scene: HopScene) -> None:
    dead = Endpoint("peer", 9)

    link, _ = await scene.open(scene.make_hop(dead, scene.endpoint))
    await link.close()
    with pytest.raises(UnavailableError, match="connection refused"):
        await scene.open(scene.make_hop(dead))


class PickyTransport(LoopbackTransport):
    """Turns endpoints down like TCP does without a fingerprint."""

    async def open_stream(self, endpoint: Endpoint, timeout_seconds: float = 5.0) -> Any:
        if not endpoint.fingerprint:
            raise UsageError(f"{endpoint} has no TLS fingerprint and is not a loopback address")
        return await super().open_stream(endpoint, timeout_seconds)


@in_scene()
async def test_endpoint_that_must_not_be_dialled_is_the_fault_of_its_announcement(
    scene: HopScene,
) -> None:
    scene.transport = PickyTransport(scene.network, "client")
    bare = Endpoint("example.org", 80)

    link, _ = await scene.open(scene.make_hop(bare, scene.endpoint))
    await link.close()
    with pytest.raises(RemoteProtocolError, match="cannot be used"):
        await scene.open(scene.make_hop(bare))


@in_scene()
async def test_announcement_without_endpoints_is_its_peers_fault(scene: HopScene) -> None:
    hop = Hop(make_announcement(()), SPAN)

    with pytest.raises(RemoteProtocolError, match="no endpoint"):
        await scene.open(hop)


@in_scene()
async def test_large_steps_of_a_chain_take_a_second_stream(scene: HopScene) -> None:
    dialled: list[Endpoint] = []

    class NotingTransport(LoopbackTransport):
        async def open_stream(self, endpoint: Endpoint, timeout_seconds: float = 5.0) -> Any:
            dialled.append(endpoint)
            return await super().open_stream(endpoint, timeout_seconds)

    scene.transport = NotingTransport(scene.network, "client")
    for opening in (OPEN, IN_CHAIN):
        link, _ = await scene.open(opening=opening)
        for step in (make_step(), make_bulk_step(), make_bulk_step(), make_step()):
            await link.send(step, TIMEOUT)
        await asyncio.sleep(1)
        await link.close()
    await asyncio.sleep(1)

    kinds = [[type(message) for message in heard] for heard in scene.heard]
    assert kinds == [
        [Hello, Open, Step, Step, Step, Step, Close],
        [Hello, Open, Step, Step, Close],
        [Hello, Attach, Step, Step],
    ]
    assert len(dialled) == 3


@in_scene()
async def test_dialling_the_second_stream_may_be_cancelled(scene: HopScene) -> None:
    link, _ = await scene.open(opening=IN_CHAIN)
    scene.network.pause("peer")
    sending = asyncio.create_task(link.send(make_bulk_step(), TIMEOUT))
    await asyncio.sleep(1)
    sending.cancel()
    await asyncio.wait([sending])
    scene.network.resume("peer")

    assert not link.is_torn
    await link.close()


@in_scene()
async def test_second_stream_has_to_lead_to_the_same_peer(scene: HopScene) -> None:
    link, _ = await scene.open(opening=IN_CHAIN)
    scene.script = change(Hello, lambda _: replace(WELCOME, peer_id=OTHER_ID))

    with pytest.raises(StaleAnnouncementError, match="another peer"):
        await link.send(make_bulk_step(), TIMEOUT)

    await link.close()


@pytest.mark.parametrize("trouble", ["kill", "pause"])
@in_scene()
async def test_closing_never_raises_nor_waits_for_a_peer_in_trouble(
    scene: HopScene, trouble: str
) -> None:
    link, _ = await scene.open()
    getattr(scene.network, trouble)("peer")

    await link.close()

    assert VirtualClock().now() < 5
    scene.network.kill("peer")


class StuckStream:
    """A stream that has no room for another frame, and never will."""

    is_closed = False
    remote_host = None

    async def send(self, frame: bytes) -> None:
        await asyncio.Event().wait()

    def set_gate(self, gate: FrameGate) -> None:
        return

    async def wait_over(self) -> None:
        await asyncio.Future[None]()

    async def receive(self) -> bytes | None:
        return await asyncio.Event().wait() and None

    async def close(self) -> None:
        self.is_closed = True


@in_scene()
async def test_closing_does_not_wait_for_a_stream_that_is_stuck(scene: HopScene) -> None:
    stream = StuckStream()
    link = HopLink(scene.transport, VirtualClock(), scene.make_hop(), OPEN, CLIENT, stream)

    await link.close()

    assert stream.is_closed
    assert VirtualClock().now() < 5
