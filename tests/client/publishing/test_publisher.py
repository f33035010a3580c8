"""What comes of calls that publish adapters, side by side and one after the other."""

from __future__ import annotations

import asyncio
import logging

import pytest
from pass_peers import WHOLE, add_pass_peer, make_texts
from publisher_scene import (
    LARGE,
    SECONDS,
    begin_late,
    count_heads,
    make_version,
    name_of,
    run_publisher,
)
from session_scene import Scene, now

from shoal.client.passes.pass_asking import PassAsker
from shoal.client.publishing.publisher import Publisher
from shoal.client.training.remote_passes import RemotePasses
from shoal.protocol.errors import RefusedError, RouteError, SilentError, UsageError
from shoal.protocol.net.clock import VirtualClock
from shoal.protocol.spans import Span


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


def test_what_a_peer_does_not_take_is_not_under_way() -> None:
    async def test(scene: Scene, asker: PassAsker, publisher: Publisher) -> None:
        slow = await add_pass_peer(scene, 1.0)
        slow.piece_seconds = 1000.0
        publishing = asyncio.create_task(publisher.publish(make_version(LARGE), WHOLE, "a"))
        await asyncio.sleep(10.0)
        assert len(slow.brought) == 1
        assert asker.line.num_bytes < 2**21

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
        assert 0 < asker.line.num_bytes < 2**21
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


def test_newest_state_is_renewed_whichever_call_ends_first() -> None:
    async def test(scene: Scene, asker: PassAsker, publisher: Publisher) -> None:
        peer, old, new = await add_pass_peer(scene, 1.0), make_version(8), make_version(10)
        publishing = await begin_late(asker, publisher, old, "a")
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


def test_streams_are_closed_whatever_becomes_of_publications() -> None:
    async def test(scene: Scene, asker: PassAsker, publisher: Publisher) -> None:
        await add_pass_peer(scene, 1.0)
        own = Publisher(asker, VirtualClock())
        passes = RemotePasses(asker, own)
        await own.publish(make_version(8), WHOLE, "a")

        async def fail() -> None:
            raise LookupError("as the test says")

        own.close, close = fail, own.close
        with pytest.raises(LookupError):
            await passes.close()
        assert "0 idle" in repr(asker)
        await close()

    run_publisher(test)


@pytest.mark.parametrize("hosts", ["nobody", "one that refuses"])
def test_blocks_that_nobody_takes_are_not_waited_for(hosts: str) -> None:
    async def test(scene: Scene, asker: PassAsker, publisher: Publisher) -> None:
        slow, _ = [await add_pass_peer(scene, 1.0, span=Span(0, 3)) for _ in range(2)]
        slow.piece_seconds = 0.8
        if hosts == "one that refuses":
            (await add_pass_peer(scene, 1.0, span=Span(3, 6))).refuses_heads = True
        await publisher.publish(make_version(LARGE), WHOLE, "a")
        assert now() < 10.0

    run_publisher(test)


def test_blocks_that_only_a_slow_peer_takes_are_waited_for() -> None:
    async def test(scene: Scene, asker: PassAsker, publisher: Publisher) -> None:
        await add_pass_peer(scene, 1.0, span=Span(0, 3))
        slow = await add_pass_peer(scene, 1.0, span=Span(3, 6))
        slow.piece_seconds = 0.3
        await publisher.publish(make_version(LARGE), WHOLE, "a")
        assert len(slow.published) == 1

    run_publisher(test)


def test_little_is_kept_of_what_was_published_once() -> None:
    async def test(scene: Scene, asker: PassAsker, publisher: Publisher) -> None:
        await add_pass_peer(scene, 1.0)
        for number in range(5):
            await publisher.publish(make_version(8 + 2 * number), WHOLE, "a")
            await publisher.publish(make_version(108 + 2 * number), WHOLE, str(number))
            await publisher.withdraw(name_of(make_version(108 + 2 * number)))
        await asyncio.sleep(4 * SECONDS)
        assert repr(publisher) == "<Publisher, 1 published, 9 former, 1 kinds>"

    run_publisher(test)


@pytest.mark.thorough
def test_little_is_kept_of_what_nobody_took() -> None:
    async def test(scene: Scene, asker: PassAsker, publisher: Publisher) -> None:
        (await add_pass_peer(scene, 1.0)).refuses_heads = True
        for number in range(1010):
            with pytest.raises(RefusedError):
                await publisher.publish(make_version(8 + 2 * number), WHOLE, "a")
        assert repr(publisher) == "<Publisher, 0 published, 1000 former, 0 kinds>"

    run_publisher(test)


def test_call_that_began_before_what_was_withdrawn_meanwhile_replaces_nothing() -> None:
    async def test(scene: Scene, asker: PassAsker, publisher: Publisher) -> None:
        peer, old, new = await add_pass_peer(scene, 1.0), make_version(8), make_version(10)
        publishing = await begin_late(asker, publisher, old, "a")
        await publisher.publish(new, WHOLE, "a")
        await publisher.withdraw(name_of(new))
        await publishing
        await asyncio.sleep(SECONDS)
        assert count_heads(peer) == {name_of(old): 1, name_of(new): 1}

    run_publisher(test)
