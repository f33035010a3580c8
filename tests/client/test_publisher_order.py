"""Whom a client brings an adapter first, and for whom it waits."""

from __future__ import annotations

import asyncio

import pytest
from pass_peers import WHOLE, add_pass_peer
from publisher_scene import (
    LARGE,
    SECONDS,
    make_version,
    name_of,
    run_publisher,
)
from session_scene import Scene, now

from shoal.client.finetune.pass_asking import PassAsker
from shoal.client.finetune.publisher import Publisher
from shoal.client.swarm import Fault
from shoal.protocol.errors import RouteError, SilentError
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
            (await add_pass_peer(scene, 1.0)).piece_seconds = 4.0
        with pytest.raises(SilentError):
            await publisher.publish(make_version(LARGE), WHOLE, "a")
        assert 590.0 <= now() <= 610.0

    run_publisher(test)


def test_peer_that_has_worked_is_brought_an_adapter_first() -> None:
    async def test(scene: Scene, asker: PassAsker, publisher: Publisher) -> None:
        peers = [await add_pass_peer(scene, 1.0) for _ in range(10)]
        *slow, proven = sorted(peers, key=lambda peer: peer.identity.peer_id)
        for peer in slow:
            peer.piece_seconds = 4.0
        scene.swarm.note_pass(proven.identity.peer_id)
        await publisher.publish(make_version(LARGE), WHOLE, "a")
        assert now() < 10.0

    run_publisher(test)


def test_peers_of_all_blocks_are_brought_an_adapter_before_more_of_the_same() -> None:
    async def test(scene: Scene, asker: PassAsker, publisher: Publisher) -> None:
        for _ in range(20):
            (await add_pass_peer(scene, 1.0, span=Span(0, 3))).piece_seconds = 4.0
        proven = await add_pass_peer(scene, 1.0, span=Span(0, 3))
        scene.swarm.note_pass(proven.identity.peer_id)
        await add_pass_peer(scene, 1.0, span=Span(3, 6))
        await publisher.publish(make_version(LARGE), WHOLE, "a")
        assert now() < 10.0

    run_publisher(test)


def test_liar_is_brought_nothing() -> None:
    async def test(scene: Scene, asker: PassAsker, publisher: Publisher) -> None:
        await add_pass_peer(scene, 1.0)
        (announced,) = await asker.list_peers()
        scene.swarm.quarantine(announced, Fault.LYING)
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
