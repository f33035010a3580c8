"""Whom a client asks when peers lose the adapters that it brings, or have no room for them."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from pass_peers import WHOLE, add_pass_peer, make_adapted_texts, make_asker
from session_scene import CONFIG, SessionScene, in_scene, now

from shoal.client.adapters.adapter_versions import PublishedAdapter
from shoal.protocol.errors import ErrorCode, RefusedError
from shoal.protocol.ids import AdapterId


@in_scene()
async def test_peer_that_loses_what_it_is_brought_gets_it_twice_and_then_another_is_asked(
    scene: SessionScene,
) -> None:
    liar = await add_pass_peer(scene, 1.0, prefill_tokens_per_second=1e6)
    liar.forgets_adapters = True
    sound = await add_pass_peer(scene, 1.0, prefill_tokens_per_second=1.0)
    asker = make_asker(scene)
    for _ in range(5):
        await asker.ask_forward(WHOLE, make_adapted_texts())
    await asker.close()

    assert (len(liar.asked), len(liar.brought)) == (2, 2)
    assert len(sound.asked) == 5


@in_scene(config=replace(CONFIG, failover_timeout_seconds=30.0))
async def test_peer_without_room_for_an_adapter_is_asked_again_when_it_said(
    scene: SessionScene,
) -> None:
    peer = await add_pass_peer(scene, 1.0)
    peer.has_room_at = now() + 8.0
    asker = make_asker(scene)
    await asker.ask_forward(WHOLE, make_adapted_texts())
    await asker.close()

    assert (len(peer.brought), len(peer.asked)) == (3, 1)
    assert 10.0 <= now() < 13.0


@in_scene()
async def test_another_peer_is_asked_before_anybody_waits_for_room(scene: SessionScene) -> None:
    full = await add_pass_peer(scene, 1.0, prefill_tokens_per_second=1e6)
    full.has_room_at = now() + 8.0
    await add_pass_peer(scene, 1.0, prefill_tokens_per_second=1.0)
    asker, began_at = make_asker(scene), now()
    await asker.ask_forward(WHOLE, make_adapted_texts())
    await asker.close()

    assert len(full.brought) == 1
    assert now() - began_at < 3.0


@in_scene(config=replace(CONFIG, failover_timeout_seconds=12.0))
async def test_room_that_never_comes_is_waited_for_no_longer_than_for_a_lost_peer(
    scene: SessionScene,
) -> None:
    peer = await add_pass_peer(scene, 1.0)
    peer.has_room_at = now() + 1000.0
    asker, began_at = make_asker(scene), now()
    with pytest.raises(RefusedError, match="as the test says") as refusal:
        await asker.ask_forward(WHOLE, make_adapted_texts())
    await asker.close()

    assert refusal.value.code is ErrorCode.NO_ROOM_FOR_ADAPTER
    assert now() - began_at == pytest.approx(12.0, abs=1.0)


@in_scene()
async def test_peer_that_reads_an_adapter_piece_by_piece_is_left_in_time(
    scene: SessionScene,
) -> None:
    slow = await add_pass_peer(scene, 1.0, prefill_tokens_per_second=1e6)
    slow.piece_seconds = 3.0
    await add_pass_peer(scene, 1.0, prefill_tokens_per_second=1.0)
    asker, began_at = make_asker(scene), now()
    await asker.ask_forward(WHOLE, make_adapted_texts(2**22))
    await asker.close()

    assert len(slow.brought) == 1
    assert 140.0 < now() - began_at < 160.0


@in_scene()
async def test_adapter_that_is_refused_is_not_sent_to_its_end(scene: SessionScene) -> None:
    full = await add_pass_peer(scene, 1.0, prefill_tokens_per_second=1e6)
    full.refuses_heads, full.piece_seconds = True, 0.01
    await add_pass_peer(scene, 1.0, prefill_tokens_per_second=1.0)
    asker = make_asker(scene)
    await asker.ask_forward(WHOLE, make_adapted_texts(2**22))
    await asker.close()

    assert len(full.brought) == 1
    assert full.num_pieces < 2**24 / (48 * 2**10) / 2


@in_scene()
async def test_published_adapter_that_no_peer_finds_fails_at_once(scene: SessionScene) -> None:
    for _ in range(2):
        peer = await add_pass_peer(scene, 1.0)
        peer.forgets_adapters = True
    texts = replace(make_adapted_texts(), adapters=(PublishedAdapter(AdapterId(b"p" * 32)),))
    asker, began_at = make_asker(scene), now()
    with pytest.raises(RefusedError) as refusal:
        await asker.ask_forward(WHOLE, texts)
    await asker.close()

    assert refusal.value.code is ErrorCode.UNKNOWN_ADAPTER
    assert now() - began_at < 1.0


@pytest.mark.parametrize("seconds", [8.0, 1000.0])
@in_scene()
async def test_published_adapter_that_a_peer_lacks_is_waited_for(
    scene: SessionScene, seconds: float
) -> None:
    peer = await add_pass_peer(scene, 1.0)
    peer.forgets_adapters, peer.fetching_seconds = True, 2.0
    texts = replace(make_adapted_texts(), adapters=(PublishedAdapter(AdapterId(b"p" * 32)),))
    asker, began_at = make_asker(scene), now()
    asking = asyncio.create_task(asker.ask_forward(WHOLE, texts))
    await asyncio.sleep(min(seconds, 50.0))
    peer.forgets_adapters = False
    if seconds == 8.0:
        await asking
        assert now() - began_at < 12.0
    else:
        with pytest.raises(RefusedError) as refusal:
            await asking
        assert refusal.value.code is ErrorCode.UNKNOWN_ADAPTER
        assert len(peer.asked) <= 12
    await asker.close()
