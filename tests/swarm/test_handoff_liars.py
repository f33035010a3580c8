"""Peers that leave, or say so, and lie: sessions lose nothing by it, and nobody else is blamed."""

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
        await wait_for_step(world.peer_on(behind), made_up.sequence)

        look_into(world.peer_on(bad)).begin_draining()
        assert await look_into(world.peer_on(bad)).wait_until_empty(10)
        outputs += await world.take_all(session, turns[4:])

        assert_same(outputs, world.expect(turns))
        assert world.quarantined_hosts <= {bad}

    run_story(story, spans=THREE_HOPS)


async def wait_for_step(peer: Any, sequence: int) -> None:
    (held,) = look_into(peer).sessions.values()
    while held.state.done_sequence < sequence:  # noqa: ASYNC110 - a few turns
        await asyncio.sleep(0)
