"""Whom a client brings an adapter first, and for whom it waits."""

from __future__ import annotations

import asyncio
import itertools

import pytest
from pass_peers import WHOLE, add_pass_peer
from publisher_scene import LARGE, SECONDS, make_version, name_of, run_publisher
from session_scene import Scene, now

from shoal.client.passes.pass_asking import PassAsker
from shoal.client.publishing.publisher import Publisher
from shoal.client.routing.route import Fault
from shoal.protocol.errors import RouteError, SilentError
from shoal.protocol.messages.adapters import allow_upload_seconds
from shoal.protocol.net.memory import loopback_wire
from shoal.protocol.spans import Span


def test_slow_peer_gets_an_adapter_while_the_others_use_it() -> None:
    async def test(scene: Scene, asker: PassAsker, publisher: Publisher) -> None:
        slow, _ = [await add_pass_peer(scene, 1.0) for _ in range(2)]
        slow.piece_seconds = 0.3
        await publisher.publish(make_version(LARGE), WHOLE, "a")
        assert (now() < 10.0, slow.published) == (True, {})
        await asyncio.sleep(SECONDS)
        assert len(slow.published) == 1

    run_publisher(test)


def test_peers_that_take_an_adapter_for_ever_keep_nobody_waiting_for_ever() -> None:
    async def test(scene: Scene, asker: PassAsker, publisher: Publisher) -> None:
        for _ in range(20):
            peer = await add_pass_peer(scene, 1.0)
            peer.piece_seconds, peer.is_patient = 4.0, True
        with pytest.raises(SilentError):
            await publisher.publish(make_version(LARGE), WHOLE, "a")
        assert now() <= 2 * allow_upload_seconds(2**24)
        await asyncio.sleep(400.0)  # they take what the network holds still

    run_publisher(test)


@pytest.mark.parametrize(("num_peers", "piece_seconds"), [(3, 0.4), (20, 0.15)])
def test_all_peers_get_an_adapter_on_a_slow_line_that_they_share(
    monkeypatch: pytest.MonkeyPatch, num_peers: int, piece_seconds: float
) -> None:
    monkeypatch.setattr(loopback_wire, "WINDOW_BYTES", 2**19)  # about what gRPC holds back

    async def test(scene: Scene, asker: PassAsker, publisher: Publisher) -> None:
        line, peers = asyncio.Lock(), [await add_pass_peer(scene, 1.0) for _ in range(num_peers)]
        for peer in peers:
            peer.line, peer.piece_seconds = line, piece_seconds  # 120 or 330 kB/s together
        await publisher.publish(make_version(LARGE), WHOLE, "a")
        await asyncio.sleep(2000.0)
        assert all(peer.published for peer in peers)
        assert [peer.num_pieces for peer in peers] == [342] * num_peers

    run_publisher(test)


def test_state_before_waits_for_the_newest() -> None:
    async def test(scene: Scene, asker: PassAsker, publisher: Publisher) -> None:
        fast = await add_pass_peer(scene, 1.0)
        await publisher.publish(make_version(LARGE), WHOLE, "a")
        slow = [await add_pass_peer(scene, 1.0) for _ in range(20)]
        for peer in slow:
            peer.piece_seconds = 2.5
        await asyncio.sleep(SECONDS)
        assert sum(len(peer.brought) for peer in slow) >= 3
        began_at, newest = now(), make_version(LARGE + 2)
        await publisher.publish(newest, WHOLE, "a")
        assert now() - began_at < 10.0
        assert name_of(newest) in fast.published

    run_publisher(test)


def test_peer_that_has_worked_is_brought_an_adapter_first() -> None:
    async def test(scene: Scene, asker: PassAsker, publisher: Publisher) -> None:
        peers = [await add_pass_peer(scene, 1.0) for _ in range(10)]
        *slow, proven = sorted(peers, key=lambda peer: peer.identity.peer_id)
        for peer in slow:
            peer.piece_seconds = 4.0
        scene.swarm.book.note_pass(proven.identity.peer_id)
        await publisher.publish(make_version(LARGE), WHOLE, "a")
        assert now() < 10.0

    run_publisher(test)


def test_peers_of_all_blocks_are_brought_an_adapter_before_more_of_the_same() -> None:
    async def test(scene: Scene, asker: PassAsker, publisher: Publisher) -> None:
        for _ in range(20):
            (await add_pass_peer(scene, 1.0, span=Span(0, 3))).piece_seconds = 4.0
        proven = await add_pass_peer(scene, 1.0, span=Span(0, 3))
        scene.swarm.book.note_pass(proven.identity.peer_id)
        await add_pass_peer(scene, 1.0, span=Span(3, 6))
        await publisher.publish(make_version(LARGE), WHOLE, "a")
        assert now() < 10.0

    run_publisher(test)


@pytest.mark.parametrize("mute", [0, 1])
def test_peers_that_have_worked_come_before_those_whose_blocks_they_serve(mute: int) -> None:
    async def test(scene: Scene, asker: PassAsker, publisher: Publisher) -> None:
        proven = [await add_pass_peer(scene, 1.0) for _ in range(2)]
        await publisher.publish(make_version(8), WHOLE, "a")
        proven[mute].is_mute = True
        for start, stop in itertools.combinations(range(7), 2):
            stranger = await add_pass_peer(scene, 1.0, span=Span(start, stop))
            stranger.piece_seconds = 2.5
        await asyncio.sleep(1.0)
        began_at = now()
        await publisher.publish(make_version(LARGE), WHOLE, "b")
        assert now() - began_at < 10.0

    run_publisher(test)


def test_liar_is_brought_nothing() -> None:
    async def test(scene: Scene, asker: PassAsker, publisher: Publisher) -> None:
        await add_pass_peer(scene, 1.0)
        (announced,) = await asker.list_peers()
        scene.swarm.book.quarantine(announced, Fault.LYING)
        with pytest.raises(RouteError):
            await publisher.publish(make_version(8), WHOLE, "a")

    run_publisher(test)


def test_peer_that_has_kept_one_and_failed_once_comes_before_strangers() -> None:
    async def test(scene: Scene, asker: PassAsker, publisher: Publisher) -> None:
        proven = await add_pass_peer(scene, 1.0, span=Span(3, 6))
        await publisher.publish(make_version(8), WHOLE, "a")
        proven.is_mute = True
        with pytest.raises(SilentError):
            await publisher.publish(make_version(10), WHOLE, "a")
        proven.is_mute = False
        for _ in range(20):
            (await add_pass_peer(scene, 1.0, span=Span(0, 3))).piece_seconds = 4.0
        publishing = asyncio.create_task(publisher.publish(make_version(LARGE), WHOLE, "b"))
        await asyncio.sleep(5.0)
        assert name_of(make_version(LARGE)) in proven.published
        publishing.cancel()
        await asyncio.wait([publishing])

    run_publisher(test)
