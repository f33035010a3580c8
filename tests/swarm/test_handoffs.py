"""Peers that leave while sessions are at them: their hops move, and nobody notices.

What comes out is always what one engine computes undisturbed.
"""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from memory_swarm import look_into
from story_cases import at_hops
from story_outputs import assert_same

from shoal.client.session.session import RemoteSession
from shoal.client.session.standby import Standby
from shoal.client.trace.trace import Move, Recorder
from shoal.client.trace.trace_file import make_trace_json
from shoal.protocol.fair_share import SharedBytes
from shoal.protocol.net.clock import SystemClock
from shoal.protocol.net.memory.loopback import Link
from shoal.protocol.spans import Span
from shoal.protocol.versions import HANDOFF_VERSION

# Stories of one hop leave out the third: its neighbours are like those of the second.
FOUR_HOPS = ((0, 1), (0, 1), (1, 2), (1, 2), (2, 3), (2, 3), (3, 4), (3, 4))
THREE_OF_EACH = ((0, 2), (0, 2), (0, 2), (2, 4), (2, 4), (2, 4))
MOST_TURNS = 90


def drain(world: Any, *hosts: str) -> None:
    for host in hosts:
        look_into(world.peer_on(host)).begin_draining()


def has_moved(session: RemoteSession, num_handoffs: int = 1) -> Callable[[], bool]:
    return lambda: len(session.handoffs) >= num_handoffs


def has_given_up(session: RemoteSession) -> bool:
    """Return whether nobody looks for another peer any more."""
    moving = session._reserve._by_hop.values()  # type: ignore[attr-defined]
    return bool(moving) and all(one._task.done() for one in moving)


async def wait_until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not is_so():  # noqa: ASYNC110 - nobody is told of what happens behind the steps
            await asyncio.sleep(0)


async def take_until(
    world: Any, session: RemoteSession, turns: list[Any], is_so: Callable[[], bool], num_more: int
) -> list[Any]:
    """Take turns until something is so, and some more behind; the last of them wait for it."""
    outputs: list[Any] = []
    for index, turn in enumerate(turns):
        if index == len(turns) - num_more - 1:
            await wait_until(is_so)
        if is_so():
            num_more -= 1
        if num_more < 0:
            return outputs
        outputs.append(await world.take(session, turn))
    raise AssertionError("the turns were over before")


async def assert_left(world: Any, *hosts: str) -> None:
    for host in hosts:
        assert await look_into(world.peer_on(host)).wait_until_empty(10), f"{host} holds a session"


@at_hops(0, 1, 3, in_star=0)
def test_hop_moves_while_tokens_go_on(run_story: Any, hop: int) -> None:
    async def story(world: Any) -> None:
        session, turns = world.open(), world.make_turns(num_decoded=MOST_TURNS)
        outputs = await world.take_all(session, turns[:8])
        before = world.hosts_of(session)

        drain(world, before[hop])
        outputs += await take_until(world, session, turns[8:], has_moved(session), 3)

        assert_same(outputs, world.expect(turns[: len(outputs)]))
        after = world.hosts_of(session)
        assert [n for n in range(4) if before[n] != after[n]] == [hop]
        assert session.failovers == []
        (handoff,) = session.handoffs
        assert handoff.left.span == handoff.replacement.span
        assert handoff.position < session.position
        assert world.quarantined_hosts == set()
        await assert_left(world, before[hop])

    run_story(story, spans=FOUR_HOPS)


def test_trace_tells_of_a_move_beside_the_steps(run_story: Any) -> None:
    async def story(world: Any) -> None:
        session, turns = world.open(), world.make_turns(num_decoded=MOST_TURNS)
        recorder = Recorder(SystemClock())
        session.state.recorder = recorder
        await world.take_all(session, turns[:4])

        drain(world, world.hosts_of(session)[1])
        await take_until(world, session, turns[4:], has_moved(session), 3)

        (handoff,) = session.handoffs
        trace = recorder.make_trace()
        (move,) = [event for event in trace.events if isinstance(event, Move)]
        assert move.handoff is handoff
        assert move.seconds == handoff.seconds > handoff.stall_seconds
        slices = [e for e in make_trace_json(trace)["traceEvents"] if e.get("name") == "handoff"]
        assert [part["args"]["position"] for part in slices] == [handoff.position]

    run_story(story)


@at_hops(0, 1, in_star=1)
def test_beams_and_rollbacks_go_along(run_story: Any, hop: int) -> None:
    """What moves rows or goes back during the move reaches the new hop in its place."""

    async def story(world: Any) -> None:
        session, turns = world.open(), world.make_turns(num_rows=2, num_decoded=MOST_TURNS)
        moves = [(1, 0), None, (0, 0), (1, 1), None, (1, 0)]
        turns[1:-3] = [replace(turn, row_map=moves[n % 6]) for n, turn in enumerate(turns[1:-3])]
        outputs = await world.take_all(session, turns[:6])
        leaving = world.hosts_of(session)[hop]
        taken = turns[:6]

        drain(world, leaving)
        while not session.handoffs:
            turn = turns[len(taken)]
            if turn.row_map is None:  # a guess that is taken back
                await world.take(session, turns[-1])
                session.rollback(session.position - 1)
            outputs.append(await world.take(session, turn))
            taken.append(turn)
        outputs += await world.take_all(session, turns[-3:])

        assert_same(outputs, world.expect([*taken, *turns[-3:]]))
        assert [handoff.left.peer.peer_id for handoff in session.handoffs] == [
            world.peer_on(leaving).peer_id
        ]
        assert session.failovers == []

    run_story(story)


@pytest.mark.parametrize("hops", [(0, 1), (1, 2), (0, 1, 2, 3)])
def test_hops_that_leave_together_move_one_after_the_other(
    run_story: Any, hops: tuple[int, ...]
) -> None:
    async def story(world: Any) -> None:
        session, turns = world.open(), world.make_turns(num_decoded=MOST_TURNS)
        outputs = await world.take_all(session, turns[:4])
        before = world.hosts_of(session)

        drain(world, *(before[hop] for hop in hops))
        moved = has_moved(session, len(hops))
        outputs += await take_until(world, session, turns[4:], moved, 3)

        assert_same(outputs, world.expect(turns[: len(outputs)]))
        after = world.hosts_of(session)
        assert {n for n in range(4) if before[n] != after[n]} == set(hops)
        assert session.failovers == []
        await assert_left(world, *(before[hop] for hop in hops))

    run_story(story, spans=FOUR_HOPS)


def when_it_gets_a_step(world: Any, peer: Any, act: Callable[[], object]) -> None:
    """Do something when a peer has been sent a step, before it has done it."""
    take = look_into(peer).compute.submit

    def submit(work: Any, holder: Any) -> Any:
        act()
        return take(work, holder)

    look_into(peer).compute.submit = submit


def when_it_opens_a_session(peer: Any, act: Callable[[], object]) -> None:
    """Do something when a peer is about to open a session."""
    admission: Any = look_into(peer).admission
    open_session = admission.open

    async def open_it(*arguments: Any) -> Any:
        act()
        return await open_session(*arguments)

    admission.open = open_it


@at_hops(0, 1, in_star=0)
def test_next_hop_that_leaves_during_the_move_moves_as_well(run_story: Any, hop: int) -> None:
    async def story(world: Any) -> None:
        session, turns = world.open(), world.make_turns(num_decoded=MOST_TURNS)
        outputs = await world.take_all(session, turns[:6])
        before = world.hosts_of(session)
        drain_the_other = partial(drain, world, before[1 - hop])
        for peer in world.loopback.peers:
            if peer.host not in before:
                when_it_gets_a_step(world, peer, drain_the_other)

        drain(world, before[hop])
        outputs += await take_until(world, session, turns[6:], has_moved(session, 2), 3)

        assert_same(outputs, world.expect(turns[: len(outputs)]))
        assert set(before).isdisjoint(world.hosts_of(session))
        assert session.failovers == []
        await assert_left(world, *before)

    run_story(story)


@at_hops(0, 1, in_star=1)
@pytest.mark.parametrize("trouble", ["kill", "pause"])
def test_new_hop_that_dies_during_the_move_costs_nothing(
    run_story: Any, hop: int, trouble: str
) -> None:
    async def story(world: Any) -> None:
        session, turns = world.open(), world.make_turns(num_decoded=MOST_TURNS)
        outputs = await world.take_all(session, turns[:6])
        before = world.hosts_of(session)
        span = session.hops[hop].span
        lost: list[str] = []

        def lose(host: str) -> None:
            if not lost:
                lost.append(host)
                getattr(world.network, trouble)(host)

        for peer in world.loopback.peers:
            if peer.host not in before and look_into(peer).engine.span == span:
                when_it_gets_a_step(world, peer, lambda host=peer.host: lose(host))

        drain(world, before[hop])
        await wait_until(lambda: bool(lost))
        outputs += await world.take_all(session, turns[6:9])
        if trouble == "kill":
            await wait_until(has_moved(session))
            outputs += await world.take_all(session, turns[9:12])
            assert set(world.hosts_of(session)).isdisjoint({before[hop], *lost})

        assert_same(outputs, world.expect(turns[: len(outputs)]))
        assert session.failovers == []
        world.network.resume(lost[0])

    run_story(story, spans=THREE_OF_EACH)


@at_hops(0, 1, in_star=0)
def test_hop_that_dies_before_it_has_moved_is_replaced(run_story: Any, hop: int) -> None:
    async def story(world: Any) -> None:
        session, turns = world.open(), world.make_turns(num_decoded=12)
        outputs = await world.take_all(session, turns[:6])
        before = world.hosts_of(session)
        killed: list[str] = []

        def lose() -> None:
            if not killed:
                killed.append(before[hop])
                world.network.kill(before[hop])

        for peer in world.loopback.peers:
            if peer.host not in before:
                when_it_gets_a_step(world, peer, lose)

        drain(world, before[hop])
        await wait_until(lambda: bool(session.handoffs) or len(killed) > 0)
        outputs += await world.take_all(session, turns[6:])

        assert_same(outputs, world.expect(turns))
        assert before[hop] not in world.hosts_of(session)

    run_story(story, spans=THREE_OF_EACH)


@at_hops(0, 1, in_star=1)
def test_hop_without_a_replica_stays_until_there_is_one(run_story: Any, hop: int) -> None:
    async def story(world: Any) -> None:
        session, turns = world.open(), world.make_turns(num_decoded=MOST_TURNS)
        outputs = await world.take_all(session, turns[:4])
        before = world.hosts_of(session)
        other = ({"peer0", "peer1"}, {"peer2", "peer3"})[hop] - {before[hop]}
        world.break_links(*other)

        drain(world, before[hop])
        outputs += await world.take_all(session, turns[4:10])
        assert world.hosts_of(session) == before

        await world.mend_links(*other)
        await wait_until(has_moved(session))
        outputs += await world.take_all(session, turns[10:14])

        assert_same(outputs, world.expect(turns[:14]))
        assert session.failovers == []
        await assert_left(world, before[hop])

    run_story(story)


@pytest.mark.parametrize("delivery", ["chain"])
@pytest.mark.parametrize(("hop", "is_under_way"), [(1, False), (0, True), (1, True)])
def test_peer_does_not_wait_for_a_session_that_waits_for_other_blocks(
    run_story: Any, hop: int, is_under_way: bool
) -> None:
    """It may be about to serve these: each would wait for the other."""

    async def story(world: Any) -> None:
        session, turns = world.open(), world.make_turns(num_decoded=6)
        outputs = await world.take_all(session, turns[:4])
        before = world.hosts_of(session)
        others = [({"peer0", "peer1"}, {"peer2", "peer3"})[n] - {before[n]} for n in range(2)]
        world.break_links(*others[1 - hop])
        world.network.kill(before[1 - hop])
        step = asyncio.create_task(world.take(session, turns[4])) if is_under_way else None
        if is_under_way:
            await wait_until(lambda: session.state.sought is not None)

        drain(world, before[hop])
        await assert_left(world, before[hop])
        await world.mend_links(*others[1 - hop])
        outputs.append(await (step or world.take(session, turns[4])))
        outputs.append(await world.take(session, turns[5]))

        assert_same(outputs, world.expect(turns[:6]))
        assert set(world.hosts_of(session)) == set.union(*others)

    run_story(story)


@at_hops(0, 1, in_star=0)
def test_hop_that_cannot_move_is_replaced_when_its_peer_has_left(run_story: Any, hop: int) -> None:
    """Nobody has room: tokens go on at the peer until it ends its streams."""

    async def story(world: Any) -> None:
        session, turns = world.open(), world.make_turns(num_decoded=12)
        outputs = await world.take_all(session, turns[:4])
        before = world.hosts_of(session)
        full = [look_into(peer) for peer in world.loopback.peers if peer.host not in before]
        for service in full:
            service.resources.max_sessions = 0

        drain(world, before[hop])
        outputs += await world.take_all(session, turns[4:8])
        assert session.handoffs == []
        for service in full:
            service.resources.max_sessions = 8
        world.network.kill(before[hop])
        outputs += await world.take_all(session, turns[8:])

        assert_same(outputs, world.expect(turns))
        assert before[hop] not in world.hosts_of(session)

    run_story(story)


@at_hops(0, 1, 3, in_star=3)
def test_session_that_nobody_steps_moves_as_well(run_story: Any, hop: int) -> None:
    async def story(world: Any) -> None:
        session, turns = world.open(), world.make_turns(num_rows=2)
        turns[2] = replace(turns[2], row_map=(1, 0))
        outputs = await world.take_all(session, turns[:3])
        leaving = world.hosts_of(session)[hop]

        drain(world, leaving)
        await assert_left(world, leaving)
        outputs += await world.take_all(session, turns[3:])

        assert_same(outputs, world.expect(turns))
        assert len(session.handoffs) == 1
        assert session.failovers == []

    run_story(story, spans=FOUR_HOPS)


@at_hops(0, 1, in_star=1)
def test_session_and_its_fork_both_move(run_story: Any, hop: int) -> None:
    async def story(world: Any) -> None:
        session, turns = world.open(), world.make_turns(num_decoded=6)
        await world.take_all(session, turns[:4])
        twin = world.open()
        await session.fork_into(twin, 7)
        leaving = world.hosts_of(session)[hop]

        drain(world, leaving)
        await assert_left(world, leaving)
        outputs = await world.take_all(twin, turns[3:])
        rest = await world.take_all(session, turns[4:])

        assert_same(outputs, world.expect(turns)[3:])
        assert_same(rest, world.expect(turns)[4:])
        assert [len(each.handoffs) for each in (session, twin)] == [1, 1]
        assert session.failovers == twin.failovers == []

    run_story(story)


@at_hops(0, 1, 3, in_star=1)
def test_session_moved_by_a_handoff_survives_kills(run_story: Any, hop: int) -> None:
    """Whoever took over has kept what those around it need to be replaced."""

    async def story(world: Any) -> None:
        session, turns = world.open(), world.make_turns(num_rows=2, num_decoded=10)
        turns[3] = replace(turns[3], row_map=(1, 1))
        outputs = await world.take_all(session, turns[:5])
        leaving = world.hosts_of(session)[hop]
        drain(world, leaving)
        await assert_left(world, leaving)
        outputs += await world.take_all(session, turns[5:7])

        for lost in range(4):
            if lost != hop:
                world.network.kill(world.hosts_of(session)[lost])
                outputs += await world.take_all(session, turns[7 + lost : 8 + lost])
        outputs += await world.take_all(session, turns[7 + hop : 8 + hop])

        expected = [*turns[:7], *(turns[7 + n] for n in range(4) if n != hop), turns[7 + hop]]
        assert_same(outputs, world.expect(expected))

    run_story(story, spans=FOUR_HOPS)


@at_hops(0, 1, in_star=0)
def test_peer_that_leaves_while_a_prompt_is_under_way_keeps_it(run_story: Any, hop: int) -> None:
    """The pieces that are on their way are computed there, and then the hop moves."""

    async def story(world: Any) -> None:
        turns = world.make_turns(num_decoded=4, prompt_tokens=48)
        session, span = world.open(), ((0, 2), (2, 4))[hop]
        positions: list[int] = []

        def leave_at_the_fourth(host: str) -> None:
            positions.append(session.position)
            if len(positions) == 4:
                drain(world, host)

        for peer in world.loopback.peers:
            if look_into(peer).engine.span == Span(*span):
                when_it_gets_a_step(world, peer, partial(leave_at_the_fourth, peer.host))
        outputs = await world.take_all(session, turns[:1])
        leaving = world.hosts_of(session)[hop]
        await assert_left(world, leaving)
        outputs += await world.take_all(session, turns[1:])

        assert positions[:4] == [0] * 4
        assert_same(outputs, world.expect(turns))
        assert [handoff.left.span for handoff in session.handoffs] == [Span(*span)]
        assert session.failovers == []

    run_story(story, max_step_bytes=4 * 64 * 4)


def test_session_may_be_closed_while_it_moves(run_story: Any) -> None:
    async def story(world: Any) -> None:
        for num_turns_of_the_loop in range(0, 60, 3):
            for peer in world.loopback.peers:
                look_into(peer).is_draining = False
            session = world.open()
            await world.take_all(session, world.make_turns())
            drain(world, world.hosts_of(session)[1])
            for _ in range(num_turns_of_the_loop):
                await asyncio.sleep(0)
            await session.close()

    run_story(story)


@pytest.mark.parametrize("delivery", ["star"])
def test_prompt_that_comes_during_the_move_holds_up_no_step(
    run_story: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new hop computes it before the switch, not while the session waits for that."""

    async def story(world: Any) -> None:
        session = world.open()
        turns = world.make_turns(prompt_tokens=24)
        outputs = await world.take_all(session, turns[1:3])
        leaving = world.hosts_of(session)[0]
        taken_while_held_up: list[int] = []
        replay, follow = Standby.replay, Standby.follow

        async def replay_and_take_the_prompt(standby: Standby) -> None:
            await replay(standby)
            outputs.append(await world.take(session, turns[0]))

        async def follow_and_note(standby: Standby) -> None:
            if session._in_use.locked():
                taken_while_held_up.append(standby._tail[0].hidden_BTH.shape[1])
            await follow(standby)

        monkeypatch.setattr(Standby, "replay", replay_and_take_the_prompt)
        monkeypatch.setattr(Standby, "follow", follow_and_note)
        drain(world, leaving)
        await wait_until(has_moved(session))
        outputs += await world.take_all(session, turns[3:])

        assert taken_while_held_up == []
        assert_same(outputs, world.expect([*turns[1:3], turns[0], *turns[3:]]))

    run_story(story)


@pytest.mark.parametrize("delivery", ["chain"])
def test_hop_whose_input_nobody_has_kept_stays(run_story: Any) -> None:
    async def story(world: Any) -> None:
        for peer in world.loopback.peers:
            look_into(peer).pushing = replace(look_into(peer).pushing, logged=SharedBytes(0))
        session, turns = world.open(), world.make_turns(num_decoded=12)
        outputs = await world.take_all(session, turns[:4])
        before = world.hosts_of(session)

        drain(world, before[1])
        outputs += await world.take_all(session, turns[4:8])
        await wait_until(lambda: has_given_up(session))
        assert world.hosts_of(session) == before
        world.network.kill(before[1])
        outputs += await world.take_all(session, turns[8:])

        assert_same(outputs, world.expect(turns))
        assert before[1] not in world.hosts_of(session)

    run_story(story)


@pytest.mark.parametrize("delivery", ["chain"])
def test_hop_that_could_not_move_takes_its_log_with_it(run_story: Any) -> None:
    """Some MiB, which would else wait for Python's garbage collector."""

    async def story(world: Any) -> None:
        for peer in world.loopback.peers:
            look_into(peer).pushing = replace(look_into(peer).pushing, logged=SharedBytes(0))
        session, turns = world.open(), world.make_turns(num_decoded=4)
        await world.take_all(session, turns[:2])
        leaving = world.hosts_of(session)[1]
        drain(world, leaving)
        await world.take(session, turns[2])
        await wait_until(lambda: has_given_up(session))
        hop = weakref.ref(session._hops[1])

        gc.disable()
        try:
            await session.close()
            assert hop() is None
        finally:
            gc.enable()

    run_story(story)


@pytest.mark.parametrize("delivery", ["chain"])
def test_hop_behind_an_older_peer_stays(run_story: Any) -> None:
    """It pushes to one other only, and would end the stream of who asks for more."""

    async def story(world: Any) -> None:
        session, turns = world.open(), world.make_turns(num_decoded=12)
        outputs = await world.take_all(session, turns[:4])
        before = world.hosts_of(session)
        older = session._hops[0]
        peer = replace(older.hop.peer, max_version=HANDOFF_VERSION - 1)
        older.hop = replace(older.hop, peer=peer)

        drain(world, before[1])
        outputs += await world.take_all(session, turns[4:8])
        await wait_until(lambda: has_given_up(session))
        world.network.kill(before[1])
        outputs += await world.take_all(session, turns[8:])

        assert_same(outputs, world.expect(turns))
        assert (len(session.handoffs), len(session.failovers)) == (0, 1)

    run_story(story)


@pytest.mark.parametrize("delivery", ["chain"])
@pytest.mark.parametrize("direction", ["from the hop before", "to the hop behind"])
def test_peers_out_of_reach_of_each_other_are_not_to_blame(run_story: Any, direction: str) -> None:
    """Another peer is taken, or the client carries what it cannot push any further."""

    async def story(world: Any) -> None:
        session, turns = world.open(), world.make_turns(num_decoded=MOST_TURNS)
        outputs = await world.take_all(session, turns[:4])
        before, leaving, behind = world.hosts_of(session)
        cut_off: list[str] = []

        def cut_off_the_first(host: str) -> None:
            if not cut_off:
                cut_off.append(host)
                ways = {"from the hop before": (before, host), "to the hop behind": (host, behind)}
                world.network.set_link(*ways[direction], Link(loss_fraction=1.0))

        for host in {"peer1", "peer2", "peer3"} - {leaving}:
            when_it_opens_a_session(world.peer_on(host), partial(cut_off_the_first, host))

        drain(world, leaving)
        await assert_left(world, leaving)
        outputs += await world.take_all(session, turns[4:8])

        assert_same(outputs, world.expect(turns[:8]))
        is_passed_over = direction == "from the hop before"
        assert (world.hosts_of(session)[1] not in cut_off) == is_passed_over
        assert len(session.handoffs) == 1
        assert world.quarantined_hosts == set()
        assert session.failovers == []

    run_story(story, spans=((0, 1), (1, 3), (1, 3), (1, 3), (3, 4)))


def test_many_sessions_move_at_once(run_story: Any) -> None:
    async def story(world: Any) -> None:
        turns = world.make_turns(num_decoded=MOST_TURNS)
        sessions = [world.open() for _ in range(4)]
        expected = world.expect(turns)

        async def generate(session: RemoteSession) -> list[Any]:
            return await take_until(world, session, turns, has_moved(session), 2)

        generating = [asyncio.create_task(generate(session)) for session in sessions]
        await wait_until(lambda: all(session.position > 8 for session in sessions))
        leaving = {world.hosts_of(session)[1] for session in sessions}
        drain(world, *leaving)

        for outputs in await asyncio.gather(*generating):
            assert len(outputs) > 8
            assert_same(outputs, expected[: len(outputs)])
        await assert_left(world, *leaving)

    run_story(story, spans=((0, 2), *((2, 4),) * 5))
