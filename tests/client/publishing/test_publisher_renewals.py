"""What a client has published is kept alive at all peers while it is wanted."""

from __future__ import annotations

import asyncio

import pytest
from pass_peers import WHOLE, add_pass_peer, move_pass_peer
from publisher_scene import LARGE, SECONDS, count_heads, make_version, name_of, run_publisher
from session_scene import Scene, now

from shoal.client.adapters.adapter_versions import AdapterVersion
from shoal.client.passes.pass_asking import PassAsker
from shoal.client.passes.pass_links import PassLink
from shoal.client.publishing.publisher import Publisher
from shoal.protocol.errors import UnavailableError
from shoal.protocol.messages.adapters import KEEP_SECONDS
from shoal.protocol.records.announcements import Announcement
from shoal.protocol.spans import Span
from shoal.protocol.versions import OPTIMIZER_VERSION


def test_published_adapter_is_renewed_until_it_is_withdrawn() -> None:
    async def test(scene: Scene, asker: PassAsker, publisher: Publisher) -> None:
        first, one, other = await add_pass_peer(scene, 1.0), make_version(8), make_version(10)
        await publisher.publish(one, WHOLE, "a")
        await publisher.publish(other, WHOLE, "b")
        later = await add_pass_peer(scene, 1.0)
        await asyncio.sleep(SECONDS)

        assert min(count_heads(first).values()) > 1
        assert count_heads(later).keys() == {name_of(one), name_of(other)}
        await publisher.withdraw(name_of(one))
        assert first.withdrawn == later.withdrawn == [name_of(one)]
        assert await publisher.withdraw(name_of(one)) == 0
        assert first.withdrawn == later.withdrawn == [name_of(one)]

        before = count_heads(first)
        await asyncio.sleep(SECONDS)
        assert count_heads(first)[name_of(one)] == before[name_of(one)]
        assert count_heads(first)[name_of(other)] > before[name_of(other)]
        await publisher.close()
        assert first.withdrawn == later.withdrawn == [name_of(one), name_of(other)]
        before = count_heads(first)
        await asyncio.sleep(SECONDS)
        assert count_heads(first) == before

    run_publisher(test)


def test_silent_peer_neither_delays_renewals_elsewhere_nor_slows_the_line() -> None:
    async def test(scene: Scene, asker: PassAsker, publisher: Publisher) -> None:
        silent, sound = [await add_pass_peer(scene, 1.0) for _ in range(2)]
        version = make_version(LARGE)
        await publisher.publish(version, WHOLE, "a")
        expected_seconds = asker.line.expect_seconds(2**24)
        silent.is_mute = True
        for _ in range(10):
            await asyncio.sleep(SECONDS / 2)
            assert now() - sound.published[name_of(version)] <= SECONDS
        assert asker.line.expect_seconds(2**24) == expected_seconds

    run_publisher(test)


def test_peers_that_answer_slowly_do_not_delay_renewals_elsewhere() -> None:
    async def test(scene: Scene, asker: PassAsker, publisher: Publisher) -> None:
        peers = [await add_pass_peer(scene, 1.0) for _ in range(100)]
        for number in range(10):
            await publisher.publish(make_version(8 + 2 * number), WHOLE, str(number))
        sound = max(peers, key=lambda peer: peer.identity.peer_id)
        for peer in peers:
            peer.head_seconds = 0.0 if peer is sound else 3.9
        for _ in range(6):
            await asyncio.sleep(SECONDS / 2)
            assert len(sound.published) == 10
            assert now() - min(sound.published.values()) < KEEP_SECONDS / 2

    run_publisher(test)


def test_heads_that_a_slow_peer_has_not_heard_come_first_the_next_time() -> None:
    async def test(scene: Scene, asker: PassAsker, publisher: Publisher) -> None:
        peer = await add_pass_peer(scene, 1.0)
        for number in range(6):
            await publisher.publish(make_version(8 + 2 * number), WHOLE, str(number))
        peer.head_seconds = 3.9
        for _ in range(8):
            await asyncio.sleep(SECONDS / 2)
            assert now() - min(peer.published.values()) < KEEP_SECONDS
        assert peer.num_pieces == 6

    run_publisher(test)


@pytest.mark.parametrize("what", ["comes", "is restarted", "is killed and restarted"])
def test_peer_that_comes_or_comes_back_gets_adapters_soon(what: str) -> None:
    async def test(scene: Scene, asker: PassAsker, publisher: Publisher) -> None:
        peer = await add_pass_peer(scene, 1.0)
        for number in range(3):
            await publisher.publish(make_version(8 + 2 * number), WHOLE, str(number))
        await asyncio.sleep(35.0)
        if what == "comes":
            peer = await add_pass_peer(scene, 1.0)
        else:
            peer.published.clear()
            if what == "is killed and restarted":  # with all streams
                await move_pass_peer(scene, peer, "pass1")
            else:
                (announced,) = await asker.list_peers()
                facts = {"endpoints": announced.endpoints, "max_version": announced.max_version}
                await scene.announce_peer(peer, **facts)
        await asyncio.sleep(20.0)
        assert len(peer.published) == 3

    run_publisher(test)


def test_stream_that_breaks_at_a_renewal_is_replaced() -> None:
    async def test(scene: Scene, asker: PassAsker, publisher: Publisher) -> None:
        peer, version = await add_pass_peer(scene, 1.0), make_version(8)
        await publisher.publish(version, WHOLE, "a")
        renew, num_broken = asker.courier.renew, 0

        async def break_once(link: PassLink, adapter: AdapterVersion, span: Span) -> float:
            nonlocal num_broken
            num_broken += 1
            if num_broken == 1:
                raise UnavailableError("as the test says")
            return await renew(link, adapter, span)

        asker.courier.renew = break_once
        await asyncio.sleep(SECONDS)
        assert (count_heads(peer)[name_of(version)], num_broken) == (2, 2)

    run_publisher(test)


def test_peer_that_is_restarted_at_once_gets_adapters_soon() -> None:
    async def test(scene: Scene, asker: PassAsker, publisher: Publisher) -> None:
        peer = await add_pass_peer(scene, 1.0)
        for number in range(3):
            await publisher.publish(make_version(8 + 2 * number), WHOLE, str(number))
        (announced,) = await asker.list_peers()
        for _ in range(2):
            await asyncio.sleep(3.0)
            peer.published.clear()
            facts = {"endpoints": announced.endpoints, "max_version": announced.max_version}
            await scene.announce_peer(peer, **facts)
            await asyncio.sleep(37.0)
            assert len(peer.published) == 3

    run_publisher(test)


def test_peer_that_failed_gets_adapters_as_soon_as_it_is_back() -> None:
    async def test(scene: Scene, asker: PassAsker, publisher: Publisher) -> None:
        peer = await add_pass_peer(scene, 1.0)
        await publisher.publish(make_version(8), WHOLE, "a")
        (announced,) = await asker.list_peers()
        scene.network.pause("pass1")
        peer.published.clear()
        await asyncio.sleep(120.0)
        assert asker.find_peer(peer.identity.peer_id)
        scene.network.resume("pass1")
        facts = {"endpoints": announced.endpoints, "max_version": announced.max_version}
        await scene.announce_peer(peer, **facts)
        await asyncio.sleep(25.0)
        assert len(peer.published) == 1

    run_publisher(test)


def test_peer_that_cannot_be_reached_is_brought_one_thing_at_a_time() -> None:
    async def test(scene: Scene, asker: PassAsker, publisher: Publisher) -> None:
        await add_pass_peer(scene, 1.0)
        for number in range(6):
            await publisher.publish(make_version(8 + 2 * number), WHOLE, str(number))
        await add_pass_peer(scene, 1.0)
        scene.network.pause("pass2")
        open_stream, num_dials = scene.client.open_stream, 0

        async def count_and_open(*arguments: object) -> object:
            nonlocal num_dials
            num_dials += 1
            return await open_stream(*arguments)  # pyright: ignore[reportArgumentType]

        scene.client.open_stream = count_and_open  # pyright: ignore[reportAttributeAccessIssue]
        await asyncio.sleep(60.0)
        assert 1 <= num_dials <= 2

    run_publisher(test)


def test_failure_counts_once_however_much_was_published() -> None:
    async def test(scene: Scene, asker: PassAsker, publisher: Publisher) -> None:
        peer = await add_pass_peer(scene, 1.0)
        for number in range(6):
            await publisher.publish(make_version(8 + 2 * number), WHOLE, str(number))
        scene.network.pause("pass1")
        peer.published.clear()
        await asyncio.sleep(150.0)
        scene.network.resume("pass1")
        await asyncio.sleep(2 * SECONDS)
        assert len(peer.published) == 6

    run_publisher(test)


def test_renewal_and_publication_join_what_is_under_way() -> None:
    async def test(scene: Scene, asker: PassAsker, publisher: Publisher) -> None:
        _, version = await add_pass_peer(scene, 1.0), make_version(LARGE)
        await publisher.publish(version, WHOLE, "a")
        later = await add_pass_peer(scene, 1.0)
        later.piece_seconds = 0.7
        await asyncio.sleep(SECONDS)
        assert len(later.brought) == 1
        await publisher.publish(version, WHOLE, "b")
        await asyncio.sleep(SECONDS)
        assert (len(later.brought), later.published) == (1, {})
        await asyncio.sleep(1.2 * SECONDS)
        assert later.published.keys() == {name_of(version)}
        assert later.num_pieces == 342

    run_publisher(test)


def test_renewal_is_a_word_on_the_line_of_whoever_has_the_adapter() -> None:
    async def test(scene: Scene, asker: PassAsker, publisher: Publisher) -> None:
        peer, version = await add_pass_peer(scene, 1.0), make_version(8)
        await publisher.publish(version, WHOLE, "a")
        await asyncio.sleep(SECONDS)
        assert (len(peer.brought), peer.num_pieces) == (2, 1)

        peer.published.clear()  # it was restarted
        await asyncio.sleep(SECONDS)
        assert peer.published.keys() == {name_of(version)}
        assert peer.num_pieces == 2

    run_publisher(test)


def test_renewals_of_one_peer_take_one_stream() -> None:
    async def test(scene: Scene, asker: PassAsker, publisher: Publisher) -> None:
        peers = [await add_pass_peer(scene, 1.0) for _ in range(3)]
        for number in range(5):
            await publisher.publish(make_version(8 + 2 * number), WHOLE, str(number))
        await asyncio.sleep(50.0)
        before = [peer.num_streams for peer in peers]
        await asyncio.sleep(SECONDS - 40.0)

        assert [len(peer.brought) for peer in peers] == [10, 10, 10]
        assert [peer.num_streams for peer in peers] == [num + 1 for num in before]

    run_publisher(test)


def test_peer_that_cannot_be_reached_is_dialled_once_for_a_renewal() -> None:
    async def test(scene: Scene, asker: PassAsker, publisher: Publisher) -> None:
        await add_pass_peer(scene, 1.0)
        await publisher.publish(make_version(8), WHOLE, "a")
        await asyncio.sleep(50.0)
        scene.network.pause("pass1")
        open_stream, num_dials = scene.client.open_stream, 0

        async def count_and_open(*arguments: object) -> object:
            nonlocal num_dials
            num_dials += 1
            return await open_stream(*arguments)  # pyright: ignore[reportArgumentType]

        scene.client.open_stream = count_and_open  # pyright: ignore[reportAttributeAccessIssue]
        await asyncio.sleep(SECONDS - 35.0)
        assert num_dials == 1
        scene.network.resume("pass1")

    run_publisher(test)


def test_state_before_the_newest_is_not_renewed() -> None:
    async def test(scene: Scene, asker: PassAsker, publisher: Publisher) -> None:
        peer, old, new = await add_pass_peer(scene, 1.0), make_version(8), make_version(10)
        await publisher.publish(old, WHOLE, "a")
        await publisher.publish(new, WHOLE, "a")
        await asyncio.sleep(SECONDS)

        assert count_heads(peer)[name_of(old)] == 1
        assert count_heads(peer)[name_of(new)] > 1
        assert peer.withdrawn == []

    run_publisher(test)


@pytest.mark.parametrize("kind", ["is_mute", "is_mute_to_heads"])
def test_peer_that_does_not_answer_is_brought_an_adapter_less_and_less_often(kind: str) -> None:
    async def test(scene: Scene, asker: PassAsker, publisher: Publisher) -> None:
        peer, version = await add_pass_peer(scene, 1.0), make_version(8)
        (announced,) = await asker.list_peers()

        async def stay() -> None:
            for _ in range(36):
                await asyncio.sleep(SECONDS)
                facts = {"endpoints": announced.endpoints, "max_version": announced.max_version}
                await scene.announce_peer(peer, **facts)

        await publisher.publish(version, WHOLE, "a")
        setattr(peer, kind, True)
        await stay()
        assert 3 <= peer.num_pieces <= 10

        setattr(peer, kind, False)
        await stay()
        assert now() - peer.published[name_of(version)] <= SECONDS
        num_pieces = peer.num_pieces
        await asyncio.sleep(SECONDS)
        assert peer.num_pieces == num_pieces

    run_publisher(test)


def test_older_peer_is_brought_an_adapter_once() -> None:
    async def test(scene: Scene, asker: PassAsker, publisher: Publisher) -> None:
        older = await add_pass_peer(scene, 1.0, max_version=OPTIMIZER_VERSION - 1)
        peer, version = await add_pass_peer(scene, 1.0), make_version(8)
        await publisher.publish(version, WHOLE, "a")
        await asyncio.sleep(SECONDS)
        assert (len(older.brought), len(peer.brought)) == (1, 2)

    run_publisher(test)


def test_renewals_go_on_after_a_failure_that_nobody_expected(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test(scene: Scene, asker: PassAsker, publisher: Publisher) -> None:
        peer = await add_pass_peer(scene, 1.0)
        await publisher.publish(make_version(8), WHOLE, "a")
        list_peers = asker.list_peers

        async def fail() -> list[Announcement]:
            raise LookupError("as the test says")

        asker.list_peers = fail
        await asyncio.sleep(SECONDS)
        asker.list_peers = list_peers
        await asyncio.sleep(SECONDS)
        assert len(peer.brought) == 2

    run_publisher(test)
    assert "as the test says" in caplog.text


def test_adapter_that_many_peers_keep_is_published_again_at_a_few_at_once() -> None:
    async def test(scene: Scene, asker: PassAsker, publisher: Publisher) -> None:
        peers = [await add_pass_peer(scene, 1.0) for _ in range(50)]
        await publisher.publish(make_version(8), WHOLE, "a")
        await asyncio.sleep(10.0)
        for peer in peers:
            peer.is_mute_to_heads = True
        publishing = asyncio.create_task(publisher.publish(make_version(8), WHOLE, "b"))
        await asyncio.sleep(1.0)
        assert sum(len(peer.brought) - 1 for peer in peers) == 32
        assert "32 in use" in repr(asker)

        for peer in peers:
            peer.is_mute_to_heads = False
        await publishing

    run_publisher(test)
