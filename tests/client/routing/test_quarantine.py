"""Who is avoided, for how long, and who is asked as a last resort."""

import asyncio

import pytest
from swarm_world import FIRST_SECONDS, LONGEST_SECONDS, SwarmWorld, in_world

from shoal.client.routing.route import Fault
from shoal.protocol.errors import RouteError
from shoal.protocol.records.announcements import Announcement


@in_world()
async def test_quarantine_ends_with_a_newer_announcement_of_a_peer_that_has_worked(
    world: SwarmWorld,
) -> None:
    peer = await world.announce(1)
    await world.swarm.book.refresh()
    world.note_answer(peer)
    world.swarm.book.quarantine(peer, Fault.BROKEN)
    newer = await world.announce(1)
    await asyncio.sleep(0.1)

    assert not world.swarm.book.is_quarantined(newer)
    assert await world.route() == [peer.peer_id]


@in_world()
async def test_newer_announcement_of_a_peer_that_never_worked_ends_no_quarantine(
    world: SwarmWorld,
) -> None:
    peer = await world.announce(1)
    await world.swarm.book.refresh()
    world.swarm.book.quarantine(peer, Fault.SILENT)

    assert world.swarm.book.is_quarantined(await world.announce(1))


@in_world()
async def test_peer_that_failed_and_never_worked_comes_after_all_others_for_good(
    world: SwarmWorld,
) -> None:
    hole = await world.announce(1, decode_steps_per_second=1e9)
    await world.swarm.book.refresh()
    world.swarm.book.quarantine(hole, Fault.SILENT)
    await asyncio.sleep(LONGEST_SECONDS)

    await world.announce(1, decode_steps_per_second=1e9)
    slow = await world.announce(2, decode_steps_per_second=0.1)
    assert {(await world.route())[0] for _ in range(20)} == {slow.peer_id}
    assert await world.route(exclude={slow.peer_id}) == [hole.peer_id]


@in_world()
async def test_quarantine_counts_from_the_newest_announcement_that_is_known(
    world: SwarmWorld,
) -> None:
    """A session that was opened long ago holds an old announcement of its peer."""
    old = await world.announce(1)
    newest = await world.announce(1)
    await world.swarm.book.refresh()

    world.swarm.book.quarantine(old, Fault.BROKEN)

    assert world.swarm.book.is_quarantined(newest)


@in_world()
async def test_quarantine_doubles_each_time_up_to_a_limit_and_success_resets_it(
    world: SwarmWorld,
) -> None:
    async def check_lasts(world: SwarmWorld, peer: Announcement, seconds: float) -> None:
        world.swarm.book.quarantine(peer, Fault.BROKEN)
        await asyncio.sleep(seconds - 0.01)
        assert world.swarm.book.is_quarantined(peer)
        await asyncio.sleep(0.02)
        assert not world.swarm.book.is_quarantined(peer)

    peer = await world.announce(1)

    for seconds in (15.0, 30.0, 60.0, 120.0, 240.0, 480.0, LONGEST_SECONDS, LONGEST_SECONDS):
        await check_lasts(world, peer, seconds)
    world.note_answer(peer)
    await check_lasts(world, peer, FIRST_SECONDS)


@in_world()
async def test_one_failure_told_by_many_sessions_counts_once(world: SwarmWorld) -> None:
    peer = await world.announce(1)

    for _ in range(10):
        world.swarm.book.quarantine(peer, Fault.BROKEN)

    await asyncio.sleep(FIRST_SECONDS + 0.01)
    assert not world.swarm.book.is_quarantined(peer)


@in_world()
async def test_success_ends_a_quarantine(world: SwarmWorld) -> None:
    peer = await world.announce(1)
    world.swarm.book.quarantine(peer, Fault.BROKEN)

    world.note_answer(peer)

    assert not world.swarm.book.is_quarantined(peer)
    assert await world.route() == [peer.peer_id]


@in_world()
async def test_who_did_not_lie_is_a_last_resort_the_silent_first(world: SwarmWorld) -> None:
    silent, other = await world.announce(1), await world.announce(2)
    world.swarm.book.quarantine(silent, Fault.SILENT)

    assert {(await world.route())[0] for _ in range(20)} == {other.peer_id}
    world.swarm.book.quarantine(other, Fault.BROKEN)
    assert await world.route() == [silent.peer_id]
    assert await world.route(exclude={silent.peer_id}) == [other.peer_id]
    world.swarm.book.quarantine(other, Fault.LYING)
    with pytest.raises(RouteError):
        await world.route(exclude={silent.peer_id})


@in_world()
async def test_stale_announcement_is_not_used_and_the_next_one_is(world: SwarmWorld) -> None:
    peer = await world.announce(1)
    await world.swarm.book.refresh()
    world.swarm.book.quarantine(peer, Fault.STALE)
    with pytest.raises(RouteError):
        await world.route()

    newer = await world.announce(1)
    await asyncio.sleep(0.1)
    assert await world.route() == [peer.peer_id]
    world.swarm.book.quarantine(peer, Fault.STALE)  # a session that still has the old one
    assert not world.swarm.book.is_quarantined(newer)


@in_world()
async def test_lesser_fault_does_not_make_up_for_a_worse_one(world: SwarmWorld) -> None:
    peer = await world.announce(1)

    world.swarm.book.quarantine(peer, Fault.LYING)
    world.swarm.book.quarantine(peer, Fault.SILENT)

    with pytest.raises(RouteError):
        await world.route()
