"""How long those who publish wait for peers that are slow, silent, or take an adapter for ever."""

from __future__ import annotations

import asyncio

import pytest
from pass_peers import WHOLE, add_pass_peer
from publisher_scene import LARGE, make_version, name_of, run_publisher
from session_scene import Scene, now

from shoal.client.passes.pass_asking import PassAsker
from shoal.client.publishing.publisher import Publisher
from shoal.protocol.errors import SilentError
from shoal.protocol.net.clock import VirtualClock
from shoal.protocol.net.memory import loopback_wire
from shoal.protocol.spans import Span


@pytest.fixture(autouse=True)
def _small_windows(monkeypatch: pytest.MonkeyPatch) -> None:  # pyright: ignore[reportUnusedFunction]
    monkeypatch.setattr(loopback_wire, "WINDOW_BYTES", 2**19)


def test_silence_about_a_small_adapter_is_noticed_soon() -> None:
    async def test(scene: Scene, asker: PassAsker, publisher: Publisher) -> None:
        (await add_pass_peer(scene, 1.0)).is_mute = True
        with pytest.raises(SilentError):
            await publisher.publish(make_version(8), WHOLE, "a")
        assert now() < 5.0

    run_publisher(test)


def test_small_adapter_waits_for_a_large_one_that_goes_to_the_same_peer() -> None:
    async def test(scene: Scene, asker: PassAsker, publisher: Publisher) -> None:
        peer = await add_pass_peer(scene, 1.0)
        peer.piece_seconds = 1.0
        large = asyncio.create_task(publisher.publish(make_version(LARGE), WHOLE, "a"))
        await asyncio.sleep(1.0)
        await publisher.publish(make_version(8), WHOLE, "b")
        await large
        assert len(peer.published) == 2

    run_publisher(test)


def test_peers_that_drip_hold_up_nobody_who_has_worked(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(scene: Scene, asker: PassAsker, publisher: Publisher) -> None:
        sound = await add_pass_peer(scene, 1.0)
        await publisher.publish(make_version(8), WHOLE, "first")
        for _ in range(16):
            dripping = await add_pass_peer(scene, 1.0)
            dripping.piece_seconds, dripping.is_patient = 40.0, True
        await asyncio.sleep(1.0)
        await publisher.publish(make_version(LARGE), WHOLE, "a")
        assert name_of(make_version(LARGE)) in sound.published
        await asyncio.sleep(60.0)
        began_at = now()
        await publisher.publish(make_version(10), WHOLE, "b")
        assert now() - began_at < 10.0
        await publisher.close()
        await asyncio.sleep(500.0)  # they take what the network holds still

    run_publisher(test)


def test_strangers_that_are_slow_hold_up_nobody_who_has_worked() -> None:
    async def test(scene: Scene, asker: PassAsker, publisher: Publisher) -> None:
        sound = await add_pass_peer(scene, 1.0)
        await publisher.publish(make_version(8), WHOLE, "first")
        await publisher.withdraw(name_of(make_version(8)))
        for _ in range(10):
            (await add_pass_peer(scene, 1.0)).piece_seconds = 2.5
        await asyncio.sleep(1.0)
        await publisher.publish(make_version(LARGE), WHOLE, "a")
        publishing = asyncio.create_task(publisher.publish(make_version(10), WHOLE, "b"))
        await asyncio.sleep(2.0)
        assert name_of(make_version(10)) in sound.published
        await publishing

    run_publisher(test)


def test_what_the_network_holds_may_be_long_on_its_way() -> None:
    async def test(scene: Scene, asker: PassAsker, publisher: Publisher) -> None:
        peer = await add_pass_peer(scene, 1.0)
        peer.piece_seconds = 2.5
        await publisher.publish(make_version(2**17), WHOLE, "a")  # 11 pieces, all sent at once
        assert peer.num_pieces == 11
        assert now() > 25.0

    run_publisher(test)


def test_faster_peers_are_brought_an_adapter_first() -> None:
    async def test(scene: Scene, asker: PassAsker, publisher: Publisher) -> None:
        peers = sorted(
            [await add_pass_peer(scene, 1.0) for _ in range(10)],
            key=lambda one: one.identity.peer_id,
        )
        for peer in peers[:-1]:
            peer.piece_seconds = 2.5
        await publisher.publish(make_version(8), WHOLE, "a")
        await asyncio.sleep(20.0)
        assert all(peer.published for peer in peers)
        began_at = now()
        await publisher.publish(make_version(LARGE), WHOLE, "b")
        assert now() - began_at < 10.0

    run_publisher(test)


def test_blocks_that_only_a_very_slow_peer_takes_are_not_waited_for_to_the_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test(scene: Scene, asker: PassAsker, publisher: Publisher) -> None:
        await add_pass_peer(scene, 1.0, span=Span(0, 3))
        slow = await add_pass_peer(scene, 1.0, span=Span(3, 6))
        slow.piece_seconds = 2.5
        await publisher.publish(make_version(LARGE), WHOLE, "a")
        assert (now(), slow.published) == (pytest.approx(600.0, abs=5.0), {})
        await asyncio.sleep(400.0)
        assert len(slow.published) == 1

    run_publisher(test)
    assert "no peer keeps the adapter for blocks 3:6 yet" in caplog.text


def test_process_that_stood_still_does_not_take_silence_for_an_answer() -> None:
    async def test(scene: Scene, asker: PassAsker, publisher: Publisher) -> None:
        peer, version = await add_pass_peer(scene, 1.0), make_version(8)
        await publisher.publish(version, WHOLE, "a")
        await asyncio.sleep(50.0)
        peer.published.clear()
        open_stream = scene.client.open_stream

        async def open_late(*arguments: object) -> object:
            VirtualClock().stall(15.0)
            return await open_stream(*arguments)  # pyright: ignore[reportArgumentType]

        scene.client.open_stream = open_late  # pyright: ignore[reportAttributeAccessIssue]
        await publisher.publish(version, WHOLE, "b")
        assert name_of(version) in peer.published

    run_publisher(test)


def test_uploads_that_stand_still_are_not_under_way() -> None:
    async def test(scene: Scene, asker: PassAsker, publisher: Publisher) -> None:
        peer = await add_pass_peer(scene, 1.0)
        peer.piece_seconds, peer.is_patient = 40.0, True
        publishing = asyncio.create_task(publisher.publish(make_version(LARGE), WHOLE, "a"))
        await asyncio.sleep(1.0)
        assert asker.line.num_bytes > 0
        await asyncio.sleep(30.0)
        assert asker.line.num_bytes == 0
        with pytest.raises(SilentError):
            await publishing
        assert now() < 200.0
        await asyncio.sleep(500.0)  # it takes what the network holds still

    run_publisher(test)


def test_state_that_somebody_waits_for_is_brought_while_a_later_one_is() -> None:
    async def test(scene: Scene, asker: PassAsker, publisher: Publisher) -> None:
        peer = await add_pass_peer(scene, 1.0)
        peer.piece_seconds = 0.1
        older, newer = make_version(LARGE), make_version(LARGE + 2)
        first = asyncio.create_task(publisher.publish(older, WHOLE, "a"))
        await asyncio.sleep(10.0)
        await publisher.publish(newer, WHOLE, "a")
        await first
        assert peer.published.keys() == {name_of(older), name_of(newer)}

    run_publisher(test)
