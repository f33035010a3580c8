"""The summary of a trace: where the time of a text went, in a few numbers on one screen. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ...protocol.spans import Span
from ..routing.route import Hop
from .trace import (
    AnsweredQuestion,
    Replacement,
    StepKind,
    StepTaken,
    Trace,
    UnansweredQuestion,
    is_waiting_for_lost,
    sum_covered_seconds,
)


@dataclass(frozen=True)
class TimeBreakdown:
    """Seconds of exchanges with hops, by what they went to."""

    num_exchanges: int
    queue_seconds: float
    compute_seconds: float
    network_seconds: float
    serialization_seconds: float

    @property
    def parts(self) -> dict[str, float]:
        """The seconds by name."""
        return {
            "queue_seconds": self.queue_seconds,
            "compute_seconds": self.compute_seconds,
            "network_seconds": self.network_seconds,
            "serialization_seconds": self.serialization_seconds,
        }

    @property
    def seconds(self) -> float:
        """All of them."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class HopTime:
    """Seconds that decoding spent at one hop."""

    hop: Hop
    breakdown: TimeBreakdown


@dataclass(frozen=True)
class PrefillTime:
    """The time of the first token; `breakdown` may exceed it, since pieces overlap."""

    num_tokens: int
    seconds: float
    opening_seconds: float
    client_seconds: float
    breakdown: TimeBreakdown


@dataclass(frozen=True)
class Summary:
    """Where the time went; a decoded token has that of its step and of the wait up to the next.

    `client_seconds` are embedding, head and whatever else lies between the steps, `other_seconds`
    what is between the hops. `failover_seconds` include the wait for answers that never came, and
    all of the steps that failed, which decoded nothing.
    """

    num_decoded_tokens: int
    seconds: float
    hops: tuple[HopTime, ...]
    client_seconds: float
    other_seconds: float
    failover_seconds: float
    expected_way_seconds: float
    """Estimated seconds between the hops of chains, of the network's time; 0 in a star."""
    prefill: PrefillTime
    failovers: tuple[Replacement, ...]


def summarize(trace: Trace) -> Summary:
    """Add up a trace."""
    steps = [event for event in trace.events if isinstance(event, StepTaken)]
    stops = [*(step.started_at for step in steps[1:]), trace.ended_at]
    after_seconds = {
        step.step: stop - step.ended_at for step, stop in zip(steps, stops, strict=False)
    }
    decoding = [step for step in steps if step.kind is StepKind.DECODE]
    decoded = {step.step for step in decoding if step.error is None}
    exchanges = [
        event for event in _find_exchanges(trace, StepKind.DECODE) if event.step in decoded
    ]
    failovers = tuple(event for event in trace.events if isinstance(event, Replacement))
    in_steps_seconds = sum(step.seconds for step in steps if step.step in decoded)
    client_seconds = sum(after_seconds[step] for step in decoded)
    asked = [(event.started_at, event.ended_at) for event in exchanges]
    lost = [
        (event.started_at, event.ended_at)
        for event in trace.events
        if is_waiting_for_lost(event, StepKind.DECODE) and event.step in decoded
    ]
    # Hops that are lost together share one failover, and others may have gone on meanwhile.
    asked_or_lost_seconds = sum_covered_seconds([*asked, *lost])
    failover_seconds = asked_or_lost_seconds - sum_covered_seconds(asked)
    failed_seconds = sum(
        step.seconds + after_seconds[step.step] for step in decoding if step.error is not None
    )
    return Summary(
        len(decoded),
        in_steps_seconds + client_seconds + failed_seconds,
        tuple(_add_by_hop(exchanges)),
        client_seconds,
        max(0.0, in_steps_seconds - asked_or_lost_seconds),  # below 0 by rounding only
        failover_seconds + failed_seconds,
        sum(event.expected_seconds for event in exchanges),
        _sum_prefill(trace, steps, after_seconds),
        failovers,
    )


def _find_exchanges(trace: Trace, kind: StepKind) -> list[AnsweredQuestion]:
    return [
        event
        for event in trace.events
        if isinstance(event, AnsweredQuestion) and event.kind is kind
    ]


def _add_by_hop(exchanges: Sequence[AnsweredQuestion]) -> Iterable[HopTime]:
    """Return what went to each hop, in the order of the blocks, then of time."""
    by_hop: dict[tuple[str, Span], list[AnsweredQuestion]] = {}
    for event in exchanges:
        by_hop.setdefault((event.hop.peer.peer_id, event.hop.span), []).append(event)
    for key in sorted(by_hop, key=lambda key: key[1].start):
        yield HopTime(by_hop[key][0].hop, _add(by_hop[key]))


def _add(exchanges: Sequence[AnsweredQuestion]) -> TimeBreakdown:
    return TimeBreakdown(
        len(exchanges),
        sum(event.queue_seconds for event in exchanges),
        sum(event.compute_seconds for event in exchanges),
        sum(event.network_seconds for event in exchanges),
        sum(event.serialization_seconds for event in exchanges),
    )


def _sum_prefill(
    trace: Trace, steps: Sequence[StepTaken], after_seconds: dict[int, float]
) -> PrefillTime:
    """Add up the steps of prompts, and what went before the first one of all."""
    before_seconds = (steps[0].started_at if steps else trace.ended_at) - trace.started_at
    steps = [step for step in steps if step.kind is not StepKind.DECODE]
    client_seconds = before_seconds + sum(after_seconds[step.step] for step in steps)
    return PrefillTime(
        sum(step.num_tokens for step in steps if step.error is None),
        client_seconds + sum(step.seconds for step in steps),
        sum(_find_first_question(trace, step) - step.started_at for step in steps),
        client_seconds,
        _add(_find_exchanges(trace, StepKind.PREFILL)),
    )


def _find_first_question(trace: Trace, step: StepTaken) -> float:
    """Return when a step first asked a hop: before, it looked for a route and opened it."""
    asked_at = (
        event.started_at
        for event in trace.events
        if isinstance(event, AnsweredQuestion | UnansweredQuestion) and event.step == step.step
    )
    return min(asked_at, default=step.ended_at)


def describe_summary(summary: Summary) -> list[str]:
    """Return the lines of a table, each of at most 80 columns."""
    prefill, num_tokens = summary.prefill, summary.num_decoded_tokens
    lines = [
        _line("where the time went", "queue", "compute", "network", "serialization", "total"),
        f"prompt of {_count(prefill.num_tokens)}, in ms:",
        _row("opening the route", prefill.opening_seconds),
        _breakdown_row("all hops, added up", prefill.breakdown, 1),
        _row("client: embedding and head", prefill.client_seconds),
        _row("to the first token", prefill.seconds),
    ]
    if num_tokens == 0:
        return lines
    lines.append(f"{_count(num_tokens)} decoded after it, in ms per token:")
    for hop, breakdown in ((part.hop, part.breakdown) for part in summary.hops):
        name = f"…{hop.peer.peer_id[-6:]}[{hop.span}]"
        is_whole = breakdown.num_exchanges == num_tokens
        name += "" if is_whole else f", {_count(breakdown.num_exchanges)}"
        lines.append(_breakdown_row(name, breakdown, breakdown.num_exchanges))
    if summary.expected_way_seconds:
        expected = _milliseconds(summary.expected_way_seconds / num_tokens)
        name = "  network, as the peers' distances predict"
        lines.append(f"{name:<47}{expected:>9}")
    lines.append(_row("client: embedding and head", summary.client_seconds / num_tokens))
    lines.append(_row("client: between the hops", summary.other_seconds / num_tokens))
    if summary.failover_seconds:
        lines.append(_row("lost hops and failovers", summary.failover_seconds / num_tokens))
    lines.append(_row("from token to token", summary.seconds / num_tokens))
    if summary.failovers:
        num_replayed = sum(event.failover.num_replayed_tokens for event in summary.failovers)
        seconds = sum_covered_seconds((one.started_at, one.ended_at) for one in summary.failovers)
        lines.append(
            f"failovers: {len(summary.failovers)}, {_count(num_replayed)} replayed, {seconds:.2f} s"
        )
    return lines


def _line(name: str, *cells: str) -> str:
    widths = (7, 9, 9, 15, 9)
    columns = (f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
    return f"{name:<31.31}" + "".join(columns)


def _row(name: str, seconds: float) -> str:
    return _line(f"  {name}", "", "", "", "", _milliseconds(seconds))


def _breakdown_row(name: str, breakdown: TimeBreakdown, num_parts: int) -> str:
    parts = (*breakdown.parts.values(), breakdown.seconds)
    return _line(f"  {name}", *(_milliseconds(seconds / num_parts) for seconds in parts))


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.2f}" if seconds < 1 else f"{1000 * seconds:.0f}"


def _count(number: int) -> str:
    return f"{number} token{'' if number == 1 else 's'}"


def make_summary_json(summary: Summary) -> dict[str, Any]:
    """Return a summary as plain JSON types; sums in seconds, not times per token."""
    prefill = summary.prefill
    return {
        "prefill": {
            "tokens": prefill.num_tokens,
            "seconds": _round(prefill.seconds),
            "opening_seconds": _round(prefill.opening_seconds),
            "client_seconds": _round(prefill.client_seconds),
            **_breakdown_json(prefill.breakdown),
        },
        "decode": {
            "tokens": summary.num_decoded_tokens,
            "seconds": _round(summary.seconds),
            "client_seconds": _round(summary.client_seconds),
            "other_seconds": _round(summary.other_seconds),
            "failover_seconds": _round(summary.failover_seconds),
            "expected_way_seconds": _round(summary.expected_way_seconds),
            "hops": [
                {
                    "peer_id": part.hop.peer.peer_id,
                    "span": str(part.hop.span),
                    "tokens": part.breakdown.num_exchanges,
                    **_breakdown_json(part.breakdown),
                }
                for part in summary.hops
            ],
        },
    }


def _breakdown_json(breakdown: TimeBreakdown) -> dict[str, float]:
    return {name: _round(seconds) for name, seconds in breakdown.parts.items()}


def _round(seconds: float) -> float:
    return round(float(seconds), 6)
