"""Whom a client asks for passes, by what it has seen of them and not by what they say."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace

import pytest
from pass_peers import WHOLE, add_pass_peer, make_asker, make_texts
from session_scene import CONFIG, SessionScene, in_scene

from shoal.client.passes.pass_asking import PassFailures
from shoal.client.routing.route import Fault, PeerFailure
from shoal.protocol.errors import (
    ErrorCode,
    RefusedError,
    RouteError,
    ShoalError,
    UnavailableError,
)
from shoal.protocol.ids import PeerId
from shoal.protocol.net.clock import SystemClock
from shoal.protocol.net.retry import Backoff, Retry
from shoal.protocol.spans import Span

HUGE_TEXT = 2**13
"""So many tokens that their bytes say something of the line."""


@in_scene()
async def test_peer_that_says_it_takes_no_time_is_not_asked_for_everything(
    scene: SessionScene,
) -> None:
    slow = await add_pass_peer(scene, 10.0, says_queue_seconds=10.0)
    fast = await add_pass_peer(scene, 1.0)
    asker, (texts, _) = make_asker(scene), make_texts()
    for _ in range(12):
        await asker.ask_forward(WHOLE, texts)
    await asker.close()

    assert len(slow.asked) <= 2
    assert len(fast.asked) >= 10


@in_scene()
async def test_what_a_peer_says_of_its_times_makes_no_line_faster(scene: SessionScene) -> None:
    await add_pass_peer(scene, 10.0, says_queue_seconds=9.999999)
    asker, (texts, _) = make_asker(scene), make_texts(HUGE_TEXT)
    await asker.ask_forward(WHOLE, texts)
    await asker.close()

    num_bytes = 2 * 4 * texts.hidden_BTH.numel()
    assert scene.swarm.book.bandwidth.expect_seconds(num_bytes) == pytest.approx(10.0, abs=0.1)


@in_scene()
async def test_peer_that_is_crowded_by_others_is_passed_over(scene: SessionScene) -> None:
    """That it computes fast once it gets there does not help."""
    crowded, quiet = await add_pass_peer(scene, 0.5), await add_pass_peer(scene, 1.0)
    asker, (texts, _) = make_asker(scene), make_texts()
    for _ in range(4):
        await asyncio.gather(*(asker.ask_forward(WHOLE, texts) for _ in range(4)))
    others = await _crowd(scene, crowded.is_free)
    for _ in range(4):
        await asker.ask_forward(WHOLE, texts)
    crowded.asked.clear()
    quiet.asked.clear()
    for _ in range(8):
        await asker.ask_forward(WHOLE, texts)
    others.cancel()
    await asker.close()

    assert len(crowded.asked) <= 1


async def _crowd(scene: SessionScene, is_free: asyncio.Lock) -> asyncio.Task[None]:
    """Let passes of somebody else wait at a peer at any time."""

    async def go_on() -> None:
        while True:
            async with is_free:
                await asyncio.sleep(3.0)

    crowding = asyncio.create_task(go_on())
    await asyncio.sleep(0)
    return crowding


@in_scene()
async def test_gradients_come_through_the_weights_of_the_way_there(scene: SessionScene) -> None:
    other = await add_pass_peer(scene, 0.1, weights="bf16")
    same = await add_pass_peer(scene, 5.0, weights="int8")
    asker, (texts, grads) = make_asker(scene), make_texts()
    there = await asker.ask_forward(WHOLE, texts, "int8")
    await asker.ask_backward(WHOLE, texts, grads, there.weights)
    await asker.close()

    assert (len(other.asked), len(same.asked)) == (0, 2)
    assert there.weights == "int8"


def test_error_names_the_blocks_that_failed_last_or_what_a_peer_said_against_the_texts() -> None:
    def fail(*failures: PeerFailure) -> ShoalError:
        noted = PassFailures(Retry(Backoff(0.1, 1.0), SystemClock()), SystemClock().now, 0.0)
        for number, failure in enumerate(failures):
            noted.note(failure, Span(number, number + 1))
            if isinstance(failure, RefusedError):
                noted.unable[PeerId(str(number))] = failure
        with pytest.raises(ShoalError) as raised:
            asyncio.run(noted.pause())
        return raised.value

    gone, refused = UnavailableError("gone"), RefusedError(ErrorCode.OUT_OF_MEMORY, "too long")
    assert str(fail(gone, gone)) == "no peer accepts passes for blocks 1:2: gone"
    assert fail(gone, refused, gone) is refused


def test_peer_that_gets_room_just_now_is_waited_for_no_longer() -> None:
    times = itertools.count(0.0, 0.5)  # it is later whenever somebody looks
    failures = PassFailures(Retry(Backoff(0.1, 1.0), SystemClock()), lambda: next(times), 0.0)
    failures.retry.deadline = 1.0
    failures.note_full(PeerId("a"), 0.5)

    asyncio.run(failures.wait_for_room())


@in_scene(config=replace(CONFIG, failover_timeout_seconds=5.0))
async def test_weights_that_nobody_has_any_more_are_named(scene: SessionScene) -> None:
    await add_pass_peer(scene, 0.1, weights="bf16")
    asker, (texts, grads) = make_asker(scene), make_texts()
    with pytest.raises(RouteError, match="with int8 weights"):
        await asker.ask_backward(WHOLE, texts, grads, "int8")
    await asker.close()


@in_scene()
async def test_peer_of_the_same_weights_is_asked_again_though_others_are_less_in_doubt(
    scene: SessionScene,
) -> None:
    await add_pass_peer(scene, 0.1, weights="bf16")
    doubted = await add_pass_peer(scene, 0.1, weights="int8")
    asker, (texts, grads) = make_asker(scene), make_texts()
    await asker.ask_forward(WHOLE, texts, "int8")
    announced = scene.swarm.book.view.find(doubted.identity.peer_id)
    assert announced is not None
    scene.swarm.book.quarantine(announced, Fault.SILENT)
    await asker.ask_backward(WHOLE, texts, grads, "int8")
    await asker.close()

    assert len(doubted.asked) == 2


@in_scene()
async def test_streams_that_nobody_uses_any_more_are_hung_up_on(scene: SessionScene) -> None:
    """Long before the client is closed, and those to peers that it never asks again, too."""
    for _ in range(3):
        await add_pass_peer(scene, 1.0)
    asker, (texts, _) = make_asker(scene), make_texts()
    await asyncio.gather(*(asker.ask_forward(WHOLE, texts) for _ in range(12)))
    await asyncio.sleep(30.0)

    assert repr(scene.network).startswith("LoopbackNetwork(streams=0,"), scene.network
    assert repr(asker) == "<PassAsker, <PassLinks, 0 in use, 0 idle, 0 peers wanted>>"
    await asker.close()


@in_scene()
async def test_peer_that_forgets_its_streams_now_and_then_is_forgiven_each_time(
    scene: SessionScene,
) -> None:
    """As every peer does while the machine of the client is suspended."""
    await add_pass_peer(scene, 1.0)
    asker, (texts, _) = make_asker(scene), make_texts()
    error = RefusedError(ErrorCode.UNKNOWN_SESSION, "the stream was idle for too long")
    are_quarantined: list[bool] = []
    for num_times in (1, 1, 2):
        await asker.ask_forward(WHOLE, texts)
        (hop,) = asker.failovers.take_recent_hops()
        for _ in range(num_times):
            asker.note_failure(hop, error, asker.make_failures())
        are_quarantined.append(scene.swarm.book.is_quarantined(hop.peer))
    assert are_quarantined == [False, False, True]
    await asker.close()
