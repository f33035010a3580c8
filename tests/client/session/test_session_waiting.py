"""A session for which there is no room, or no route: what it waits for, and how long."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from session_scene import CONFIG, Oracle, SessionScene, decline_when, draw, in_scene, now

from shoal.client.routing.route import Hop
from shoal.protocol.errors import CacheFullError, ErrorCode, RefusedError, RouteError, ShoalError
from shoal.protocol.ids import AdapterId
from shoal.protocol.messages.fields import Message
from shoal.protocol.messages.session import Open, Step
from shoal.protocol.spans import Span


@pytest.mark.parametrize("code", [ErrorCode.CACHE_FULL, ErrorCode.BUSY, ErrorCode.DRAINING])
@in_scene()
async def test_peer_without_room_is_left_for_its_replica(
    scene: SessionScene, code: ErrorCode
) -> None:
    full = await scene.add("full", 0, 6, decode_steps_per_second=1e6)
    await scene.add("free", 0, 6)
    full.mischief = decline_when(lambda message: isinstance(message, Open), code, 2.0)
    session = scene.open_session()

    assert torch.equal(await session.step(draw(1, 3)), Oracle().step(draw(1, 3)))

    assert scene.names_of(session) == ["free"]
    assert now() < 1


@pytest.mark.parametrize("retry_after", [1.0, None])
@in_scene()
async def test_peer_that_fetches_an_adapter_is_left_for_its_replica_and_not_avoided(
    scene: SessionScene, retry_after: float | None
) -> None:
    fetching = await scene.add("fetching", 0, 6, decode_steps_per_second=1e6)
    await scene.add("free", 0, 6)
    fetching.mischief = decline_when(
        lambda message: isinstance(message, Open), ErrorCode.UNKNOWN_ADAPTER, retry_after
    )
    session = scene.open_session()
    await session.step(draw(1, 3))
    assert scene.names_of(session) == ["free"]
    assert scene.quarantined == ([] if retry_after else ["fetching"])


class PublishedByNobody:
    """An adapter that hops fetch themselves."""

    is_published = True

    async def name_for(self, span: Span) -> AdapterId:
        return AdapterId(b"p" * 32)

    async def bring(self, hop: Hop) -> None:
        return

    def note_failure(self, hop: Hop, error: ShoalError) -> None:
        return


@in_scene()
async def test_published_adapter_that_no_peer_finds_fails_at_once_and_nobody_is_avoided(
    scene: SessionScene,
) -> None:
    for name in ("a", "b"):
        peer = await scene.add(name, 0, 6)
        peer.mischief = decline_when(
            lambda message: isinstance(message, Open), ErrorCode.UNKNOWN_ADAPTER, None
        )
    session = scene.open_session()
    session.state.facts = replace(session.state.facts, adapter=PublishedByNobody())

    with pytest.raises(RefusedError, match=r"blocks 0:6\) refused") as refusal:
        await session.step(draw(1, 3))

    assert refusal.value.code is ErrorCode.UNKNOWN_ADAPTER
    assert now() < 1.0
    assert scene.quarantined == []


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (ErrorCode.CACHE_FULL, "had no room"),
        (ErrorCode.BUSY, "had no room"),
        (ErrorCode.DRAINING, "is leaving"),
        (ErrorCode.UNKNOWN_SESSION, "lost the session"),
        (ErrorCode.UNKNOWN_ADAPTER, "lost the adapter"),
        (ErrorCode.NO_ROOM_FOR_ADAPTER, "had no room for the adapter"),
        (ErrorCode.INTERNAL, "was lost"),
    ],
)
@in_scene()
async def test_failover_tells_what_happened_to_the_peer(
    scene: SessionScene, code: ErrorCode, words: str
) -> None:
    full = await scene.add("full", 0, 6, decode_steps_per_second=1e6)
    await scene.add("free", 0, 6)
    full.mischief = decline_when(lambda message: isinstance(message, Step), code, 2.0)
    session = scene.open_session()

    await session.step(draw(1, 3))

    assert session.failovers[0].what_happened == words
    assert scene.names_of(session) == ["free"]


@in_scene()
async def test_failover_tells_a_silent_peer_from_one_that_hung_up(scene: SessionScene) -> None:
    for name in ("a", "b", "c"):
        await scene.add(name, 0, 6)
    session = scene.open_session()
    await session.step(draw(1, 3))
    for trouble in (scene.network.pause, scene.network.kill):
        trouble(scene.names_of(session)[0])
        await session.step(draw(2))

    happened = [failover.what_happened for failover in session.failovers]
    assert happened == ["did not answer in time", "was lost"]


@pytest.mark.parametrize("kind", [Open, Step])
@in_scene()
async def test_no_room_anywhere_is_said_after_a_bounded_time(
    scene: SessionScene, kind: type[Message]
) -> None:
    is_full = True
    for name in ("a", "b"):
        (await scene.add(name, 0, 6)).mischief = decline_when(
            lambda message: is_full and isinstance(message, kind), ErrorCode.CACHE_FULL, 2.0
        )
    session = scene.open_session()

    with pytest.raises(CacheFullError) as caught:
        await session.step(draw(1, 3))

    assert caught.value.retry_after_seconds == 2.0
    seconds = CONFIG.failover_timeout_seconds
    assert 0.8 * seconds <= now() <= 2.5 * seconds
    is_full = False
    assert torch.equal(await session.step(draw(1, 3)), Oracle().step(draw(1, 3)))


@in_scene()
async def test_room_that_becomes_free_meanwhile_is_used(scene: SessionScene) -> None:
    for name in ("a", "b"):
        (await scene.add(name, 0, 6)).mischief = decline_when(
            lambda _: now() < 8, ErrorCode.CACHE_FULL, 2.0
        )

    session = scene.open_session()

    assert torch.equal(await session.step(draw(1, 3)), Oracle().step(draw(1, 3)))
    assert 8 <= now() < 12


@in_scene(config=replace(CONFIG, failover_timeout_seconds=20.0))
async def test_what_never_fits_anywhere_is_said_at_once(scene: SessionScene) -> None:
    for name in ("a", "b"):
        (await scene.add(name, 0, 6)).mischief = decline_when(
            lambda message: isinstance(message, Open), ErrorCode.CACHE_FULL, None
        )

    with pytest.raises(CacheFullError):
        await scene.open_session().step(draw(1, 3))
    assert now() < 1


@in_scene()
async def test_refusal_of_a_peer_that_lives_is_told_and_not_the_silence_of_one_that_died(
    scene: SessionScene,
) -> None:
    await scene.add("dead", 0, 6)
    (await scene.add("living", 0, 6)).mischief = decline_when(
        lambda message: isinstance(message, Open), ErrorCode.CACHE_FULL, None
    )
    scene.network.kill("dead")

    with pytest.raises(CacheFullError):
        await scene.open_session().step(draw(1, 3))


@in_scene()
async def test_blocks_that_nobody_serves_are_named_and_the_session_goes_on_later(
    scene: SessionScene,
) -> None:
    await scene.add("a", 0, 3)
    session = scene.open_session()

    with pytest.raises(RouteError) as caught:
        await session.step(draw(1, 3))

    assert caught.value.missing == (Span(3, 6),)
    assert now() == pytest.approx(CONFIG.failover_timeout_seconds, abs=1)
    await scene.add("b", 3, 6)
    assert torch.equal(await session.step(draw(1, 3)), Oracle().step(draw(1, 3)))


@in_scene(config=replace(CONFIG, allowed_servers=("12D3",)))
async def test_allowed_servers_that_leave_nobody_are_why_a_session_fails(
    scene: SessionScene,
) -> None:
    await scene.add("a", 0, 6)

    with pytest.raises(RouteError, match="allowed_servers leaves nobody for blocks 0:6"):
        await scene.open_session().step(draw(1, 3))

    assert now() < CONFIG.failover_timeout_seconds


@in_scene()
async def test_peers_that_cannot_be_reached_come_with_advice(scene: SessionScene) -> None:
    await scene.add("a", 0, 6)
    scene.network.kill("a")

    with pytest.raises(
        RouteError,
        match=r"reached in time for blocks 0:6: .*; run `shoal doctor MODEL --join CODE`",
    ):
        await scene.open_session().step(draw(1, 3))


@in_scene()
async def test_lost_hop_without_a_replica_is_named_and_the_session_goes_on_later(
    scene: SessionScene,
) -> None:
    for name, start, stop in (("a", 0, 2), ("b", 2, 4), ("c", 4, 6)):
        await scene.add(name, start, stop)
    session, oracle = scene.open_session(), Oracle()
    assert torch.equal(await session.step(draw(1, 3)), oracle.step(draw(1, 3)))
    scene.network.kill("b")

    for _ in range(2):
        with pytest.raises(RouteError) as caught:
            await session.step(draw(2))
        assert caught.value.missing == (Span(2, 4),)
        assert session.position == 3
    await scene.add("b2", 2, 4)

    assert torch.equal(await session.step(draw(2)), oracle.step(draw(2)))
    # The first hop took the token three times over; it rolled back each time.
    assert len(scene.peers["a"].opens) == 1
