"""What a recorder takes down of a session over scripted peers, on virtual time."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TypeVar

import pytest
from session_scene import (
    CONFIG,
    WIDTH,
    Answer,
    Mischief,
    SessionScene,
    add_two_rows_of_peers,
    draw,
    in_scene,
    now,
)
from virtual_time import VirtualClock

from shoal.client.session.session import RemoteSession
from shoal.client.trace.trace import (
    AnsweredQuestion,
    Opening,
    Recorder,
    Replacement,
    StepKind,
    StepTaken,
    UnansweredQuestion,
)
from shoal.client.trace.trace_summary import summarize
from shoal.protocol.errors import RouteError
from shoal.protocol.messages.fields import Message
from shoal.protocol.messages.session import Output
from shoal.protocol.net.memory.loopback import Link

DELAY = 0.05
QUEUE, COMPUTE = 0.01, 0.02

EventKind = TypeVar("EventKind")


def record(session: RemoteSession) -> Recorder:
    recorder = Recorder(VirtualClock())
    session.state.recorder = recorder
    return recorder


def find(recorder: Recorder, kind: type[EventKind]) -> list[EventKind]:
    return [event for event in recorder.make_trace().events if isinstance(event, kind)]


def claim(queue_seconds: float, compute_seconds: float) -> Mischief:
    """Let a peer say how long a step waited and was computed there."""

    def mischief(_: Message, answer: Answer) -> Answer:
        if not isinstance(answer, Output):
            return answer
        return replace(answer, queue_seconds=queue_seconds, compute_seconds=compute_seconds)

    return mischief


async def add_two_working_peers(scene: SessionScene) -> None:
    """Answers leave as much later as the peers say that they worked."""
    for name, start, stop in (("a", 0, 3), ("b", 3, 6)):
        peer = await scene.add(name, start, stop)
        peer.mischief = claim(QUEUE, COMPUTE)
        scene.network.set_link(name, "client", Link(delay_seconds=DELAY + QUEUE + COMPUTE))


@in_scene(Link(delay_seconds=DELAY))
async def test_network_time_is_the_delay_of_the_network(scene: SessionScene) -> None:
    await add_two_working_peers(scene)
    session = scene.open_session()
    recorder = record(session)

    await session.step(draw(1, 5))
    await session.step(draw(2), is_decoded=True)
    await session.step(draw(3), is_decoded=True)

    exchanges = find(recorder, AnsweredQuestion)
    assert [event.step for event in exchanges] == [1, 1, 2, 2, 3, 3]
    assert [str(event.hop.span) for event in exchanges] == ["0:3", "3:6"] * 3
    assert [event.kind for event in exchanges] == [StepKind.PREFILL] * 2 + [StepKind.DECODE] * 4
    assert [event.position for event in exchanges] == [0, 0, 5, 5, 6, 6]
    for event in exchanges:
        assert event.network_seconds == pytest.approx(2 * DELAY)
        assert event.queue_seconds == pytest.approx(QUEUE)
        assert event.compute_seconds == pytest.approx(COMPUTE)
        assert event.serialization_seconds == 0.0  # it takes no virtual time
        assert min(event.num_bytes_sent, event.num_bytes_received) > 4 * WIDTH
    steps = find(recorder, StepTaken)
    assert [(step.kind, step.position, step.num_tokens) for step in steps] == [
        (StepKind.PREFILL, 0, 5),
        (StepKind.DECODE, 5, 1),
        (StepKind.DECODE, 6, 1),
    ]
    round_trip_seconds = 2 * DELAY + QUEUE + COMPUTE
    assert steps[2].seconds == pytest.approx(2 * round_trip_seconds)
    openings = find(recorder, Opening)
    assert [str(event.hop.span) for event in openings] == ["0:3", "3:6"]
    summary = summarize(recorder.make_trace())
    assert summary.seconds == pytest.approx(4 * round_trip_seconds)
    assert summary.other_seconds == pytest.approx(0.0)
    assert summary.prefill.opening_seconds == pytest.approx(openings[0].seconds)


@in_scene(Link(delay_seconds=DELAY))
async def test_peer_cannot_have_spent_more_time_than_there_was(scene: SessionScene) -> None:
    peer = await scene.add("boaster", 0, 6)
    peer.mischief = claim(300.0, 100.0)
    session = scene.open_session()
    recorder = record(session)

    await session.step(draw(1))

    (event,) = find(recorder, AnsweredQuestion)
    assert event.queue_seconds == pytest.approx(0.75 * 2 * DELAY)
    assert event.compute_seconds == pytest.approx(0.25 * 2 * DELAY)
    assert event.network_seconds == pytest.approx(0.0)


@in_scene(config=replace(CONFIG, max_step_bytes=2 * 4 * WIDTH))
async def test_every_piece_of_a_prompt_is_taken_down_at_every_hop(scene: SessionScene) -> None:
    await add_two_rows_of_peers(scene)
    session = scene.open_session()
    recorder = record(session)

    await session.step(draw(1, 6))

    for span in ("0:2", "2:4", "4:6"):
        asked = [event for event in find(recorder, AnsweredQuestion) if str(event.hop.span) == span]
        assert [(event.position, event.num_tokens) for event in asked] == [
            (0, 2),
            (2, 2),
            (4, 2),
        ]
    assert len(find(recorder, StepTaken)) == 1


@in_scene(Link(delay_seconds=DELAY))
async def test_failover_is_taken_down_with_its_wait_opening_and_replay(scene: SessionScene) -> None:
    await add_two_rows_of_peers(scene)
    session = scene.open_session()
    recorder = record(session)
    await session.step(draw(1, 5))
    await session.step(draw(2), is_decoded=True)
    lost = session.hops[1]

    scene.network.pause(scene.names_of(session)[1])
    paused_at = now()
    await session.step(draw(3), is_decoded=True)

    (silence,) = find(recorder, UnansweredQuestion)
    assert (silence.hop, silence.step, silence.kind) == (lost, 3, StepKind.DECODE)
    assert silence.seconds >= 1  # what a peer has to answer, at least
    (replacement,) = find(recorder, Replacement)
    failover = replacement.failover
    assert (failover.lost, failover.replacements) == (lost, session.hops[1:2])
    assert (failover.position, failover.num_replayed_tokens) == (6, 6)
    assert failover is session.failovers[0]
    assert replacement.seconds == failover.seconds
    (opening,) = find(recorder, Opening)[3:]
    assert (opening.hop, opening.step, opening.error) == (session.hops[1], 3, None)
    replays = [event for event in find(recorder, AnsweredQuestion) if event.kind is StepKind.REPLAY]
    assert [(event.position, event.num_tokens) for event in replays] == [(0, 5), (5, 1)]
    summary = summarize(recorder.make_trace())
    assert summary.failovers == (replacement,)
    assert summary.failover_seconds == pytest.approx(silence.seconds + failover.seconds)
    in_step_seconds = now() - paused_at
    asked_seconds = 3 * 2 * DELAY
    assert in_step_seconds == pytest.approx(asked_seconds + summary.failover_seconds)
    assert summary.other_seconds == pytest.approx(0.0)


@in_scene(config=replace(CONFIG, failover_timeout_seconds=2.0))
async def test_step_that_fails_is_taken_down_with_its_error(scene: SessionScene) -> None:
    await scene.add("a", 0, 6)
    session = scene.open_session()
    recorder = record(session)
    await session.step(draw(1))
    scene.network.kill("a")

    with pytest.raises(RouteError) as failure:
        await session.step(draw(2), is_decoded=True)

    assert [step.error for step in find(recorder, StepTaken)] == [None, str(failure.value)]
    assert find(recorder, UnansweredQuestion) != []


@in_scene(Link(delay_seconds=DELAY))
async def test_trace_ends_with_its_last_event_even_when_that_ends_late(scene: SessionScene) -> None:
    await scene.add("a", 0, 6)
    session = scene.open_session()
    recorder = record(session)
    step = asyncio.create_task(session.step(draw(1)))
    await asyncio.sleep(DELAY)

    recorder.end()
    await step

    (taken,) = find(recorder, StepTaken)
    assert recorder.make_trace().ended_at == taken.ended_at
    assert taken.seconds > 2 * DELAY
