"""Segments are asked on their own; whole steps are in test_session."""

from __future__ import annotations

import asyncio

import pytest
import torch
from session_scene import (
    Answer,
    SessionScene,
    add_two_rows_of_peers,
    be_honest,
    draw,
    in_scene,
    run_span,
)

from shoal.client.session.hop_link import BrokenSegmentError, LiveHop, Question, to_wire
from shoal.client.session.session import RemoteSession
from shoal.protocol.messages.fields import Message
from shoal.protocol.messages.session import Step
from shoal.protocol.net.memory.loopback import Link
from shoal.protocol.tensors import WireDtype


async def begin(scene: SessionScene) -> tuple[RemoteSession, list[LiveHop]]:
    await add_two_rows_of_peers(scene)
    session = scene.open_session()
    await session.step(draw(1, 3))
    return session, list(session.live_hops)


@in_scene()
async def test_questions_of_one_number_to_two_segments_are_kept_apart(scene: SessionScene) -> None:
    """A replay counts its steps anew, while those of the step under way wait elsewhere."""
    session, hops = await begin(scene)
    question = Question(draw(2, 2), 0, sequence=2)
    exchange = session.exchange
    for live in hops[:2]:
        await exchange.send([live], question)

    for live in reversed(hops[:2]):
        output = await exchange.receive([live], question)
        assert torch.equal(output, run_span(draw(2, 2), live.hop.span))


@in_scene(Link(delay_seconds=0.1))
async def test_late_answer_to_a_question_that_was_given_up_is_not_that_of_the_next_one(
    scene: SessionScene,
) -> None:
    session, hops = await begin(scene)
    first = Question(draw(2), 3, sequence=8)
    asking = asyncio.create_task(session.exchange.ask(hops[:1], first))
    await asyncio.sleep(0.05)
    asking.cancel()
    await asyncio.wait([asking])
    output = await session.exchange.ask(hops[:1], Question(draw(4), 3, sequence=9))

    prefix = torch.cat([draw(1, 3), draw(4)], dim=1)
    assert torch.equal(output, run_span(prefix, hops[0].hop.span)[:, -1:])
    assert all(live.link is not None for live in hops)
    assert scene.swarm.book.bandwidth.num_bytes == 0
    assert scene.quarantined == []


@in_scene()
async def test_send_that_is_cancelled_costs_the_hop_its_link_and_nobody_is_blamed(
    scene: SessionScene,
) -> None:
    """Half of the step may be on its way, so the stream is broken, which no peer has done."""
    session, hops = await begin(scene)
    scene.network.pause(scene.names_of(session)[0])
    exchange = session.exchange

    async def send_more_than_the_window_takes() -> None:
        for number in (8, 9, 10):
            question = Question(draw(2, 4000, 32), 3, sequence=number)
            await exchange.send(hops[:1], question)

    sending = asyncio.create_task(send_more_than_the_window_takes())
    await asyncio.sleep(0.1)
    sending.cancel()
    await asyncio.wait([sending])
    assert sending.cancelled()
    scene.network.resume(scene.names_of(session)[0])

    with pytest.raises(BrokenSegmentError, match="lost before"):
        await exchange.ask(hops[:1], Question(draw(4), 3, sequence=11))
    assert scene.quarantined == []


@in_scene()
async def test_peer_of_a_stream_that_was_broken_here_is_not_blamed(scene: SessionScene) -> None:
    """As by a probe, or by what is said for a standby, that is cancelled in the middle."""
    session, hops = await begin(scene)
    scene.network.pause(scene.names_of(session)[0])
    link = hops[0].open_link
    step = Step(link.session, 1, 8, 3, to_wire(draw(2, 4000, 32), WireDtype.FP32))

    async def send_more_than_the_window_takes() -> None:
        while True:
            await link.send(step, 60.0)

    sending = asyncio.create_task(send_more_than_the_window_takes())
    await asyncio.sleep(0.1)
    sending.cancel()
    await asyncio.wait([sending])
    scene.network.resume(scene.names_of(session)[0])

    with pytest.raises(BrokenSegmentError, match="half-way"):
        await session.exchange.ask(hops[:1], Question(draw(4), 3, sequence=11))
    assert scene.quarantined == []


@in_scene()
async def test_lost_hop_leaves_nothing_on_the_line(scene: SessionScene) -> None:
    session, hops = await begin(scene)
    peer = scene.peer_of(session, 1)

    def hang_up(message: Message, answer: Answer) -> Answer:
        return None

    peer.mischief = hang_up
    with pytest.raises(BrokenSegmentError) as caught:
        await session.exchange.ask([hops[1]], Question(draw(2), 3, sequence=9))
    peer.mischief = be_honest

    assert [lost.hop for lost in caught.value.lost] == [hops[1].hop]
    assert scene.swarm.book.bandwidth.num_bytes == 0
    assert scene.quarantined == [peer.name]
    with pytest.raises(BrokenSegmentError, match="lost before"):
        await session.exchange.ask([hops[1]], Question(draw(2), 3, sequence=10))


@in_scene()
async def test_send_that_is_cancelled_while_it_waits_for_its_turn_costs_nothing(
    scene: SessionScene,
) -> None:
    session, hops = await begin(scene)
    scene.network.pause(scene.names_of(session)[0])
    exchange, step = session.exchange, Question(draw(2, 4000, 32), 3, sequence=8)
    filling = [asyncio.create_task(exchange.send(hops[:1], step)) for _ in range(3)]
    await asyncio.sleep(0.1)
    waiting = asyncio.create_task(exchange.send(hops[:1], Question(draw(4), 3, sequence=9)))
    await asyncio.sleep(0.1)

    waiting.cancel()
    await asyncio.wait([waiting])

    assert waiting.cancelled()
    assert hops[0].link is not None
    for task in filling:
        task.cancel()
    await asyncio.wait(filling)
    assert hops[0].link is None
