"""Hot standbys: when a hop is lost, a peer goes on that has all of it, and nothing is replayed.

What comes out is always what one engine computes undisturbed.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from chosen_cases import choose_cases
from memory_swarm import look_into
from story_cases import at_hops
from story_outputs import assert_same

from shoal.client.session.session import RemoteSession
from shoal.protocol.messages.session import Output

FOUR_HOPS = ((0, 1), (0, 1), (1, 2), (1, 2), (2, 3), (2, 3), (3, 4), (3, 4))
THREE_EACH = ((0, 2), (0, 2), (0, 2), (2, 4), (2, 4), (2, 4))

# Of four; the two in the middle have the same neighbours.
OUTER_AND_INNER_HOPS = at_hops(0, 1, 3, in_star=1)


async def wait_for_standbys(session: RemoteSession, num_hops: int) -> None:
    async with asyncio.timeout(30):
        while len(session.standbys) < num_hops:  # noqa: ASYNC110 - it happens behind the steps
            await asyncio.sleep(0)


def run(run_story: Any, story: Any, spans: Any = FOUR_HOPS, **settings: Any) -> None:
    run_story(story, spans=spans, standby=True, **settings)


@pytest.mark.parametrize(
    ("delivery", "hop", "lose"),
    choose_cases(
        [("chain", 0, "pause"), ("chain", 1, "kill"), ("chain", 3, "pause"), ("star", 1, "kill")],
        ["chain", "star"],
        range(4),
        ["kill", "pause"],
    ),
)
def test_standby_goes_on_without_a_replay(run_story: Any, hop: int, lose: str) -> None:
    async def story(world: Any) -> None:
        session, turns = world.open(), world.make_turns(num_decoded=9)
        outputs = await world.take_all(session, turns[:4])
        await wait_for_standbys(session, 4)
        outputs += await world.take_all(session, turns[4:6])
        before = world.hosts_of(session)

        getattr(world.network, lose)(before[hop])
        outputs += await world.take_all(session, turns[6:])

        assert_same(outputs, world.expect(turns))
        (failover,) = session.failovers
        assert failover.num_replayed_tokens == 0
        assert [n for n in range(4) if before[n] != world.hosts_of(session)[n]] == [hop]
        if lose == "pause":
            world.network.resume(before[hop])
            await wait_for_standbys(session, 4)  # it is one, by now

    run(run_story, story)


def test_blocks_that_can_have_no_standby_are_known(run_story: Any) -> None:
    async def story(world: Any) -> None:
        session = world.open()
        assert session.spans_without_replica == ()
        await world.take_all(session, world.make_turns(num_decoded=1))
        assert [(span.start, span.stop) for span in session.spans_without_replica] == [(2, 4)]

    run(run_story, story, ((0, 2), (0, 2), (2, 4)))


@OUTER_AND_INNER_HOPS
def test_beams_and_rollbacks_reach_the_standby(run_story: Any, hop: int) -> None:
    async def story(world: Any) -> None:
        session, turns = world.open(), world.make_turns(num_rows=2, num_decoded=9)
        moves = [(1, 0), None, (0, 0), (1, 1)]
        turns[1:] = [replace(turn, row_map=moves[n % 4]) for n, turn in enumerate(turns[1:])]
        outputs = await world.take_all(session, turns[:4])
        await wait_for_standbys(session, 4)
        outputs += await world.take_all(session, turns[4:6])
        await world.take(session, replace(turns[-1], row_map=None))  # a guess that is taken back
        session.rollback(session.position - 1)

        world.network.kill(world.hosts_of(session)[hop])
        outputs += await world.take_all(session, turns[6:])

        assert_same(outputs, world.expect(turns))
        assert [failover.num_replayed_tokens for failover in session.failovers] == [0]

    run(run_story, story)


@at_hops(0, 1, in_star=0)
def test_hop_may_die_with_a_step_in_its_hands_or_behind_it(run_story: Any, hop: int) -> None:
    """Wherever the step was, every hop behind takes it once."""

    async def story(world: Any) -> None:
        session, turns = world.open(), world.make_turns(num_decoded=30)
        outputs = await world.take_all(session, turns[:3])
        for number in range(3, 30, 9):
            await wait_for_standbys(session, 2)
            outputs += await world.take_all(session, turns[number : number + 1])
            host = world.hosts_of(session)[hop]
            step = asyncio.create_task(world.take(session, turns[number + 1]))
            for _ in range(number):  # a little later each time
                await asyncio.sleep(0)
            world.network.kill(host)
            outputs.append(await step)
            outputs += await world.take_all(session, turns[number + 2 : number + 9])

        assert_same(outputs, world.expect(turns[: len(outputs)]))

    run(run_story, story, ((0, 2),) * 4 + ((2, 4),) * 4)


@at_hops(0, 1, in_star=1)
def test_lost_standby_is_replaced_and_costs_nothing(run_story: Any, hop: int) -> None:
    async def story(world: Any) -> None:
        session, turns = world.open(), world.make_turns(num_decoded=12)
        outputs = await world.take_all(session, turns[:4])
        await wait_for_standbys(session, 2)
        used = world.hosts_of(session)
        idle = find_idle(world, used)

        for host in idle[hop]:
            if holds_session(world, host):
                world.network.kill(host)
        outputs += await world.take_all(session, turns[4:8])
        assert session.failovers == []
        await wait_for_standbys(session, 2)
        world.network.kill(used[hop])
        outputs += await world.take_all(session, turns[8:])

        assert_same(outputs, world.expect(turns))
        assert [failover.num_replayed_tokens for failover in session.failovers] == [0]

    run(run_story, story, THREE_EACH)


def find_idle(world: Any, used: list[str]) -> list[list[str]]:
    """Return, for each of two hops, the peers that could stand in for it."""
    spans = {peer.host: look_into(peer).engine.span for peer in world.loopback.peers}
    return [[h for h in spans if h not in used and spans[h] == spans[hop]] for hop in used]


def holds_session(world: Any, host: str) -> bool:
    return bool(look_into(world.peer_on(host)).sessions)


@at_hops(0, 1, in_star=0)
def test_hop_and_standby_that_die_together_get_a_replay(run_story: Any, hop: int) -> None:
    async def story(world: Any) -> None:
        session, turns = world.open(), world.make_turns(num_decoded=8)
        outputs = await world.take_all(session, turns[:4])
        await wait_for_standbys(session, 2)
        used = world.hosts_of(session)

        standbys = [host for host in find_idle(world, used)[hop] if holds_session(world, host)]
        for host in (used[hop], *standbys):
            world.network.kill(host)
        outputs += await world.take_all(session, turns[4:])

        assert_same(outputs, world.expect(turns))
        assert session.failovers[-1].num_replayed_tokens > 0

    run(run_story, story, THREE_EACH)


def test_two_hops_side_by_side_that_die_together_get_a_replay(run_story: Any) -> None:
    async def story(world: Any) -> None:
        session, turns = world.open(), world.make_turns(num_decoded=8)
        outputs = await world.take_all(session, turns[:4])
        await wait_for_standbys(session, 4)

        for hop in (1, 2):
            world.network.kill(world.hosts_of(session)[hop])
        outputs += await world.take_all(session, turns[4:])

        assert_same(outputs, world.expect(turns))

    run(run_story, story)


@at_hops(0, 1, in_star=1)
def test_hops_are_lost_over_and_over_while_there_are_standbys(run_story: Any, hop: int) -> None:
    """Who took over has a standby in turn, and has kept what those behind it need."""

    async def story(world: Any) -> None:
        session, turns = world.open(), world.make_turns(num_decoded=12)
        outputs = await world.take_all(session, turns[:3])
        for number in range(3, 9, 3):
            await wait_for_standbys(session, 2)
            world.network.kill(world.hosts_of(session)[hop])
            outputs += await world.take_all(session, turns[number : number + 3])
        world.network.kill(world.hosts_of(session)[1 - hop])
        outputs += await world.take_all(session, turns[9:])

        assert_same(outputs, world.expect(turns))
        assert [f.num_replayed_tokens for f in session.failovers[:2]] == [0, 0]

    run(run_story, story, ((0, 2),) * 3 + ((2, 4),) * 3)


def test_session_without_replicas_works_as_without_standbys(run_story: Any) -> None:
    async def story(world: Any) -> None:
        session, turns = world.open(), world.make_turns(num_decoded=6)

        outputs = await world.take_all(session, turns)

        assert_same(outputs, world.expect(turns))
        assert session.standbys == []

    run(run_story, story, ((0, 2), (2, 4)))


@at_hops(0, 1, in_star=0)
def test_hop_that_leaves_moves_although_it_has_a_standby(run_story: Any, hop: int) -> None:
    async def story(world: Any) -> None:
        session, turns = world.open(), world.make_turns(num_decoded=60)
        outputs = await world.take_all(session, turns[:4])
        await wait_for_standbys(session, 2)
        leaving = world.hosts_of(session)[hop]

        look_into(world.peer_on(leaving)).begin_draining()
        for turn in turns[4:]:
            outputs.append(await world.take(session, turn))
            if len(outputs) > 10 and session.handoffs:
                break

        assert_same(outputs, world.expect(turns[: len(outputs)]))
        assert session.handoffs
        assert session.failovers == []

    run(run_story, story, THREE_EACH)


def test_standby_that_answers_garbage_is_not_believed(run_story: Any) -> None:
    """What it says before it is needed is read by nobody."""

    async def story(world: Any) -> None:
        session, turns = world.open(), world.make_turns(num_decoded=8)
        outputs = await world.take_all(session, turns[:4])
        await wait_for_standbys(session, 2)

        def distort(message: Output) -> Output:
            return replace(message, sequence=10**6)

        world.liar.lie_once(Output, partial(distort))
        outputs += await world.take_all(session, turns[4:])

        assert_same(outputs, world.expect(turns))

    run(run_story, story, THREE_EACH)
