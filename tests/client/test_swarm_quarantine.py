"""Who is avoided, for how long, and who is asked as a last resort."""

import asyncio

import pytest
from swarm_world import FIRST_SECONDS, LONGEST_SECONDS, World, in_world

from shoal.client.swarm import Fault
from shoal.protocol.announcements import Announcement
from shoal.protocol.errors import RouteError


def test_quarantine_ends_with_time() -> None:
    async def story(world: World) -> None:
        peer = await world.announce(1)
        await world.swarm.refresh()

        world.swarm.quarantine(peer, Fault.BROKEN)

        assert world.swarm.is_quarantined(peer)
        await asyncio.sleep(FIRST_SECONDS - 0.01)
        assert world.swarm.is_quarantined(peer)
        await asyncio.sleep(0.02)
        assert not world.swarm.is_quarantined(peer)

    in_world(story)


def test_quarantine_ends_with_a_newer_announcement() -> None:
    async def story(world: World) -> None:
        peer = await world.announce(1)
        await world.swarm.refresh()
        world.swarm.quarantine(peer, Fault.BROKEN)
        newer = await world.announce(1)
        await asyncio.sleep(0.1)

        assert not world.swarm.is_quarantined(newer)
        assert await world.route() == [peer.peer_id]

    in_world(story)


def test_quarantine_counts_from_the_newest_announcement_that_is_known() -> None:
    """A session that was opened long ago holds an old announcement of its peer."""

    async def story(world: World) -> None:
        old = await world.announce(1)
        newest = await world.announce(1)
        await world.swarm.refresh()

        world.swarm.quarantine(old, Fault.BROKEN)

        assert world.swarm.is_quarantined(newest)

    in_world(story)


def test_quarantine_doubles_each_time_up_to_a_limit_and_success_resets_it() -> None:
    async def check_lasts(world: World, peer: Announcement, seconds: float) -> None:
        world.swarm.quarantine(peer, Fault.BROKEN)
        await asyncio.sleep(seconds - 0.01)
        assert world.swarm.is_quarantined(peer)
        await asyncio.sleep(0.02)
        assert not world.swarm.is_quarantined(peer)

    async def story(world: World) -> None:
        peer = await world.announce(1)

        for seconds in (15.0, 30.0, 60.0, 120.0, 240.0, 480.0, LONGEST_SECONDS, LONGEST_SECONDS):
            await check_lasts(world, peer, seconds)
        world.swarm.note_success(peer.peer_id)
        await check_lasts(world, peer, FIRST_SECONDS)

    in_world(story)


def test_one_failure_told_by_many_sessions_counts_once() -> None:
    async def story(world: World) -> None:
        peer = await world.announce(1)

        for _ in range(10):
            world.swarm.quarantine(peer, Fault.BROKEN)

        await asyncio.sleep(FIRST_SECONDS + 0.01)
        assert not world.swarm.is_quarantined(peer)

    in_world(story)


def test_success_ends_a_quarantine() -> None:
    async def story(world: World) -> None:
        peer = await world.announce(1)
        world.swarm.quarantine(peer, Fault.BROKEN)

        world.swarm.note_success(peer.peer_id)

        assert not world.swarm.is_quarantined(peer)
        assert await world.route() == [peer.peer_id]

    in_world(story)


def test_quarantine_of_one_peer_does_not_touch_others() -> None:
    async def story(world: World) -> None:
        first, second = await world.announce(1), await world.announce(2)

        for bad, good in ((first, second), (second, first)):
            world.swarm.quarantine(bad, Fault.BROKEN)
            assert await world.route() == [good.peer_id]
            world.swarm.note_success(bad.peer_id)

    in_world(story)


def test_who_did_not_lie_is_a_last_resort_the_silent_first() -> None:
    async def story(world: World) -> None:
        silent, other = await world.announce(1), await world.announce(2)
        world.swarm.quarantine(silent, Fault.SILENT)

        assert {(await world.route())[0] for _ in range(20)} == {other.peer_id}
        world.swarm.quarantine(other, Fault.BROKEN)
        assert await world.route() == [silent.peer_id]
        assert await world.route(exclude={silent.peer_id}) == [other.peer_id]
        world.swarm.quarantine(other, Fault.LYING)
        with pytest.raises(RouteError):
            await world.route(exclude={silent.peer_id})

    in_world(story)


def test_lesser_fault_does_not_make_up_for_a_worse_one() -> None:
    async def story(world: World) -> None:
        peer = await world.announce(1)

        world.swarm.quarantine(peer, Fault.LYING)
        world.swarm.quarantine(peer, Fault.SILENT)

        with pytest.raises(RouteError):
            await world.route()

    in_world(story)
