"""A trace of made-up events as a file for Perfetto and as a summary on one screen."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from announcements import describe_peer

from shoal.client.routing.route import Hop
from shoal.client.trace.trace import (
    AnsweredQuestion,
    Opening,
    Replacement,
    SessionFailover,
    StepKind,
    StepTaken,
    Trace,
    UnansweredQuestion,
)
from shoal.client.trace.trace_file import make_trace_json
from shoal.client.trace.trace_summary import describe_summary, make_summary_json, summarize
from shoal.protocol.identity import Identity
from shoal.protocol.ids import ModelId
from shoal.protocol.spans import Span

START = 1000.0
MS = 0.001


def make_hop(number: int, start: int, stop: int) -> Hop:
    peer_id = Identity(bytes([number]) * 32).peer_id
    span = Span(start, stop)
    return Hop(
        describe_peer(
            peer_id=peer_id,
            model_id=ModelId("a" * 32),
            num_blocks=200,
            span=span,
            issued_at=0.0,
            expires_at=1.0,
        ),
        span,
    )


FIRST, SECOND, SPARE = make_hop(1, 0, 100), make_hop(2, 100, 200), make_hop(3, 100, 200)


def ask(
    step: int, at: float, hop: Hop, kind: StepKind = StepKind.DECODE, num_tokens: int = 1
) -> AnsweredQuestion:
    """Ten milliseconds: 1 to encode, 4 of network, 2 of queue, 2 of compute, 1 to decode."""
    started_at = START + at * MS
    return AnsweredQuestion(
        step,
        started_at,
        started_at + 10 * MS,
        kind,
        hop,
        4 + step,
        num_tokens,
        started_at + 1 * MS,
        started_at + 9 * MS,
        2 * MS,
        2 * MS,
        300,
        200,
    )


def take(step: int, start: float, stop: float, kind: StepKind = StepKind.DECODE) -> StepTaken:
    num_tokens = 1 if kind is StepKind.DECODE else 5
    return StepTaken(step, START + start * MS, START + stop * MS, kind, 4 + step, num_tokens)


def fail_over(step: int, start: float, stop: float, lost: Hop, reason: str) -> Replacement:
    failover = SessionFailover(lost, reason, "was lost", (SPARE,), 7, 6, (stop - start) * MS)
    return Replacement(step, START + start * MS, START + stop * MS, failover)


TEXT = Trace(
    START,
    START + 150 * MS,
    (
        Opening(1, START + 5 * MS, START + 20 * MS, SECOND),
        Opening(1, START + 5 * MS, START + 19 * MS, FIRST),
        ask(1, 20, FIRST, StepKind.PREFILL, 5),
        ask(1, 30, SECOND, StepKind.PREFILL, 5),
        take(1, 5, 40, StepKind.PREFILL),
        ask(2, 45, FIRST),
        ask(2, 55, SECOND),
        take(2, 45, 65),
        ask(3, 72, FIRST),
        UnansweredQuestion(
            3, START + 82 * MS, START + 92 * MS, StepKind.DECODE, SECOND, 7, "it broke"
        ),
        Opening(3, START + 93 * MS, START + 98 * MS, SPARE),
        ask(3, 98, SPARE, StepKind.REPLAY, 6),
        fail_over(3, 92, 108, SECOND, "it broke"),
        ask(3, 108, SPARE),
        take(3, 72, 120),
    ),
)


def test_summary_says_where_the_time_of_every_token_went() -> None:
    summary = summarize(TEXT)

    assert summary.num_decoded_tokens == 2
    assert summary.seconds == pytest.approx(105 * MS)  # from 45 to the end
    assert summary.client_seconds == pytest.approx((7 + 30) * MS)
    assert summary.failover_seconds == pytest.approx((10 + 16) * MS)
    assert summary.other_seconds == pytest.approx(2 * MS)
    assert [(part.hop, part.breakdown.num_exchanges) for part in summary.hops] == [
        (FIRST, 2),
        (SECOND, 1),
        (SPARE, 1),
    ]
    first = summary.hops[0].breakdown
    assert first.queue_seconds == pytest.approx(4 * MS)
    assert first.compute_seconds == pytest.approx(4 * MS)
    assert first.network_seconds == pytest.approx(8 * MS)
    assert first.serialization_seconds == pytest.approx(4 * MS)
    hops_seconds = sum(part.breakdown.seconds for part in summary.hops)
    known_seconds = hops_seconds + summary.client_seconds + summary.failover_seconds
    assert known_seconds + summary.other_seconds == pytest.approx(summary.seconds)


def test_hops_that_are_lost_together_share_one_failover() -> None:
    failover = fail_over(3, 92, 107, FIRST, "broke")

    summary, before = summarize(replace(TEXT, events=(*TEXT.events, failover))), summarize(TEXT)

    assert summary.failover_seconds == before.failover_seconds
    assert summary.other_seconds == before.other_seconds
    assert describe_summary(summary)[-1] == "failovers: 2, 12 tokens replayed, 0.02 s"


def test_steps_that_failed_decoded_nothing() -> None:
    failed = replace(take(4, 150, 170), error="nobody serves them")
    again = (ask(5, 172, FIRST), ask(5, 182, SPARE), take(5, 172, 192))
    lost = UnansweredQuestion(
        4, START + 160 * MS, START + 170 * MS, StepKind.DECODE, SPARE, 8, "gone"
    )
    trace = Trace(START, START + 200 * MS, (*TEXT.events, ask(4, 150, FIRST), lost, failed, *again))

    summary, before = summarize(trace), summarize(TEXT)

    assert summary.num_decoded_tokens == before.num_decoded_tokens + 1
    assert summary.hops[0].breakdown.num_exchanges == 3
    assert summary.seconds == pytest.approx(before.seconds + 50 * MS)
    assert summary.failover_seconds == pytest.approx(before.failover_seconds + 22 * MS)
    assert summary.other_seconds == pytest.approx(before.other_seconds)
    assert summary.client_seconds == pytest.approx(before.client_seconds + 8 * MS)


def test_prompt_that_failed_and_came_again_counts_once() -> None:
    failed = replace(take(1, 5, 20, StepKind.PREFILL), error="nobody serves them")
    again = (ask(2, 25, FIRST, StepKind.PREFILL, 5), take(2, 25, 40, StepKind.PREFILL))

    summary = summarize(Trace(START, START + 50 * MS, (failed, *again)))

    assert summary.prefill.num_tokens == 5
    assert summary.prefill.seconds == pytest.approx(50 * MS)


def test_summary_says_what_the_first_token_took() -> None:
    prefill = summarize(TEXT).prefill

    assert prefill.num_tokens == 5
    assert prefill.seconds == pytest.approx(45 * MS)
    assert prefill.opening_seconds == pytest.approx(15 * MS)
    assert prefill.client_seconds == pytest.approx((5 + 5) * MS)
    assert prefill.breakdown.seconds == pytest.approx(20 * MS)


def test_summary_is_a_table_of_eighty_columns() -> None:
    lines = describe_summary(summarize(TEXT))

    assert max(map(len, lines)) <= 80
    assert len(lines) < 24
    cells = ["2.00", "2.00", "4.00", "2.00", "10.00"]
    assert [line.split() for line in lines if line.startswith("  …")] == [
        [f"…{FIRST.peer.peer_id[-6:]}[0:100]", *cells],
        [f"…{SECOND.peer.peer_id[-6:]}[100:200],", "1", "token", *cells],
        [f"…{SPARE.peer.peer_id[-6:]}[100:200],", "1", "token", *cells],
    ]
    assert lines[-2].split() == ["from", "token", "to", "token", "52.50"]
    assert lines[-1] == "failovers: 1, 6 tokens replayed, 0.02 s"


def test_summary_in_json_has_the_sums() -> None:
    facts = make_summary_json(summarize(TEXT))

    assert json.loads(json.dumps(facts)) == facts
    assert facts["prefill"]["seconds"] == 0.045
    assert facts["decode"]["failover_seconds"] == 0.026
    assert facts["decode"]["hops"][0] == {
        "peer_id": FIRST.peer.peer_id,
        "span": "0:100",
        "tokens": 2,
        "queue_seconds": 0.004,
        "compute_seconds": 0.004,
        "network_seconds": 0.008,
        "serialization_seconds": 0.004,
    }


@pytest.mark.parametrize("num_events", range(len(TEXT.events) + 1))
def test_trace_that_ends_anywhere_is_drawn_and_summed_up(num_events: int) -> None:
    trace = Trace(TEXT.started_at, TEXT.ended_at, TEXT.events[:num_events])

    lines = describe_summary(summarize(trace))

    assert max(map(len, lines)) <= 80
    check_nesting(make_trace_json(trace)["traceEvents"])


def read_tracks(events: list[dict[str, Any]]) -> dict[int, str]:
    return {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}


def check_nesting(events: list[dict[str, Any]]) -> None:
    """Slices of a track lie inside of each other or side by side, in whole nanoseconds."""
    for track in read_tracks(events):
        around: list[int] = []
        for event in events:
            if event["ph"] != "X" or event["tid"] != track:
                continue
            start = round(event["ts"] * 1000)
            stop = start + round(event["dur"] * 1000)
            while around and around[-1] <= start:
                around.pop()
            assert not around or stop <= around[-1], event
            around.append(stop)


def test_trace_file_has_a_track_for_the_client_and_for_each_hop() -> None:
    events = make_trace_json(TEXT)["traceEvents"]

    assert read_tracks(events) == {
        0: "client",
        1: FIRST.name,
        2: SECOND.name,
        3: SPARE.name,
    }
    check_nesting(events)


def test_trace_file_puts_queue_and_compute_in_the_middle_of_an_exchange() -> None:
    events = make_trace_json(TEXT)["traceEvents"]

    drawn = [
        (event["name"], event["ts"], event["dur"])
        for event in events
        if event["ph"] == "X" and event["tid"] == 1 and 45_000 <= event["ts"] < 60_000
    ]
    assert drawn == [
        ("decode", 46_000, 8_000),
        ("network", 46_000, 2_000),
        ("queue", 48_000, 2_000),
        ("compute", 50_000, 2_000),
        ("network", 52_000, 2_000),
    ]


def test_trace_file_shows_on_the_client_what_it_does_itself_and_what_went_wrong() -> None:
    events = make_trace_json(TEXT)["traceEvents"]

    drawn = [event for event in events if event["ph"] == "X" and event["tid"] == 0]
    names = [event["name"] for event in drawn if event["ts"] >= 65_000]
    assert names == [
        *("embedding and head", "decode", "encode frame", "decode frame"),
        *("failover", "encode frame", "decode frame"),
        *("encode frame", "decode frame", "embedding and head"),
    ]
    (failover,) = (event for event in drawn if event["name"] == "failover")
    assert failover["args"] == {
        "step": 3,
        "lost": SECOND.name,
        "reason": "it broke",
        "position": 7,
        "replayed": 6,
        "replaced_by": [SPARE.name],
    }
    (silence,) = (event for event in events if event["name"] == "decode, unanswered")
    assert (silence["tid"], silence["dur"]) == (2, 10_000)
