"""What a client publishes: kept alive at all peers, those that come later too, until taken back."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from pass_peers import WHOLE, PassPeer, add_pass_peer, make_adapted_texts, make_asker
from session_scene import Scene, now, run

from shoal.client.finetune.adapter_versions import AdapterVersion
from shoal.client.finetune.publications import Publications
from shoal.client.finetune.remote_passes import RemotePasses
from shoal.client.router import Hop
from shoal.protocol.announcements import Announcement
from shoal.protocol.errors import RouteError, SilentError, UsageError
from shoal.protocol.ids import AdapterId
from shoal.protocol.net.clock import VirtualClock
from shoal.protocol.versions import OPTIMIZER_VERSION

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
        publications = Publications(asker, VirtualClock())
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
        publications = Publications(asker, VirtualClock())
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
        publications = Publications(asker, VirtualClock())
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
        publications = Publications(asker, VirtualClock())
        with pytest.raises(RouteError, match="no reachable peer serves blocks"):
            await publications.publish(make_version(8), WHOLE, "a")
        await publications.close()
        await asker.close()

    run(test)


def test_silent_peer_neither_delays_renewals_elsewhere_nor_slows_the_line() -> None:
    async def test(scene: Scene) -> None:
        silent, sound = [await add_pass_peer(scene, 1.0) for _ in range(2)]
        asker, version = make_asker(scene), make_version(2**22)
        publications = Publications(asker, VirtualClock())
        assert await publications.publish(version, WHOLE, "a") == 2
        expected_seconds = asker.line.expect_seconds(2**24)
        silent.is_mute = True
        for _ in range(10):
            await asyncio.sleep(SECONDS / 2)
            assert now() - sound.published[name_of(version)] <= SECONDS

        assert asker.line.expect_seconds(2**24) == expected_seconds
        await publications.close()
        await asker.close()

    run(test)


def test_what_a_peer_does_not_take_is_not_under_way() -> None:
    async def test(scene: Scene) -> None:
        slow, asker = await add_pass_peer(scene, 1.0), make_asker(scene)
        slow.piece_seconds, version = 1000.0, make_version(2**22)
        publications = Publications(asker, VirtualClock())
        publishing = asyncio.create_task(publications.publish(version, WHOLE, "a"))
        await asyncio.sleep(10.0)
        assert len(slow.brought) == 1
        assert asker.line.num_bytes < 5 * 2**20  # what the network takes by itself is less

        with pytest.raises(SilentError):
            await publishing
        assert now() <= 310.0
        assert asker.line.num_bytes == 0
        await publications.close()
        await asker.close()

    run(test)


def test_no_renewal_begins_beside_a_publication() -> None:
    async def test(scene: Scene) -> None:
        slow, asker = await add_pass_peer(scene, 1.0), make_asker(scene)
        slow.piece_seconds, version = 0.7, make_version(2**22)
        publications = Publications(asker, VirtualClock())
        assert await publications.publish(version, WHOLE, "a") == 1
        assert now() > 2 * SECONDS
        assert len(slow.brought) == 1
        await publications.close()
        await asker.close()

    run(test)


def test_renewal_is_a_word_on_the_line_of_whoever_has_the_adapter() -> None:
    async def test(scene: Scene) -> None:
        peer, asker, version = await add_pass_peer(scene, 1.0), make_asker(scene), make_version(8)
        publications = Publications(asker, VirtualClock())
        await publications.publish(version, WHOLE, "a")
        await asyncio.sleep(SECONDS)
        assert (len(peer.brought), peer.num_pieces) == (2, 1)

        peer.published.clear()  # it was restarted
        await asyncio.sleep(SECONDS)
        assert peer.published.keys() == {name_of(version)}
        assert peer.num_pieces == 2
        await publications.close()
        await asker.close()

    run(test)


def test_peer_that_was_silent_once_is_told_when_all_is_taken_back() -> None:
    async def test(scene: Scene) -> None:
        silent, sound = [await add_pass_peer(scene, 1.0) for _ in range(2)]
        asker, version = make_asker(scene), make_version(8)
        publications = Publications(asker, VirtualClock())
        await publications.publish(version, WHOLE, "a")
        silent.is_mute = True
        await asyncio.sleep(SECONDS + 30.0)
        silent.is_mute = False
        await publications.withdraw(name_of(version))

        assert silent.withdrawn == sound.withdrawn == [name_of(version)]
        await publications.close()
        await asker.close()

    run(test)


def test_who_got_an_adapter_that_was_interrupted_is_told_at_the_end() -> None:
    async def test(scene: Scene) -> None:
        silent, sound = [await add_pass_peer(scene, 1.0) for _ in range(2)]
        asker, version = make_asker(scene), make_version(8)
        publications = Publications(asker, VirtualClock())
        silent.is_mute = True
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.0):
                await publications.publish(version, WHOLE, "a")
        await asyncio.sleep(SECONDS)
        assert len(sound.brought) == 1  # nobody has learned its digest

        await publications.close()
        assert sound.withdrawn == [name_of(version)]
        await asker.close()

    run(test)


def test_all_is_taken_back_from_the_newest_on_whoever_is_silent() -> None:
    async def test(scene: Scene) -> None:
        silent, sound = [await add_pass_peer(scene, 1.0) for _ in range(2)]
        asker, versions = make_asker(scene), [make_version(size) for size in (8, 10, 12)]
        publications = Publications(asker, VirtualClock())
        for number, version in enumerate(versions):
            await publications.publish(version, WHOLE, str(number))
        silent.is_mute = True
        began_at = now()
        await publications.close()

        assert now() - began_at <= 3.0
        assert sound.withdrawn == [name_of(version) for version in reversed(versions)]
        await asker.close()

    run(test)


def test_peer_that_gets_what_was_withdrawn_meanwhile_is_told() -> None:
    async def test(scene: Scene) -> None:
        slow, sound = [await add_pass_peer(scene, 1.0) for _ in range(2)]
        asker, version = make_asker(scene), make_version(8)
        publications = Publications(asker, VirtualClock())
        slow.piece_seconds = 3.0
        publishing = asyncio.create_task(publications.publish(version, WHOLE, "a"))
        await asyncio.sleep(1.0)
        await publications.withdraw(name_of(version))
        assert (slow.withdrawn, sound.withdrawn) == ([], [name_of(version)])

        await publishing
        assert slow.withdrawn == [name_of(version)]
        await publications.close()
        await asker.close()

    run(test)


def test_withdrawal_does_not_wait_for_passes() -> None:
    async def test(scene: Scene) -> None:
        peer, asker, version = await add_pass_peer(scene, 1.0), make_asker(scene), make_version(8)
        publications = Publications(asker, VirtualClock())
        await publications.publish(version, WHOLE, "a")
        (announced,) = await asker.list_peers()
        hop = Hop(announced, announced.span)
        async with asker.lend(hop), asker.lend(hop):
            assert await publications.withdraw(name_of(version)) == 0

        assert peer.withdrawn == [name_of(version)]
        await publications.close()
        await asker.close()

    run(test)


def test_state_before_the_newest_is_forgotten_when_peers_have_forgotten_it() -> None:
    async def test(scene: Scene) -> None:
        peer, old, new = await add_pass_peer(scene, 1.0), make_version(8), make_version(10)
        asker = make_asker(scene)
        publications = Publications(asker, VirtualClock())
        await publications.publish(old, WHOLE, "a")
        await publications.publish(new, WHOLE, "a")
        await asyncio.sleep(4 * SECONDS)

        with pytest.raises(UsageError, match="was not published here"):
            await publications.withdraw(name_of(old))
        await publications.close()
        assert peer.withdrawn == [name_of(new)]
        await asker.close()

    run(test)


def test_older_peer_is_brought_an_adapter_once_and_not_asked_to_forget_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test(scene: Scene) -> None:
        older = await add_pass_peer(scene, 1.0, max_version=OPTIMIZER_VERSION - 1)
        peer, asker, version = await add_pass_peer(scene, 1.0), make_asker(scene), make_version(8)
        publications = Publications(asker, VirtualClock())
        assert await publications.publish(version, WHOLE, "a") == 2
        await asyncio.sleep(SECONDS)
        assert (len(older.brought), len(peer.brought)) == (1, 2)

        assert await publications.withdraw(name_of(version)) == 1
        assert (older.withdrawn, peer.withdrawn) == ([], [name_of(version)])
        await publications.close()
        await asker.close()

    run(test)
    assert "that an adapter is withdrawn (1 could not)" in caplog.text


def test_renewals_go_on_after_a_failure_that_nobody_expected(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test(scene: Scene) -> None:
        peer, asker, version = await add_pass_peer(scene, 1.0), make_asker(scene), make_version(8)
        publications = Publications(asker, VirtualClock())
        await publications.publish(version, WHOLE, "a")
        list_peers = asker.list_peers

        async def fail() -> list[Announcement]:
            raise LookupError("as the test says")

        asker.list_peers = fail
        await asyncio.sleep(SECONDS)
        asker.list_peers = list_peers
        await asyncio.sleep(SECONDS)
        assert len(peer.brought) == 2
        await publications.close()
        await asker.close()

    run(test)
    assert "as the test says" in caplog.text


def test_equal_adapters_are_renewed_until_all_of_them_have_changed() -> None:
    async def test(scene: Scene) -> None:
        peer, asker = await add_pass_peer(scene, 1.0), make_asker(scene)
        shared, new = make_version(8), make_version(10)
        publications = Publications(asker, VirtualClock())
        for version, lineage in ((shared, "a"), (shared, "b"), (new, "a")):
            await publications.publish(version, WHOLE, lineage)
        before = count_heads(peer)[name_of(shared)]
        await asyncio.sleep(SECONDS)
        assert count_heads(peer)[name_of(shared)] == before + 1

        await publications.publish(new, WHOLE, "b")
        await asyncio.sleep(SECONDS)
        assert count_heads(peer)[name_of(shared)] == before + 1
        await publications.close()
        await asker.close()

    run(test)


def test_streams_are_closed_whatever_becomes_of_publications() -> None:
    async def test(scene: Scene) -> None:
        await add_pass_peer(scene, 1.0)
        asker = make_asker(scene)
        passes = RemotePasses(asker, VirtualClock())
        publications = passes.publications
        await publications.publish(make_version(8), WHOLE, "a")

        async def fail() -> None:
            raise LookupError("as the test says")

        passes.publications.close, close = fail, publications.close
        with pytest.raises(LookupError):
            await passes.close()
        assert "0 idle" in repr(asker)
        await close()
        await asker.close()

    run(test)
