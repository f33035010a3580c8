"""What a client publishes: kept alive at all peers, those that come later too, until taken back."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from pass_peers import WHOLE, PassPeer, add_pass_peer, make_adapted_texts, make_asker
from session_scene import Scene, now, run

from shoal.client.finetune.adapter_versions import AdapterVersion
from shoal.client.finetune.publications import Publications
from shoal.protocol.errors import RouteError, UsageError
from shoal.protocol.ids import AdapterId

SECONDS = 110.0
"""A third of what peers keep one; what the scene announces expires after three of them."""


def make_version(num_numbers: int) -> AdapterVersion:
    (adapter,) = make_adapted_texts(num_numbers).adapters
    assert isinstance(adapter, AdapterVersion)
    return adapter.publish()


def name_of(version: AdapterVersion) -> AdapterId:
    cut = version.cut(WHOLE)
    assert cut is not None
    return cut.name


def count_heads(peer: PassPeer) -> Counter[AdapterId]:
    assert all(head.is_published for head in peer.brought)
    return Counter(head.adapter for head in peer.brought)


def test_published_adapter_is_renewed_until_it_is_withdrawn() -> None:
    async def test(scene: Scene) -> None:
        first, one, other = await add_pass_peer(scene, 1.0), make_version(8), make_version(10)
        asker = make_asker(scene)
        publications = Publications(asker)
        assert await publications.publish(one, WHOLE, "a") == 1
        assert await publications.publish(other, WHOLE, "b") == 1
        later = await add_pass_peer(scene, 1.0)
        await asyncio.sleep(SECONDS)

        assert min(count_heads(first).values()) > 1
        assert count_heads(later).keys() == {name_of(one), name_of(other)}
        await publications.withdraw(name_of(one))
        assert first.withdrawn == later.withdrawn == [name_of(one)]
        with pytest.raises(UsageError, match="was not published here"):
            await publications.withdraw(name_of(one))

        before = count_heads(first)
        await asyncio.sleep(SECONDS)
        assert count_heads(first)[name_of(one)] == before[name_of(one)]
        assert count_heads(first)[name_of(other)] > before[name_of(other)]
        await publications.close()
        assert first.withdrawn == later.withdrawn == [name_of(one), name_of(other)]
        before = count_heads(first)
        await asyncio.sleep(SECONDS)
        assert count_heads(first) == before
        await asker.close()

    run(test)


def test_state_before_the_newest_is_not_renewed_but_may_be_taken_back() -> None:
    async def test(scene: Scene) -> None:
        peer, old, new = await add_pass_peer(scene, 1.0), make_version(8), make_version(10)
        asker = make_asker(scene)
        publications = Publications(asker)
        await publications.publish(old, WHOLE, "a")
        await publications.publish(new, WHOLE, "a")
        await asyncio.sleep(SECONDS)

        assert count_heads(peer)[name_of(old)] == 1
        assert count_heads(peer)[name_of(new)] > 1
        assert peer.withdrawn == []
        await publications.withdraw(name_of(old))
        assert peer.withdrawn == [name_of(old)]
        await publications.close()
        await asker.close()

    run(test)


def test_peers_that_do_not_answer_keep_nobody_waiting() -> None:
    async def test(scene: Scene) -> None:
        await add_pass_peer(scene, 1.0)
        asker = make_asker(scene)
        publications = Publications(asker)
        await publications.publish(make_version(8), WHOLE, "a")
        scene.network.pause("pass1")
        began_at = now()
        await publications.close()
        assert now() - began_at <= 3.0
        scene.network.resume("pass1")
        await asker.close()

    run(test)


def test_nobody_to_publish_to_is_said() -> None:
    async def test(scene: Scene) -> None:
        asker = make_asker(scene)
        publications = Publications(asker)
        with pytest.raises(RouteError, match="no reachable peer serves blocks"):
            await publications.publish(make_version(8), WHOLE, "a")
        await publications.close()
        await asker.close()

    run(test)
