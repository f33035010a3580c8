"""Who is told of as lost in passes: whoever took part, once, and nobody else."""

from __future__ import annotations

import asyncio

import pytest
from pass_peers import WHOLE, PassPeer, add_pass_peer, make_asker, make_texts
from session_scene import SessionScene, in_scene

from shoal.client.passes.pass_asking import PassAsker
from shoal.protocol.ids import PeerId


async def add_two(scene: SessionScene) -> tuple[PassPeer, PassPeer]:
    """Add a peer that is asked whenever it may be, and one that takes over."""
    first = await add_pass_peer(scene, 1.0, prefill_tokens_per_second=1e6)
    return first, await add_pass_peer(scene, 3.0, prefill_tokens_per_second=1.0)


def take_lost(asker: PassAsker) -> list[PeerId]:
    return [one.lost.peer.peer_id for one in asker.failovers.take()]


def list_quarantined(scene: SessionScene) -> list[PeerId]:
    peers = scene.swarm.book.view.peers
    return [peer.peer_id for peer in peers if scene.swarm.book.is_quarantined(peer)]


async def ask(asker: PassAsker) -> None:
    texts, grads_BTH = make_texts()
    output = await asker.ask_forward(WHOLE, texts)
    await asker.ask_backward(WHOLE, texts, grads_BTH, output.weights)


@pytest.mark.parametrize("trouble", ["kill", "pause"])
@in_scene()
async def test_peer_that_never_took_part_is_not_told_of(scene: SessionScene, trouble: str) -> None:
    gone, _ = await add_two(scene)
    getattr(scene.network, trouble)("pass1")
    asker = make_asker(scene)
    await ask(asker)
    await asker.close()

    assert list_quarantined(scene) == [gone.identity.peer_id]
    assert take_lost(asker) == []


@in_scene()
async def test_peer_that_is_lost_in_its_first_pass_is_told_of(scene: SessionScene) -> None:
    dying, heir = await add_two(scene)
    dying.seconds = 10.0
    asker = make_asker(scene)
    asking = asyncio.create_task(ask(asker))
    await asyncio.sleep(5.0)
    scene.network.kill("pass1")
    await asking
    await asker.close()

    assert len(dying.asked) == 1
    (failover,) = asker.failovers.take()
    assert failover.lost.peer.peer_id == dying.identity.peer_id
    assert failover.what_happened == "was lost"
    assert [hop.peer.peer_id for hop in failover.replacements] == [heir.identity.peer_id]


@in_scene()
async def test_peer_that_died_is_told_of_once_however_long_it_is_announced(
    scene: SessionScene,
) -> None:
    dying, _ = await add_two(scene)
    asker = make_asker(scene)
    await ask(asker)
    scene.network.kill("pass1")
    await ask(asker)
    assert take_lost(asker) == [dying.identity.peer_id]

    for seconds in (16.0, 31.0, 61.0):  # quarantines
        await asyncio.sleep(seconds)
        assert list_quarantined(scene) == []
        await ask(asker)
        assert list_quarantined(scene) == [dying.identity.peer_id]
        assert take_lost(asker) == []
    await asker.close()


@in_scene()
async def test_peer_that_came_back_and_is_lost_again_is_told_of_again(scene: SessionScene) -> None:
    peer, _ = await add_two(scene)
    asker = make_asker(scene)
    await ask(asker)
    for _ in range(2):
        scene.network.pause("pass1")
        await ask(asker)
        assert take_lost(asker) == [peer.identity.peer_id]
        scene.network.resume("pass1")
        await asyncio.sleep(100.0)
        await ask(asker)
        assert take_lost(asker) == []
    await asker.close()
