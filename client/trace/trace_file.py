"""A trace as the JSON that ui.perfetto.dev and chrome://tracing open. Pure.

One track for the client and one for each hop. Slices of a track lie inside of each other or side by
side: a client makes and reads one frame at a time, a hop has one question at a time.
"""

from collections.abc import Iterator
from typing import Any

from .trace import (
    AnsweredQuestion,
    Event,
    Move,
    Opening,
    Replacement,
    StepKind,
    StepTaken,
    Trace,
    UnansweredQuestion,
)

_PROCESS = 1
_CLIENT_TRACK = 0

Json = dict[str, Any]


def make_trace_json(trace: Trace) -> Json:
    """Return a trace in the Trace Event Format: complete events ("X") in microseconds."""
    tracks = _number_tracks(trace)
    names = {_CLIENT_TRACK: "client", **{track: name for name, track in tracks.items()}}
    events = [_name_track("process_name", _CLIENT_TRACK, "shoal generate")]
    for track, name in names.items():
        events.append(_name_track("thread_name", track, name))
        events.append(_name_track("thread_sort_index", track, track, "sort_index"))
    draw = _Drawer(trace.started_at, tracks)
    slices = [*draw.pauses(trace), *(part for event in trace.events for part in draw.event(event))]
    # If two begin at once, the longer one encloses the other.
    slices.sort(key=lambda part: (part["ts"], -part["dur"]))
    return {"displayTimeUnit": "ms", "traceEvents": events + slices}


def _number_tracks(trace: Trace) -> dict[str, int]:
    """Give every hop a track, in the order of the blocks, then of time."""
    hops = [event.hop for event in trace.events if not isinstance(event, StepTaken | Replacement)]
    hops.sort(key=lambda hop: hop.span.start)
    names = dict.fromkeys(hop.name for hop in hops)
    return {name: index for index, name in enumerate(names, start=_CLIENT_TRACK + 1)}


def _name_track(kind: str, track: int, value: object, field: str = "name") -> Json:
    return {"ph": "M", "name": kind, "pid": _PROCESS, "tid": track, "args": {field: value}}


class _Drawer:
    """Turns events into slices of tracks."""

    def __init__(self, started_at: float, tracks: dict[str, int]) -> None:
        self._started_at = started_at
        self._tracks = tracks

    def pauses(self, trace: Trace) -> Iterator[Json]:
        """Return what is between the steps: there the client computes."""
        steps = [event for event in trace.events if isinstance(event, StepTaken)]
        starts = [trace.started_at, *(step.ended_at for step in steps)]
        stops = [*(step.started_at for step in steps), trace.ended_at]
        for start, stop in zip(starts, stops, strict=True):
            if stop > start:
                yield self._slice(_CLIENT_TRACK, "embedding and head", start, stop)

    def event(self, event: Event) -> Iterator[Json]:
        """Return the slices of one event."""
        start, stop, facts = event.started_at, event.ended_at, {"step": event.step}
        match event:
            case StepTaken():
                facts |= {"position": event.position, "tokens": event.num_tokens}
                facts |= {"error": event.error} if event.error else {}
                yield self._slice(_CLIENT_TRACK, event.kind, start, stop, facts)
            case Replacement():
                failover = event.failover
                facts |= {"lost": failover.lost.name, "reason": failover.reason}
                facts |= {"position": failover.position, "replayed": failover.num_replayed_tokens}
                facts |= {"replaced_by": [hop.name for hop in failover.replacements]}
                yield self._slice(_CLIENT_TRACK, "failover", start, stop, facts)
            case Move():
                handoff = event.handoff
                facts |= {"left": handoff.left.name, "position": handoff.position}
                facts |= {"stall_seconds": handoff.stall_seconds}
                yield self._slice(self._tracks[event.hop.name], "handoff", start, stop, facts)
            case Opening():
                facts |= {"error": event.error} if event.error else {}
                yield self._slice(self._tracks[event.hop.name], "open", start, stop, facts)
            case UnansweredQuestion():
                facts |= {"position": event.position, "error": event.error}
                track = self._tracks[event.hop.name]
                yield self._slice(track, f"{event.kind}, unanswered", start, stop, facts)
            case AnsweredQuestion():
                yield from self._exchange(event, facts)

    def _exchange(self, event: AnsweredQuestion, facts: Json) -> Iterator[Json]:
        facts |= {"hop": event.hop.name, "position": event.position, "tokens": event.num_tokens}
        yield self._slice(_CLIENT_TRACK, "encode frame", event.started_at, event.sent_at, facts)
        yield self._slice(_CLIENT_TRACK, "decode frame", event.answered_at, event.ended_at, facts)
        sizes = {"bytes_sent": event.num_bytes_sent, "bytes_received": event.num_bytes_received}
        track = self._tracks[event.hop.name]
        yield self._slice(track, event.kind, event.sent_at, event.answered_at, facts | sizes)
        arrived_at = event.sent_at + event.network_seconds / 2
        begun_at = arrived_at + event.queue_seconds
        done_at = begun_at + event.compute_seconds
        edges = (event.sent_at, arrived_at, begun_at, done_at, event.answered_at)
        names = ("network", "queue", "compute", "network")
        for name, start, stop in zip(names, edges[:-1], edges[1:], strict=True):
            yield self._slice(track, name, start, min(stop, event.answered_at))

    def _slice(
        self, track: int, name: str | StepKind, start: float, stop: float, facts: Json | None = None
    ) -> Json:
        # Both ends are rounded, and not the length: slices that touch must not overlap.
        first, last = (round((at - self._started_at) * 1e9) for at in (start, stop))
        return {
            "ph": "X",
            "name": str(name),
            "pid": _PROCESS,
            "tid": track,
            "ts": first / 1000,
            "dur": max(0, last - first) / 1000,
            "args": facts or {},
        }
