"""Hops that make up steps or answers, or lie when they leave: nobody else is blamed for it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from memory_swarm import look_into
from story_outputs import assert_same

from shoal.peer.pushing.session_outputs import SessionOutputs
from shoal.peer.sessions.sessions import SessionStreamWork
from shoal.protocol.messages.session import Output, Step

THREE_HOPS = ((0, 1), (0, 1), (1, 3), (1, 3), (3, 4), (3, 4))
ONE_BLOCK_TWICE = ((0, 1), (0, 1), (1, 2), (1, 2), (2, 4), (2, 4))


def test_peers_that_say_in_every_session_that_they_leave_get_none_of_them_back(
    run_story: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    note_opened = SessionStreamWork.note_opened

    def note_and_say_leaving(stream: SessionStreamWork, *opened: Any) -> bytes:
        asyncio.get_running_loop().call_soon(stream.say_leaving)
        return note_opened(stream, *opened)

    monkeypatch.setattr(SessionStreamWork, "note_opened", note_and_say_leaving)

    async def story(world: Any) -> None:
        session, turns = world.open(), world.make_turns(num_decoded=80)

        outputs = await world.take_all(session, turns[:41])
        while len(session.handoffs) < 2:  # noqa: ASYNC110 - moves are tried again after a pause
            await asyncio.sleep(0.01)
        outputs += await world.take_all(session, turns[41:])

        assert_same(outputs, world.expect(turns))
        assert len(session.handoffs) == 2  # one of each hop; then nobody is left
        assert session.failovers == []

    run_story(story)


@pytest.mark.parametrize("delivery", ["chain"])
@pytest.mark.parametrize("hop", [0, 1])
def test_step_that_a_leaving_hop_makes_up_does_not_outlive_it(
    run_story: Any, hop: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hop behind has done it, under the number of the step that comes after the move."""

    async def story(world: Any) -> None:
        session, turns = world.open(), world.make_turns(num_decoded=8)
        outputs = await world.take_all(session, turns[:3])
        bad, behind = world.hosts_of(session)[hop : hop + 2]
        (held,) = look_into(world.peer_on(bad)).sessions.values()
        push, pushed = SessionOutputs.push, list[tuple[Step, Output]]()

        def remember(outlet: SessionOutputs, step: Step, output: Output) -> None:
            push(outlet, step, output)
            if outlet is held.outputs:
                pushed.append((step, output))

        monkeypatch.setattr(SessionOutputs, "push", remember)
        outputs += await world.take_all(session, turns[3:4])
        ((step, output),) = pushed
        made_up = replace(step, position=step.position + 1, sequence=step.sequence + 1)
        push(held.outputs, made_up, output)
        await wait_for_sequence([world.peer_on(behind)], made_up.sequence)

        look_into(world.peer_on(bad)).begin_draining()
        assert await look_into(world.peer_on(bad)).wait_until_empty(10)
        outputs += await world.take_all(session, turns[4:])

        assert_same(outputs, world.expect(turns))
        assert world.quarantined_hosts <= {bad}

    run_story(story, spans=THREE_HOPS)


async def wait_for_sequence(peers: list[Any], sequence: int) -> None:
    """Wait until all peers have done a step of the only session that they hold."""
    for peer in peers:
        (held,) = look_into(peer).sessions.values()
        while held.state.done_sequence < sequence:  # noqa: ASYNC110 - a few turns
            await asyncio.sleep(0)


@pytest.mark.parametrize("delivery", ["chain"])
@pytest.mark.parametrize("hop", [0, 1])
@pytest.mark.parametrize("what", ["epoch", "sequence"])
def test_numbers_that_a_hop_makes_up_do_not_outlive_it(
    run_story: Any, what: str, hop: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It pushes under an epoch, or a step more than it was asked to, far ahead of the client's."""

    async def story(world: Any) -> None:
        session, turns = world.open(), world.make_turns(num_decoded=6)
        outputs = await world.take_all(session, turns[:3])
        bad = world.hosts_of(session)[hop]
        held: Any
        (held,) = look_into(world.peer_on(bad)).sessions.values()
        push = held.outputs.push

        def lie(step: Step, output: Output) -> None:
            if what == "epoch":
                held.outputs.next = replace(held.outputs.next, epoch=2**32 - 1)
            push(step, output)
            if what == "sequence":
                push(replace(step, position=step.position + 1, sequence=2**62), output)

        monkeypatch.setattr(held.outputs, "push", lie)
        outputs += await world.take_all(session, turns[3:4])
        behind = [world.peer_on(host) for host in world.hosts_of(session)[hop + 1 :]]
        if what == "sequence":
            await wait_for_sequence(behind, 2**62)

        world.network.kill(bad)
        outputs += await world.take_all(session, turns[4:])

        assert_same(outputs, world.expect(turns))
        assert world.quarantined_hosts == {bad}

    run_story(story, spans=ONE_BLOCK_TWICE)


@pytest.mark.parametrize("delivery", ["chain"])
@pytest.mark.parametrize("hop", [0, 1])
def test_no_other_is_blamed_for_the_numbers_that_a_hop_goes_on_making_up(
    run_story: Any, hop: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hops behind say that they are done with all that the client may ever send."""

    async def story(world: Any) -> None:
        session, turns = world.open(), world.make_turns(num_decoded=6)
        outputs = await world.take_all(session, turns[:3])
        bad = world.hosts_of(session)[hop]
        push = SessionOutputs.push

        def lie(outlet: SessionOutputs, step: Step, output: Output) -> None:
            push(outlet, step, output)
            if outlet in {held.outputs for held in look_into(world.peer_on(bad)).sessions.values()}:
                extra = replace(step, position=step.position + 1, sequence=2**62)
                push(outlet, extra, output)

        monkeypatch.setattr(SessionOutputs, "push", lie)
        outputs += await world.take_all(session, turns[3:])

        assert_same(outputs, world.expect(turns))
        assert world.quarantined_hosts <= {bad}

    run_story(story, spans=ONE_BLOCK_TWICE)


@pytest.mark.parametrize("delivery", ["chain"])
def test_hop_that_answers_what_another_one_makes_up_is_not_blamed(
    run_story: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last hop answers all of them, to a client that has asked for none."""

    async def story(world: Any) -> None:
        session, turns = world.open(), world.make_turns()
        await world.take_all(session, turns[:3])
        _, liar, honest = world.hosts_of(session)
        (held,) = look_into(world.peer_on(liar)).sessions.values()
        push = SessionOutputs.push

        def make_up(outlet: SessionOutputs, step: Step, output: Output) -> None:
            push(outlet, step, output)
            if outlet is held.outputs:
                for ahead in range(1, 100):
                    push(outlet, replace(step, sequence=step.sequence + ahead), output)

        monkeypatch.setattr(SessionOutputs, "push", make_up)
        await world.take(session, turns[3])
        (answering,) = look_into(world.peer_on(honest)).sessions
        while session.mailbox.trouble(answering) is None:  # noqa: ASYNC110 - more of them come
            await asyncio.sleep(0)
        await world.take_all(session, turns[4:])  # of numbers that are no longer right

        assert honest not in world.quarantined_hosts

    run_story(story, spans=THREE_HOPS)
