"""What a client publishes: brought to all peers, and kept alive there while it is wanted."""

from __future__ import annotations

import asyncio
import logging

import pytest
from pass_peers import WHOLE, add_pass_peer, make_texts
from publisher_scene import (
    LARGE,
    SECONDS,
    count_heads,
    make_version,
    name_of,
    run_publisher,
)
from session_scene import Scene, now

from shoal.client.finetune.pass_asking import PassAsker
from shoal.client.finetune.publisher import Publisher
from shoal.client.finetune.remote_passes import RemotePasses
from shoal.client.swarm import Fault
from shoal.protocol.announcements import Announcement
from shoal.protocol.errors import RefusedError, RouteError, SilentError, UsageError
from shoal.protocol.net.clock import VirtualClock
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
        with pytest.raises(UsageError, match="was not published here"):
            await publisher.withdraw(name_of(one))

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


def test_nobody_to_publish_to_is_said() -> None:
    async def test(scene: Scene, asker: PassAsker, publisher: Publisher) -> None:
        with pytest.raises(RouteError, match="no reachable peer serves blocks"):
            await publisher.publish(make_version(8), WHOLE, "a")

    run_publisher(test)


def test_nothing_goes_on_after_the_last_withdrawal_or_begins_after_the_end() -> None:
    async def test(scene: Scene, asker: PassAsker, publisher: Publisher) -> None:
        peer, version = await add_pass_peer(scene, 1.0), make_version(8)
        tasks = asyncio.all_tasks()
        await publisher.publish(version, WHOLE, "a")
        await publisher.withdraw(name_of(version))
        await asyncio.sleep(SECONDS)
        assert asyncio.all_tasks() == tasks

        await publisher.close()
        with pytest.raises(UsageError, match="nothing can be published"):
            await publisher.publish(version, WHOLE, "a")
        assert len(peer.brought) == 1

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


def test_what_a_peer_does_not_take_is_not_under_way() -> None:
    async def test(scene: Scene, asker: PassAsker, publisher: Publisher) -> None:
        slow = await add_pass_peer(scene, 1.0)
        slow.piece_seconds = 1000.0
        publishing = asyncio.create_task(publisher.publish(make_version(LARGE), WHOLE, "a"))
        await asyncio.sleep(10.0)
        assert len(slow.brought) == 1
        assert asker.line.num_bytes < 2**20

        with pytest.raises(SilentError):
            await publishing
        assert now() <= 310.0
        assert asker.line.num_bytes == 0

    run_publisher(test)


def test_what_a_peer_has_taken_is_not_under_way() -> None:
    async def test(scene: Scene, asker: PassAsker, publisher: Publisher) -> None:
        peer = await add_pass_peer(scene, 1.0)
        peer.piece_seconds = 0.1
        publishing = asyncio.create_task(publisher.publish(make_version(LARGE), WHOLE, "a"))
        await asyncio.sleep(17.0)
        assert 150 < peer.num_pieces < 200
        assert 0 < asker.line.num_bytes < 2**20
        await publishing
        assert asker.line.num_bytes == 0

    run_publisher(test)


def test_publications_under_way_leave_a_peer_to_passes() -> None:
    async def test(scene: Scene, asker: PassAsker, publisher: Publisher) -> None:
        slow = await add_pass_peer(scene, 1.0)
        slow.piece_seconds = 0.5
        publishing = [
            asyncio.create_task(publisher.publish(make_version(LARGE + size), WHOLE, str(size)))
            for size in (0, 2)
        ]
        await asyncio.sleep(1.0)
        began_at = now()
        await asker.ask_forward(WHOLE, make_texts()[0])
        assert now() - began_at < 5.0
        await asyncio.gather(*publishing)

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


def test_newest_state_is_renewed_whichever_call_ends_first() -> None:
    async def test(scene: Scene, asker: PassAsker, publisher: Publisher) -> None:
        peer, old, new = await add_pass_peer(scene, 1.0), make_version(8), make_version(10)
        list_peers = asker.list_peers

        async def list_late() -> list[Announcement]:
            await asyncio.sleep(3.0)
            return await list_peers()

        asker.list_peers = list_late
        publishing = asyncio.create_task(publisher.publish(old, WHOLE, "a"))
        await asyncio.sleep(1.0)
        asker.list_peers = list_peers
        await publisher.publish(new, WHOLE, "a")
        await publishing
        await asyncio.sleep(SECONDS)
        assert count_heads(peer) == {name_of(old): 1, name_of(new): 2}

    run_publisher(test)


def test_one_of_two_calls_may_be_interrupted() -> None:
    async def test(scene: Scene, asker: PassAsker, publisher: Publisher) -> None:
        peer, version = await add_pass_peer(scene, 1.0), make_version(8)
        peer.piece_seconds = 2.0
        calls = [asyncio.create_task(publisher.publish(version, WHOLE, "a")) for _ in range(2)]
        await asyncio.sleep(1.0)
        calls[0].cancel()
        await calls[1]
        await asyncio.sleep(SECONDS)
        assert count_heads(peer) == {name_of(version): 2}

    run_publisher(test)


def test_state_that_is_withdrawn_while_it_is_published_replaces_nothing() -> None:
    async def test(scene: Scene, asker: PassAsker, publisher: Publisher) -> None:
        peer, old, new = await add_pass_peer(scene, 1.0), make_version(8), make_version(10)
        await publisher.publish(old, WHOLE, "a")
        peer.piece_seconds = 3.0
        publishing = asyncio.create_task(publisher.publish(new, WHOLE, "a"))
        await asyncio.sleep(1.0)
        await publisher.withdraw(name_of(new))
        with pytest.raises(UsageError, match="was withdrawn while"):
            await publishing
        assert peer.withdrawn == [name_of(new)]
        await asyncio.sleep(SECONDS)
        assert count_heads(peer) == {name_of(old): 2, name_of(new): 1}

    run_publisher(test)


def test_states_for_different_blocks_replace_each_other_not() -> None:
    async def test(scene: Scene, asker: PassAsker, publisher: Publisher) -> None:
        peer, one, other = await add_pass_peer(scene, 1.0), make_version(8), make_version(10)
        await publisher.publish(one, Span(0, 2), "a")
        await publisher.publish(other, Span(0, 4), "a")
        await asyncio.sleep(SECONDS)
        assert count_heads(peer) == {name_of(one): 2, name_of(other): 2}

    run_publisher(test)


def test_equal_adapters_are_renewed_until_all_of_them_have_changed() -> None:
    async def test(scene: Scene, asker: PassAsker, publisher: Publisher) -> None:
        peer, shared, new = await add_pass_peer(scene, 1.0), make_version(8), make_version(10)
        for version, lineage in ((shared, "a"), (shared, "b"), (new, "a")):
            await publisher.publish(version, WHOLE, lineage)
        before = count_heads(peer)[name_of(shared)]
        await asyncio.sleep(SECONDS)
        assert count_heads(peer)[name_of(shared)] == before + 1

        await publisher.publish(new, WHOLE, "b")
        await asyncio.sleep(SECONDS)
        assert count_heads(peer)[name_of(shared)] == before + 1

    run_publisher(test)


def test_blocks_for_which_no_peer_keeps_an_adapter_are_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test(scene: Scene, asker: PassAsker, publisher: Publisher) -> None:
        await add_pass_peer(scene, 1.0, span=Span(0, 3))
        full = await add_pass_peer(scene, 1.0, span=Span(3, 6))
        full.refuses_heads = True
        await publisher.publish(make_version(8), WHOLE, "a")
        assert "no peer keeps the adapter for blocks 3:6 yet" in caplog.text
        assert "as the test says" in caplog.text

        full.refuses_heads = False
        await asyncio.sleep(SECONDS)
        assert len(full.published) == 1

    with caplog.at_level(logging.WARNING):
        run_publisher(test)


def test_refusal_by_all_is_raised() -> None:
    async def test(scene: Scene, asker: PassAsker, publisher: Publisher) -> None:
        peer, version = await add_pass_peer(scene, 1.0), make_version(8)
        peer.refuses_heads = True
        with pytest.raises(RefusedError, match="as the test says"):
            await publisher.publish(version, WHOLE, "a")
        await asyncio.sleep(SECONDS)
        assert len(peer.brought) == 1

    run_publisher(test)


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


@pytest.mark.parametrize("kind", ["is_mute", "is_mute_to_heads"])
def test_peer_that_does_not_answer_is_brought_an_adapter_less_and_less_often(kind: str) -> None:
    async def test(scene: Scene, asker: PassAsker, publisher: Publisher) -> None:
        peer, version = await add_pass_peer(scene, 1.0), make_version(8)
        (announced,) = await asker.list_peers()

        async def stay() -> None:
            for _ in range(36):
                await asyncio.sleep(SECONDS)
                facts = {"endpoints": announced.endpoints, "max_version": announced.max_version}
                await scene.announce(peer, **facts)  # pyright: ignore[reportArgumentType]

        await publisher.publish(version, WHOLE, "a")
        setattr(peer, kind, True)
        await stay()
        assert 3 <= peer.num_pieces <= 8

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


def test_streams_are_closed_whatever_becomes_of_publications() -> None:
    async def test(scene: Scene, asker: PassAsker, publisher: Publisher) -> None:
        await add_pass_peer(scene, 1.0)
        passes = RemotePasses(asker, VirtualClock())
        await passes.publisher.publish(make_version(8), WHOLE, "a")

        async def fail() -> None:
            raise LookupError("as the test says")

        passes.publisher.close, close = fail, passes.publisher.close
        with pytest.raises(LookupError):
            await passes.close()
        assert "0 idle" in repr(asker)
        await close()

    run_publisher(test)
