"""What comes of calls that publish adapters, and who holds them afterwards."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from pass_peers import WHOLE, PassPeer, add_pass_peer, make_asker, make_texts, move_pass_peer
from publisher_scene import (
    LARGE,
    SECONDS,
    count_uploads,
    make_leaves,
    name_of,
    with_publisher,
)
from session_scene import SessionScene, in_scene, now

from shoal.client.publishing.publisher import Publisher
from shoal.client.training.remote_passes import RemotePasses
from shoal.protocol.errors import (
    RefusedError,
    RouteError,
    SilentError,
    UnavailableError,
    UsageError,
)
from shoal.protocol.net.memory.loopback import Link
from shoal.protocol.records.announcements import PeerState
from shoal.protocol.spans import Span
from shoal.protocol.versions import OPTIMIZER_VERSION

ONE, OTHER = make_leaves(8), make_leaves(10)


def list_holders(*peers: PassPeer) -> list[int]:
    return [number for number, peer in enumerate(peers) if peer.published]


@with_publisher()
async def test_two_peers_hold_each_block_and_get_no_more_than_their_own(
    scene: SessionScene, publisher: Publisher
) -> None:
    left = [await add_pass_peer(scene, 1.0, span=Span(0, 2)) for _ in range(3)]
    right = [await add_pass_peer(scene, 1.0, span=Span(2, 6)) for _ in range(3)]
    await publisher.publish(ONE, WHOLE, "a")
    await asyncio.sleep(3 * SECONDS)
    for peers, span in ((left, Span(0, 2)), (right, Span(2, 6))):
        holders = [peer for peer in peers if peer.published]
        assert len(holders) == 2
        for holder in holders:
            (head,) = holder.brought
            assert head.num_bytes == ONE.manifest.count_bytes(span)


@pytest.mark.parametrize("version", [None, OPTIMIZER_VERSION])
@with_publisher()
async def test_no_peer_that_could_hold_it_is_said(
    scene: SessionScene, publisher: Publisher, version: int | None
) -> None:
    expected: tuple[Any, str] = RouteError, "no reachable peer serves blocks"
    if version is not None:
        await add_pass_peer(scene, 1.0, max_version=version)
        expected = UnavailableError, "an older protocol version, .* update them"
    with pytest.raises(expected[0], match=expected[1]):
        await publisher.publish(ONE, WHOLE, "a")


@pytest.mark.parametrize("older", [False, True])
@with_publisher()
async def test_blocks_without_a_holder_are_named_and_get_one_later(
    scene: SessionScene,
    publisher: Publisher,
    caplog: pytest.LogCaptureFixture,
    older: bool,
) -> None:
    await add_pass_peer(scene, 1.0, span=Span(0, 3))
    version = {"max_version": OPTIMIZER_VERSION} if older else {}
    full = await add_pass_peer(scene, 1.0, span=Span(3, 6), **version)
    full.refuses_heads = True
    await publisher.publish(ONE, WHOLE, "a")
    assert "no peer holds the adapter for blocks 3:6 yet" in caplog.text
    expected = "no peer that could hold it serves them" if older else "as the test says"
    assert expected in caplog.text
    assert len(full.brought) == (0 if older else 1)

    full.refuses_heads = False
    if older:
        full = await add_pass_peer(scene, 1.0, span=Span(3, 6))
    await asyncio.sleep(SECONDS)
    assert len(full.published) == 1
    assert "peers for all blocks hold the adapter now" in caplog.text


@pytest.mark.parametrize("is_alone", [False, True])
@with_publisher()
async def test_loss_of_all_holders_is_told_and_whether_any_peer_is_in_reach(
    scene: SessionScene,
    publisher: Publisher,
    caplog: pytest.LogCaptureFixture,
    is_alone: bool,
) -> None:
    holder = await add_pass_peer(scene, 1.0)
    await publisher.publish(ONE, WHOLE, "a")
    if not is_alone:
        other = await add_pass_peer(scene, 1.0)
        other.refuses_heads = True
    await scene.announce_peer(holder, state=PeerState.OFFLINE)
    await asyncio.sleep(SECONDS)
    assert "the peers that held the adapter for blocks 0:6 are gone" in caplog.text
    assert ("no peer is in reach" in caplog.text) is is_alone


@with_publisher()
async def test_refusal_by_all_is_raised_and_they_are_asked_again_by_the_next_call(
    scene: SessionScene, publisher: Publisher
) -> None:
    peer = await add_pass_peer(scene, 1.0)
    peer.refuses_heads = True
    for number in range(1, 3):
        with pytest.raises(RefusedError, match="as the test says"):
            await publisher.publish(ONE, WHOLE, "a")
        assert len(peer.brought) == number
    await asyncio.sleep(SECONDS)
    assert len(peer.brought) == 2


@in_scene()
async def test_peer_that_takes_nothing_is_replaced_and_holds_up_nobody(scene: SessionScene) -> None:
    asker = make_asker(scene)
    publisher = Publisher(asker)
    slow = [await add_pass_peer(scene, 1.0) for _ in range(2)]
    for peer in slow:
        peer.piece_seconds = 50.0
    publishing = asyncio.create_task(publisher.publish(make_leaves(LARGE), WHOLE, "a"))
    await asyncio.sleep(10.0)
    assert 0 < asker.line.num_bytes < 2**22
    peers = [await add_pass_peer(scene, 1.0) for _ in range(3)]
    await publishing
    assert now() < 300.0
    await asker.ask_forward(WHOLE, make_texts()[0])
    await asyncio.sleep(10.0)
    assert len(list_holders(*peers)) == 2
    await publisher.close()
    await asker.close()


@with_publisher()
async def test_peers_that_never_take_it_are_not_waited_for_for_ever(
    scene: SessionScene, publisher: Publisher
) -> None:
    (await add_pass_peer(scene, 1.0)).piece_seconds = 1000.0
    with pytest.raises(SilentError):
        await publisher.publish(make_leaves(LARGE), WHOLE, "a")
    assert now() < 700.0


@with_publisher()
async def test_slow_line_loses_no_upload(scene: SessionScene, publisher: Publisher) -> None:
    """24 MiB through 5 Mbit/s: both holders get all of it, at the first attempt."""
    line = asyncio.Lock()
    peers = [await add_pass_peer(scene, 1.0) for _ in range(3)]
    for peer in peers:
        peer.line, peer.piece_seconds = line, 48 * 2**10 / (5e6 / 8)
    await publisher.publish(make_leaves(LARGE), WHOLE, "a")
    await asyncio.sleep(60.0)
    assert sum(len(peer.brought) for peer in peers) == 2
    assert len(list_holders(*peers)) == 2


@with_publisher()
async def test_publication_is_renewed_with_few_words_until_it_is_withdrawn(
    scene: SessionScene, publisher: Publisher
) -> None:
    peer, tasks = await add_pass_peer(scene, 1.0), asyncio.all_tasks()
    await publisher.publish(ONE, WHOLE, "a")
    num_pieces = peer.num_pieces
    await asyncio.sleep(3 * SECONDS)
    assert now() - peer.published[name_of(ONE)] < SECONDS
    assert peer.num_pieces == num_pieces

    assert await publisher.withdraw(name_of(ONE)) == 0
    num_renewed = len(peer.renewed)
    await asyncio.sleep(SECONDS)
    assert (peer.published, len(peer.renewed)) == ({}, num_renewed)
    assert asyncio.all_tasks() == tasks
    await publisher.close()
    with pytest.raises(UsageError, match="nothing can be published"):
        await publisher.publish(ONE, WHOLE, "a")


@pytest.mark.parametrize("what", ["restarts", "leaves", "falls silent", "moves"])
@with_publisher()
async def test_holder_that_is_lost_is_replaced(
    scene: SessionScene, publisher: Publisher, what: str
) -> None:
    peers = [await add_pass_peer(scene, 1.0) for _ in range(2)]
    await publisher.publish(ONE, WHOLE, "a")
    await asyncio.sleep(6.0)
    third = await add_pass_peer(scene, 1.0)
    lost = peers[0]
    lost.published.clear()
    if what == "leaves":
        await scene.announce_peer(lost, state=PeerState.OFFLINE)
    elif what == "falls silent":
        lost.is_mute = True
    elif what == "moves":
        lost.span = Span(0, 3)
        await move_pass_peer(scene, lost, "pass1")
    await asyncio.sleep(SECONDS)
    assert len(list_holders(*peers, third)) >= 2
    assert sum(len(peer.brought) for peer in (*peers, third)) >= 3


@with_publisher()
async def test_publisher_with_a_new_address_publishes_again(
    scene: SessionScene, publisher: Publisher
) -> None:
    peers = [await add_pass_peer(scene, 1.0) for _ in range(2)]
    await publisher.publish(ONE, WHOLE, "a")
    for peer in peers:
        peer.former, peer.published = peer.published, {}
    await asyncio.sleep(1.5 * SECONDS)
    assert list_holders(*peers) == [0, 1]
    await asyncio.sleep(2 * SECONDS)
    assert [len(peer.brought) for peer in peers] == [2, 2]


@with_publisher()
async def test_later_state_replaces_the_earlier_one_whichever_call_ends_first(
    scene: SessionScene, publisher: Publisher
) -> None:
    peer = await add_pass_peer(scene, 1.0)
    peer.piece_seconds = 3.0
    publishing = asyncio.create_task(publisher.publish(make_leaves(LARGE), WHOLE, "a"))
    await asyncio.sleep(1.0)
    peer.piece_seconds = 0.0
    await publisher.publish(ONE, WHOLE, "a")
    await publishing
    await publisher.publish(OTHER, WHOLE, "a")
    await publisher.publish(ONE, WHOLE, "another one")
    before = len(peer.renewed)
    await asyncio.sleep(SECONDS)
    assert set(peer.renewed[before:]) == {name_of(ONE), name_of(OTHER)}

    await publisher.publish(OTHER, WHOLE, "another one")
    await publisher.publish(ONE, Span(0, 2), "a")
    before = len(peer.renewed)
    await asyncio.sleep(SECONDS)
    assert set(peer.renewed[before:]) == {name_of(ONE), name_of(OTHER)}


@with_publisher()
async def test_call_that_is_interrupted_leaves_the_other_one_alone(
    scene: SessionScene, publisher: Publisher
) -> None:
    peer = await add_pass_peer(scene, 1.0)
    peer.head_seconds = 2.0
    calls = [asyncio.create_task(publisher.publish(ONE, WHOLE, "a")) for _ in range(2)]
    await asyncio.sleep(1.0)
    calls[0].cancel()
    await calls[1]
    await asyncio.sleep(SECONDS)
    assert count_uploads(peer) == {name_of(ONE): 1}
    assert peer.renewed


@with_publisher()
async def test_publication_that_is_withdrawn_meanwhile_is_refused_and_replaces_nothing(
    scene: SessionScene, publisher: Publisher
) -> None:
    peer = await add_pass_peer(scene, 1.0)
    await publisher.publish(ONE, WHOLE, "a")
    peer.head_seconds = 3.0
    publishing = asyncio.create_task(publisher.publish(OTHER, WHOLE, "a"))
    await asyncio.sleep(1.0)
    await publisher.withdraw(name_of(OTHER))
    with pytest.raises(UsageError, match="was withdrawn while"):
        await publishing
    assert peer.withdrawn == [name_of(OTHER)]
    before = len(peer.renewed)
    await asyncio.sleep(SECONDS)
    assert set(peer.renewed[before:]) == {name_of(ONE)}


@with_publisher()
async def test_only_what_was_published_here_can_be_withdrawn_and_replaced_states_can(
    scene: SessionScene, publisher: Publisher
) -> None:
    peer = await add_pass_peer(scene, 1.0)
    with pytest.raises(UsageError, match="was not published here"):
        await publisher.withdraw(name_of(ONE))
    await publisher.publish(ONE, WHOLE, "a")
    await publisher.publish(OTHER, WHOLE, "a")
    await asyncio.sleep(5 * SECONDS)  # the holder may have kept it for its publisher's use
    assert await publisher.withdraw(name_of(ONE)) == 0
    assert peer.withdrawn == [name_of(ONE)]
    assert await publisher.withdraw(name_of(ONE)) == 0


@with_publisher()
async def test_holders_that_were_not_told_of_a_withdrawal_are_counted_and_told_later(
    scene: SessionScene, publisher: Publisher, caplog: pytest.LogCaptureFixture
) -> None:
    peers = [await add_pass_peer(scene, 1.0) for _ in range(2)]
    await publisher.publish(ONE, WHOLE, "a")
    await asyncio.sleep(6.0)
    peers[0].is_mute, began_at = True, now()
    assert await publisher.withdraw(name_of(ONE)) == 1
    assert now() - began_at < 6.0
    assert "(1 could not)" in caplog.text
    assert [len(peer.withdrawn) for peer in peers] == [0, 1]
    peers[0].is_mute = False
    assert await publisher.withdraw(name_of(ONE)) == 0
    assert [len(peer.withdrawn) for peer in peers] == [1, 1]


@with_publisher(Link(delay_seconds=0.05))
async def test_all_is_withdrawn_at_the_end_from_the_newest_on(
    scene: SessionScene, publisher: Publisher
) -> None:
    peer, mute = [await add_pass_peer(scene, 1.0) for _ in range(2)]
    published = [make_leaves(8 + 2 * number) for number in range(20)]
    for number, leaves in enumerate(published):
        await publisher.publish(leaves, WHOLE, str(number))
    await asyncio.sleep(6.0)
    mute.is_mute, began_at = True, now()
    await publisher.close()
    assert now() - began_at < 6.0
    assert peer.withdrawn == [name_of(leaves) for leaves in reversed(published)]


@in_scene()
async def test_streams_are_closed_whatever_becomes_of_publications(scene: SessionScene) -> None:
    await add_pass_peer(scene, 1.0)
    asker = make_asker(scene)
    passes = RemotePasses(asker)
    own = passes.publisher
    await own.publish(ONE, WHOLE, "a")

    async def fail() -> None:
        raise LookupError("as the test says")

    own.close, close = fail, own.close
    with pytest.raises(LookupError):
        await passes.close()
    assert "0 idle" in repr(asker)
    await close()


@pytest.mark.thorough
@with_publisher()
async def test_little_is_remembered_of_what_was_published_once(
    scene: SessionScene, publisher: Publisher
) -> None:
    (await add_pass_peer(scene, 1.0)).refuses_heads = True
    for number in range(1010):
        with pytest.raises(RefusedError):
            await publisher.publish(make_leaves(8 + 2 * number), WHOLE, "a")
    assert repr(publisher) == "<Publisher, 1000 publications>"
