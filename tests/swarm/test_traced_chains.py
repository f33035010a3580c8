"""What a trace says of the ways between the hops of a chain, on virtual time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from virtual_route import SPANS, RouteWorld, run
from virtual_time import VirtualClock

from shoal.client.trace.trace import AnsweredQuestion, Recorder, StepKind
from shoal.client.trace.trace_summary import describe_summary, make_summary_json, summarize

NUM_TOKENS = 3


def record_tokens(directory: Any, delivery: str, lost: Sequence[int] = ()) -> Recorder:
    """Take down some tokens; before the last one, hops fall silent."""
    recorders: list[Recorder] = []

    async def story(world: RouteWorld) -> None:
        recorders.append(Recorder(VirtualClock()))
        world.session.state.recorder = recorders[0]
        await world.generate(NUM_TOKENS)
        if lost:
            for index in lost:
                world.network.pause(world.host_of(index))
            await world.generate(1)
        recorders[0].end()

    run(directory, story, delivery)
    return recorders[0]


def test_trace_of_a_chain_says_what_was_expected_of_its_ways(tiny_models: Any) -> None:
    """Nobody has measured the ways between these hops: they are expected to be no longer than
    through the client, two delays each.
    """
    recorder = record_tokens(tiny_models.get().directory, "chain")

    exchanges = [e for e in recorder.make_trace().events if isinstance(e, AnsweredQuestion)]
    for there, between, last in zip(*[iter(exchanges)] * 3, strict=True):
        expected = [event.expected_seconds for event in (there, between, last)]
        assert expected == pytest.approx([0.002, 0.004, 0.006])
        assert there.num_bytes_sent > between.num_bytes_sent == last.num_bytes_sent == 0
        assert (there.answered_at, between.answered_at) == (between.sent_at, last.sent_at)
        assert [event.hop.span for event in (there, between, last)] == list(SPANS)
        taken = [event.network_seconds for event in (there, between, last)]
        assert taken[1] == pytest.approx(2 * taken[0])
        assert taken[2] == pytest.approx(3 * taken[0])
        assert sum(taken) <= 4 * 0.002 + 1e-9
    summary = summarize(recorder.make_trace())
    assert summary.expected_way_seconds == pytest.approx(NUM_TOKENS * 0.012)
    assert make_summary_json(summary)["decode"]["expected_way_seconds"] == pytest.approx(0.036)
    (line,) = [line for line in describe_summary(summary) if "predict" in line]
    assert line.split()[-1] == "12.00"
    assert all(len(line) <= 80 for line in describe_summary(summary))


@pytest.mark.parametrize("delivery", ["chain", "star"])
@pytest.mark.parametrize("lost", [(0,), (1,), (2,), (0, 1), (1, 2), (0, 1, 2)], ids=str)
def test_time_of_an_outage_counts_once(
    delivery: str, lost: Sequence[int], tiny_models: Any
) -> None:
    recorder = record_tokens(tiny_models.get().directory, delivery, lost)

    trace = recorder.make_trace()
    summary = summarize(trace)
    hops_seconds = sum(part.breakdown.seconds for part in summary.hops)
    rest_seconds = summary.client_seconds + summary.other_seconds + summary.failover_seconds
    assert len(summary.failovers) == len(lost)
    assert hops_seconds + rest_seconds == pytest.approx(summary.seconds)
    # It is the wait for peers that say nothing: no way takes longer for it.
    assert summary.failover_seconds > 0.9 * summary.seconds > 0.5
    for event in trace.events:
        if isinstance(event, AnsweredQuestion) and event.kind is StepKind.DECODE:
            assert event.network_seconds < 0.02


def test_trace_of_a_star_expects_nothing(tiny_models: Any) -> None:
    summary = summarize(record_tokens(tiny_models.get().directory, "star").make_trace())

    assert summary.expected_way_seconds == 0
    assert not any("predict" in line for line in describe_summary(summary))
