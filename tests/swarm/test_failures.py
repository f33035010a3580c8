"""Sessions over whole swarms in this process while links, peers and clients misbehave.

What must come out is always what one engine computes undisturbed.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from story_outputs import assert_same

from shoal.peer.local_swarm.loopback import CLIENT_HOST
from shoal.protocol.errors import RouteError, ShoalError

FOUR_HOPS = ((0, 1), (0, 1), (1, 2), (1, 2), (2, 3), (2, 3), (3, 4), (3, 4))
TURNS_OF_THE_LOOP = range(1, 40, 3)
"""When to disturb a step: these many turns of the event loop after it began."""


in_star_and_chain = pytest.mark.parametrize("delivery", ["star", "chain"], indirect=True)


async def turn_the_loop(num_turns: int) -> None:
    for _ in range(num_turns):
        await asyncio.sleep(0)


# ---- links and hosts


@in_star_and_chain
@pytest.mark.parametrize(
    ("trouble", "hop"),
    [
        *(("kill", hop) for hop in range(4)),
        ("break_links", 1),
        *(pytest.param("break_links", hop, marks=pytest.mark.thorough) for hop in (0, 2, 3)),
    ],
)
def test_session_goes_on_after_a_hop_is_lost(run_story: Any, trouble: str, hop: int) -> None:
    async def story(world: Any) -> None:
        session, turns = world.open(), world.make_turns()
        outputs = await world.take_all(session, turns[:3])
        before = world.hosts_of(session)

        {"kill": world.network.kill, "break_links": world.break_links}[trouble](before[hop])
        outputs += await world.take_all(session, turns[3:])

        after = world.hosts_of(session)
        assert_same(outputs, world.expect(turns))
        assert [old == new for old, new in zip(before, after, strict=True)].count(False) == 1
        assert after[hop] != before[hop]
        (failover,) = session.failovers
        assert (failover.position, failover.num_replayed_tokens) == (7, 7)
        assert failover.lost.span == session.hops[hop].span
        assert world.quarantined_hosts == {before[hop]}
        taken_over = {
            peer.host: number
            for peer in world.loopback.peers
            if (number := peer.peer.joined.handler.counts.num_taken_over)
        }
        assert taken_over == {after[hop]: 1}

    run_story(story, spans=FOUR_HOPS)


@in_star_and_chain
@pytest.mark.slow
@pytest.mark.parametrize("hop", [0, 1])
def test_host_may_die_at_any_moment_of_a_step(run_story: Any, hop: int) -> None:
    async def story_of(world: Any, num_turns: int) -> None:
        session, turns = world.open(), world.make_turns()
        outputs = await world.take_all(session, turns[:2])
        host = world.hosts_of(session)[hop]

        running = asyncio.create_task(world.take(session, turns[2]))
        await turn_the_loop(num_turns)
        world.break_links(host)
        outputs.append(await running)
        outputs += await world.take_all(session, turns[3:])

        assert_same(outputs, world.expect(turns))
        await world.mend_links(host)

    async def story(world: Any) -> None:
        for num_turns in TURNS_OF_THE_LOOP:
            await story_of(world, num_turns)

    run_story(story)


@pytest.mark.slow
@pytest.mark.parametrize("trouble", ["pause", "partition"])
def test_silent_peer_is_replaced_without_being_blamed_for_long(
    run_story: Any, trouble: str
) -> None:
    async def story(world: Any) -> None:
        session, turns = world.open(), world.make_turns()
        outputs = await world.take_all(session, turns[:3])
        host = world.hosts_of(session)[1]
        hosts = (host,) if trouble == "pause" else ("client", host)

        getattr(world.network, trouble)(*hosts)
        outputs += await world.take_all(session, turns[3:])

        assert_same(outputs, world.expect(turns))
        assert "did not answer within" in session.failovers[0].reason
        assert host not in world.hosts_of(session)
        assert world.quarantined_hosts == {host}
        getattr(world.network, "resume" if trouble == "pause" else "heal")(*hosts)
        # Who was only silent is used where nobody else is left.
        (other,) = {"peer2", "peer3"} - {host}
        world.network.kill(other)
        again = world.open()
        assert_same(await world.take_all(again, turns), world.expect(turns))
        assert host in world.hosts_of(again)

    run_story(story)


@in_star_and_chain
@pytest.mark.parametrize("hops", [(0, 1), (1, 2), (0, 2), (0, 1, 2, 3)])
def test_hops_that_die_together_are_replaced_together(
    run_story: Any, hops: tuple[int, ...]
) -> None:
    async def story(world: Any) -> None:
        session, turns = world.open(), world.make_turns(num_rows=2, num_decoded=6)
        turns[3] = replace(turns[3], row_map=(1, 0))
        outputs = await world.take_all(session, turns[:4])
        before = world.hosts_of(session)

        for hop in hops:
            world.network.kill(before[hop])
        outputs += await world.take_all(session, turns[4:])

        assert_same(outputs, world.expect(turns))
        after = world.hosts_of(session)
        assert {n for n in range(4) if before[n] != after[n]} == set(hops)
        assert len(session.failovers) == len(hops)

    run_story(story, spans=FOUR_HOPS)


def test_span_of_a_lost_hop_may_be_served_by_several(run_story: Any) -> None:
    async def story(world: Any) -> None:
        session, turns = world.open(), world.make_turns()
        outputs = await world.take_all(session, turns[:3])
        assert world.hosts_of(session) == ["peer0"]  # one hop is cheaper than three

        world.network.kill("peer0")
        outputs += await world.take_all(session, turns[3:])

        assert_same(outputs, world.expect(turns))
        assert world.hosts_of(session) == ["peer1", "peer2", "peer3"]

    run_story(story, spans=[(0, 4), (0, 1), (1, 3), (3, 4)])


@pytest.mark.slow
def test_session_without_a_route_names_the_blocks_and_goes_on_later(run_story: Any) -> None:
    async def story(world: Any) -> None:
        session, turns = world.open(), world.make_turns()
        outputs = await world.take_all(session, turns[:3])

        world.break_links("peer2", "peer3")
        for _ in range(2):
            with pytest.raises(RouteError) as error:
                await world.take(session, turns[3])
            assert [str(span) for span in error.value.missing] == ["2:4"]
            assert session.position == 7
        await world.mend_links("peer2", "peer3")
        outputs += await world.take_all(session, turns[3:])

        assert_same(outputs, world.expect(turns))

    run_story(story, failover_timeout_seconds=0.3)


@pytest.mark.parametrize("hop", [0, 1])
def test_step_that_moved_rows_and_failed_leaves_the_logs_as_they_were(
    run_story: Any, hop: int
) -> None:
    async def story(world: Any) -> None:
        session, turns = world.open(), world.make_turns(num_rows=3, num_decoded=5)
        turns[2] = replace(turns[2], row_map=(2, 0, 0))
        turns[4] = replace(turns[4], row_map=(1, 2, 0))
        outputs = await world.take_all(session, turns[:4])
        hosts = ("peer0", "peer1") if hop == 0 else ("peer2", "peer3")

        world.break_links(*hosts)
        with pytest.raises(RouteError):
            await world.take(session, turns[4])
        assert session.position == 8
        await world.mend_links(*hosts)
        outputs += await world.take_all(session, turns[4:])

        assert_same(outputs, world.expect(turns))

    run_story(story, failover_timeout_seconds=0.3)


@pytest.mark.parametrize("has_row_map", [False, True])
def test_step_may_be_cancelled_at_any_moment_and_asked_again(
    run_story: Any, has_row_map: bool
) -> None:
    async def story_of(world: Any, num_turns: int) -> None:
        session, turns = world.open(), world.make_turns(num_rows=2)
        if has_row_map:
            turns[2] = replace(turns[2], row_map=(1, 0))
        outputs = await world.take_all(session, turns[:2])

        running = asyncio.create_task(world.take(session, turns[2]))
        await turn_the_loop(num_turns)
        running.cancel()
        await asyncio.wait([running])
        if running.cancelled():
            assert session.position == 6
            outputs.append(await world.take(session, turns[2]))
        else:
            outputs.append(running.result())
        outputs += await world.take_all(session, turns[3:])

        assert_same(outputs, world.expect(turns))
        assert world.quarantined_hosts == set()

    async def story(world: Any) -> None:
        for num_turns in TURNS_OF_THE_LOOP:
            await story_of(world, num_turns)

    run_story(story)


@pytest.mark.parametrize("num_turns", [1, 5, 15, 30])
def test_first_step_may_be_cancelled_while_the_hops_are_opened(
    run_story: Any, num_turns: int
) -> None:
    async def story(world: Any) -> None:
        session, turns = world.open(), world.make_turns()

        running = asyncio.create_task(world.take(session, turns[0]))
        await turn_the_loop(num_turns)
        running.cancel()
        await asyncio.wait([running])

        if running.cancelled():
            assert_same(await world.take_all(session, turns), world.expect(turns))

    run_story(story)


def test_rollback_survives_a_failover(run_story: Any) -> None:
    async def story(world: Any) -> None:
        session, turns = world.open(), world.make_turns()
        await world.take_all(session, turns[:4])

        session.rollback(6)
        world.network.kill(world.hosts_of(session)[1])
        outputs = await world.take_all(session, turns[3:])

        assert_same(outputs, world.expect([*turns[:2], *turns[3:]])[2:])

    run_story(story)


# ---- many at once


def test_sessions_side_by_side_do_not_disturb_each_other(run_story: Any) -> None:
    async def story(world: Any) -> None:
        plans = [world.make_turns(num_rows=rows, prompt_tokens=rows * 4) for rows in (1, 2, 3, 1)]
        sessions = [world.open() for _ in plans]
        started = [
            await world.take(session, plan[0])
            for session, plan in zip(sessions, plans, strict=True)
        ]
        host = world.hosts_of(sessions[0])[1]

        running = [
            asyncio.create_task(world.take_all(session, plan[1:]))
            for session, plan in zip(sessions, plans, strict=True)
        ]
        await turn_the_loop(10)
        world.network.kill(host)
        rest = await asyncio.gather(*running)

        for first, others, plan in zip(started, rest, plans, strict=True):
            assert_same([first, *others], world.expect(plan))

    run_story(story)


def test_client_that_vanishes_leaves_nothing_behind(run_story: Any) -> None:
    async def story(world: Any) -> None:
        turns = world.make_turns()
        for _ in range(3):
            await world.take_all(world.open(), turns)
        running = asyncio.create_task(world.take_all(world.open(), turns))
        await turn_the_loop(10)

        world.network.kill(CLIENT_HOST)

        with pytest.raises(ShoalError):
            await running

    run_story(story, failover_timeout_seconds=0.2)


def test_broken_link_to_nobody_in_use_disturbs_nobody(run_story: Any) -> None:
    async def story(world: Any) -> None:
        session, turns = world.open(), world.make_turns()
        outputs = await world.take_all(session, turns[:2])
        idle = {"peer0", "peer1", "peer2", "peer3"} - set(world.hosts_of(session))

        for host in idle:
            world.network.kill(host)
        outputs += await world.take_all(session, turns[2:])

        assert_same(outputs, world.expect(turns))
        assert session.failovers == []

    run_story(story)
