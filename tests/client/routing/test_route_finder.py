"""What a client believes about the swarm, on a virtual clock and a directory in memory."""

import asyncio

import pytest
from swarm_world import FIRST_SECONDS, MODEL, SwarmWorld, in_world

from shoal.client.routing.route import Fault
from shoal.protocol.errors import DirectoryError, RouteError
from shoal.protocol.spans import Span


@in_world()
async def test_view_is_read_again_only_when_it_is_too_old(world: SwarmWorld) -> None:
    await world.announce(1)
    first = await world.swarm.book.refresh(10.0)
    assert len(first.peers) == 1
    await world.announce(2)

    await asyncio.sleep(9.5)
    assert await world.swarm.book.refresh(10.0) is first
    assert world.directory.num_lookups == 1
    await asyncio.sleep(1.0)
    assert len((await world.swarm.book.refresh(10.0)).peers) == 2
    assert world.directory.num_lookups == 2
    await asyncio.sleep(0.5)
    assert await world.swarm.book.refresh(10.0) is world.swarm.book.view
    assert world.directory.num_lookups == 2


def hear_of_everybody(world: SwarmWorld) -> None:
    """Let the client know what its peers have told it meanwhile."""
    now = world.clock.wall()
    told = [known.value for known in world.store.records.list_records(MODEL, now)]
    world.directory.records.take_all(MODEL, told, now)


@in_world()
async def test_what_is_known_has_to_do_when_the_directory_cannot_be_read(world: SwarmWorld) -> None:
    first = await world.announce(1)
    assert (await world.swarm.book.refresh()).peers == (first,)
    await asyncio.sleep(1)
    second = await world.announce(2)
    hear_of_everybody(world)
    world.store.is_reachable = False

    with pytest.raises(DirectoryError):
        await world.swarm.book.refresh()

    assert set(world.swarm.book.view.peers) == {first, second}
    world.store.is_reachable = True
    assert world.directory.num_lookups == 2
    await world.swarm.book.refresh(0.5)
    assert world.directory.num_lookups == 3


@in_world()
async def test_newcomer_that_is_known_is_used_while_the_directory_is_silent(
    world: SwarmWorld,
) -> None:
    lost = await world.announce(1)
    await world.swarm.book.refresh()
    await asyncio.sleep(1)  # or the view is new enough
    newcomer = await world.announce(2)
    hear_of_everybody(world)
    world.directory.is_silent = True

    assert await world.route(exclude=[lost.peer_id]) == [newcomer.peer_id]


@in_world()
async def test_peers_of_another_block_count_are_not_seen(world: SwarmWorld) -> None:
    await world.announce(1, num_blocks=5)

    assert (await world.swarm.book.refresh()).peers == ()


@in_world()
async def test_format_of_the_weights_is_tried_in_order(world: SwarmWorld) -> None:
    exact = await world.announce(1, weights="fp32", decode_steps_per_second=0.01)
    quick = await world.announce(2, weights="int8", decode_steps_per_second=1e4)

    assert await world.route(weights=("fp32", None)) == [exact.peer_id]
    assert await world.route(weights=("bf16", None)) == [quick.peer_id]
    world.swarm.book.quarantine(quick, Fault.SILENT)
    # Any sound peer comes before a silent one of the right format.
    assert await world.route(weights=("int8", None)) == [exact.peer_id]


@in_world()
async def test_measured_round_trips_decide_between_equal_peers(world: SwarmWorld) -> None:
    near, far = await world.announce(1), await world.announce(2)
    world.swarm.book.note_rtt(near.peer_id, 9.0)
    world.swarm.book.note_rtt(near.peer_id, 0.01)
    world.swarm.book.note_rtt(far.peer_id, 0.5)

    assert {(await world.route())[0] for _ in range(20)} == {near.peer_id}


@in_world()
async def test_peers_that_left_long_ago_are_forgotten_and_others_are_not(world: SwarmWorld) -> None:
    stays = await world.announce(200)
    for number in range(100):
        peer = await world.announce(number)
        await world.swarm.book.refresh()
        world.swarm.book.note_rtt(peer.peer_id, 0.1)
        world.swarm.book.times(peer.peer_id)
        world.swarm.book.quarantine(peer, Fault.BROKEN)
        world.note_answer(stays)
        await asyncio.sleep(400)  # an announcement lasts for 500
        await world.announce(200)

    assert len(world.swarm.book.rtts_seconds) < 15
    assert len(world.swarm.book._records) < 15
    assert len(world.swarm.book.times(stays.peer_id).decode_seconds) == 64


# ---- waiting for a route


@in_world()
async def test_waiting_ends_at_the_deadline_and_names_what_is_missing(world: SwarmWorld) -> None:
    await world.announce(1, span=Span(0, 3))
    started_at = world.clock.now()

    with pytest.raises(RouteError) as error:
        await world.route(patience_seconds=7.3)

    assert error.value.missing == (Span(3, 4),)
    assert world.clock.now() - started_at == pytest.approx(7.3)
    assert 7 <= world.directory.num_lookups <= 20


@in_world()
async def test_allowed_peers_that_leave_nobody_are_named_at_once(world: SwarmWorld) -> None:
    other, started_at = await world.announce(1), world.clock.now()
    world.choose(allowed_servers=("12D3",))

    with pytest.raises(RouteError, match=f"leaves nobody for blocks 0:4.* by {other.peer_id}$"):
        await world.route(patience_seconds=7.3)

    assert world.clock.now() == started_at


@in_world()
async def test_allowed_peer_that_was_there_is_waited_for(world: SwarmWorld) -> None:
    allowed = await world.announce(1)
    await world.announce(2)
    world.choose(allowed_servers=(allowed.peer_id,))
    await world.swarm.book.refresh()
    await asyncio.sleep(600)  # its announcement has expired
    await world.announce(2)
    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(world.route(patience_seconds=10.0))
        await asyncio.sleep(3)
        assert not waiting.done()
        await world.announce(1)

    assert waiting.result() == [allowed.peer_id]


@in_world()
async def test_deadline_in_the_past_still_allows_one_look(world: SwarmWorld) -> None:
    peer = await world.announce(1)

    assert await world.route(patience_seconds=-5.0) == [peer.peer_id]


@pytest.mark.parametrize("appears_after_seconds", [0.05, 2.0, 9.95])
@in_world()
async def test_peer_that_appears_meanwhile_is_used(
    world: SwarmWorld, appears_after_seconds: float
) -> None:
    started_at = world.clock.now()
    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(world.route(patience_seconds=10.0, max_age_seconds=60.0))
        await asyncio.sleep(appears_after_seconds)
        assert not waiting.done()
        peer = await world.announce(1)

    assert waiting.result() == [peer.peer_id]
    assert world.clock.now() - started_at <= min(appears_after_seconds + 1.0, 10.0)


@in_world()
async def test_peer_whose_quarantine_ends_meanwhile_is_used(world: SwarmWorld) -> None:
    peer = await world.announce(1)
    world.swarm.book.quarantine(peer, Fault.LYING)
    started_at = world.clock.now()

    assert await world.route(patience_seconds=60.0) == [peer.peer_id]

    assert FIRST_SECONDS <= world.clock.now() - started_at <= FIRST_SECONDS + 1.0


@in_world()
async def test_directory_that_stays_away_is_the_reason_given(world: SwarmWorld) -> None:
    world.store.is_reachable = False
    started_at = world.clock.now()

    with pytest.raises(DirectoryError):
        await world.route(patience_seconds=3.0)

    assert world.clock.now() - started_at == pytest.approx(3.0)


@in_world()
async def test_directory_that_comes_back_ends_the_waiting(world: SwarmWorld) -> None:
    peer = await world.announce(1)
    world.store.is_reachable = False

    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(world.route(patience_seconds=10.0))
        await asyncio.sleep(4)
        world.store.is_reachable = True

    assert waiting.result() == [peer.peer_id]
