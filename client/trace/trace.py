"""Events of a session and the times of its steps: a recorder, and its trace.

Clocks of peers are not the client's: a peer says only how long a step waited and was computed
there. Those two durations are put inside of the time between question and answer; what they leave
of it was the network's, half on the way there and half on the way back.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain, takewhile

from ...protocol.messages.session import HopSeconds, Output
from ...protocol.net.clock import Clock
from ..routing.route import Failover, Hop


@dataclass(frozen=True)
class SessionFailover(Failover):
    """One unplanned change of hop.

    `seconds` runs from the moment the loss was noticed until the replacement was ready.
    """

    position: int
    num_replayed_tokens: int
    seconds: float

    @property
    def changed_weights(self) -> str | None:
        """The format of other weights that computes from here on, None while it is the same.

        Only peers of the same format compute the same to the last bit.
        """
        before = self.lost.peer.weights
        others = (hop.peer.weights for hop in self.replacements)
        return next((weights for weights in others if weights != before), None)


@dataclass(frozen=True)
class Handoff:
    """One planned change of hop.

    `seconds` runs from the beginning of the move to its end; for `stall_seconds` of them the
    session could take no step.
    """

    left: Hop
    replacement: Hop
    position: int
    seconds: float
    stall_seconds: float


class StepKind(StrEnum):
    """The purpose of a step, or of one question of it."""

    PREFILL = "prefill"
    DECODE = "decode"
    REPLAY = "replay"


@dataclass(frozen=True)
class _Timed:
    """Something that took time, in seconds of the client's clock; `step` counts from 1."""

    step: int
    started_at: float
    ended_at: float

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.ended_at - self.started_at


@dataclass(frozen=True)
class StepTaken(_Timed):
    """One step of the session over all of its hops; `error` says why it failed."""

    kind: StepKind
    position: int
    num_tokens: int
    error: str | None = None


@dataclass(frozen=True)
class AnsweredQuestion(_Timed):
    """One question to a hop and its answer.

    started_at    sent_at                                    answered_at    ended_at
        │  encode    │  network  │ queue │ compute │  network  │   decode   │
    """

    kind: StepKind
    hop: Hop
    position: int
    num_tokens: int
    sent_at: float
    answered_at: float
    queue_seconds: float
    compute_seconds: float
    num_bytes_sent: int
    num_bytes_received: int
    expected_seconds: float = 0.0
    """In a chain: what the way there was thought to take, and for its last hop the way back."""

    @property
    def serialization_seconds(self) -> float:
        """Seconds that serialization took at the client: hidden states to a frame and back."""
        return (self.sent_at - self.started_at) + (self.ended_at - self.answered_at)

    @property
    def network_seconds(self) -> float:
        """Seconds between question and answer that the peer did not spend."""
        return (self.answered_at - self.sent_at) - self.queue_seconds - self.compute_seconds


@dataclass(frozen=True)
class UnansweredQuestion(_Timed):
    """A question that cost its hop: the answer was missing or invalid."""

    kind: StepKind
    hop: Hop
    position: int
    error: str


@dataclass(frozen=True)
class Opening(_Timed):
    """One attempt to open a session at a peer; `error` says why it failed."""

    hop: Hop
    error: str | None = None


@dataclass(frozen=True)
class Replacement(_Timed):
    """One failover, from the moment the loss was noticed: routing, opening and replay."""

    failover: SessionFailover


@dataclass(frozen=True)
class Move(_Timed):
    """One handoff to a hop, beside the steps: from the look for a peer to the switch."""

    handoff: Handoff

    @property
    def hop(self) -> Hop:
        """The hop that it went to."""
        return self.handoff.replacement


Event = StepTaken | AnsweredQuestion | UnansweredQuestion | Opening | Replacement | Move


@dataclass(frozen=True)
class Outage:
    """The time that a question waited for lost hops, and their replacements."""

    seconds: float
    replacements: tuple[Hop, ...]


@dataclass(frozen=True)
class Trace:
    """The recorded events of a session, in the order in which they ended."""

    started_at: float
    ended_at: float
    events: tuple[Event, ...]


@dataclass
class QuestionWatch:
    """One question under way, which its sender updates until the answer."""

    _recorder: "Recorder"
    _hop: Hop
    _kind: StepKind
    _position: int
    _num_tokens: int
    _started_at: float
    _sent_at: float = 0.0
    _answered_at: float = 0.0
    _num_bytes_sent: int = 0
    _num_bytes_received: int = 0

    def note_encoded(self, num_bytes: int) -> None:
        """Note that the question is a frame of so many bytes, which goes out now."""
        self._sent_at, self._num_bytes_sent = self._recorder.now(), num_bytes

    def note_arrived(self, num_bytes: int) -> None:
        """Note that the answer is here, a frame of so many bytes."""
        self._answered_at, self._num_bytes_received = self._recorder.now(), num_bytes

    def note_answered(
        self, hops: Sequence[Hop], output: Output, way_seconds: Sequence[float], read_at: float
    ) -> None:
        """Note that the answer of a hop, or of some that passed the question along, was read.

        The time that hops do not tell of is what it took to get from one to the next. It is shared
        out among them as the ways there and back were expected to be (`way_seconds`, empty in a
        star). While hops behind the first were lost and replaced, the question waited, at none of
        them. A peer cannot have spent more than there was: what it says is scaled down to that.
        """
        times = (*output.before, HopSeconds(output.queue_seconds, output.compute_seconds))
        if len(times) != len(hops):  # one was replaced meanwhile: the others' times are lost
            times = (HopSeconds(0.0, 0.0),) * (len(hops) - 1) + times[-1:]
        there_seconds = self._answered_at - self._sent_at
        said_seconds = sum(map(sum, times))
        scale = min(1.0, there_seconds / said_seconds) if said_seconds > 0 else 0.0
        outage = Outage(0.0, ())
        if way_seconds:
            outage = self._recorder.find_outage(self._kind, self._sent_at, self._answered_at)
        network_seconds = max(0.0, there_seconds - scale * said_seconds - outage.seconds)
        idle_seconds = there_seconds - scale * said_seconds - network_seconds
        resumed_at = next((hop for hop in hops if hop in outage.replacements), hops[-1])
        expected = [*way_seconds[:-2], sum(way_seconds[-2:])]
        started_at, sent_at = self._started_at, self._sent_at
        for hop, own, part in zip(hops, times, expected, strict=True):
            if hop is resumed_at and idle_seconds > 0:
                sent_at += idle_seconds
                started_at = sent_at
            is_last = hop is hops[-1]
            queue_seconds, compute_seconds = own
            share = part / sum(expected) if sum(expected) > 0 else 1.0 / len(hops)
            own_seconds = scale * (queue_seconds + compute_seconds)
            answered_at = sent_at + own_seconds + share * network_seconds
            answered_at = self._answered_at if is_last else answered_at
            ended_at = read_at if is_last else answered_at
            self._recorder.add(
                AnsweredQuestion(
                    self._recorder.step,
                    started_at,
                    ended_at,
                    self._kind,
                    hop,
                    self._position,
                    self._num_tokens,
                    sent_at,
                    answered_at,
                    scale * queue_seconds,
                    scale * compute_seconds,
                    self._num_bytes_sent if hop is hops[0] else 0,
                    self._num_bytes_received if is_last else 0,
                    part,
                )
            )
            started_at = sent_at = answered_at

    def note_lost(self, error: Exception) -> None:
        """Note that the hop is lost."""
        now, step = self._recorder.now(), self._recorder.step
        self._recorder.add(
            UnansweredQuestion(
                step, self._started_at, now, self._kind, self._hop, self._position, str(error)
            )
        )


class Recorder:
    """Records the events of one session while that has it.

    Filled on the client's loop, one step at a time; read by `make_trace` at any moment.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._events: list[Event] = []
        self._started_at = clock.now()
        self._ended_at: float | None = None
        self.step = 0  # number of the step under way

    def __repr__(self) -> str:
        return f"<Recorder of {self.step} steps, {len(self._events)} events>"

    def now(self) -> float:
        """Return the time of the client's clock."""
        return self._clock.now()

    def add(self, event: Event) -> None:
        """Record an event that has just ended."""
        self._events.append(event)

    def note_failover(self, failover: SessionFailover, started_at: float) -> None:
        """Record a failover."""
        ended_at = started_at + failover.seconds
        self.add(Replacement(self.step, started_at, ended_at, failover))

    def note_handoff(self, handoff: Handoff, started_at: float) -> None:
        """Record a handoff."""
        self.add(Move(self.step, started_at, started_at + handoff.seconds, handoff))

    def end(self) -> None:
        """Stop recording."""
        self._ended_at = self.now()

    def make_trace(self) -> Trace:
        """Return the trace up to `end`, or up to now."""
        events = tuple(self._events)
        ended_at = self.now() if self._ended_at is None else self._ended_at
        # A step that another thread cut short ends behind the end.
        ended_at = max([ended_at, *(event.ended_at for event in events)])
        return Trace(self._started_at, ended_at, events)

    def find_outage(self, kind: StepKind, started_at: float, ended_at: float) -> Outage:
        """Return what the step under way lost of the time between two moments."""
        lost = [
            event
            for event in takewhile(lambda event: event.step == self.step, reversed(self._events))
            if is_waiting_for_lost(event, kind)
        ]
        seconds = sum_covered_seconds(
            (max(event.started_at, started_at), min(event.ended_at, ended_at)) for event in lost
        )
        replaced = (event.failover.replacements for event in lost if isinstance(event, Replacement))
        return Outage(seconds, tuple(chain.from_iterable(replaced)))

    def taking_step(
        self, kind: StepKind, position: int, num_tokens: int
    ) -> AbstractContextManager[None]:
        """Record the events inside as the session's next step."""
        self.step += 1
        return self._timing(
            lambda start, stop, error: StepTaken(
                self.step, start, stop, kind, position, num_tokens, error
            )
        )

    def opening(self, hop: Hop) -> AbstractContextManager[None]:
        """Record how long opening a session at a peer takes."""
        return self._timing(lambda start, stop, error: Opening(self.step, start, stop, hop, error))

    @contextmanager
    def _timing(self, make: Callable[[float, float, str | None], Event]) -> Iterator[None]:
        """Record what happens inside as an event, also when it fails."""
        started_at, error = self.now(), None
        try:
            yield
        except BaseException as failure:
            error = str(failure) or type(failure).__name__
            raise
        finally:
            self.add(make(started_at, self.now(), error))

    def watch(self, hop: Hop, kind: StepKind, position: int, num_tokens: int) -> QuestionWatch:
        """Begin to watch a question, before it is made a frame."""
        return QuestionWatch(self, hop, kind, position, num_tokens, self.now())


def is_waiting_for_lost(event: Event, kind: StepKind) -> bool:
    """Return whether an event is a part of an outage, as questions of that kind see it.

    Replays that were lost are part of their failover.
    """
    if isinstance(event, UnansweredQuestion):
        return event.kind is kind
    return isinstance(event, Replacement)


def choose_kind(is_decoded: bool) -> StepKind:
    """Return the kind of a step that is not a replay."""
    return StepKind.DECODE if is_decoded else StepKind.PREFILL


def sum_covered_seconds(intervals: Iterable[tuple[float, float]]) -> float:
    """Return how long at least one of some intervals lasts; what two share counts once.

    >>> sum_covered_seconds([(5.0, 6.0), (0.0, 2.0), (1.0, 3.0)])
    4.0
    """
    seconds, reached_at = 0.0, float("-inf")
    for started_at, ended_at in sorted(intervals):
        seconds += max(0.0, ended_at - max(started_at, reached_at))
        reached_at = max(reached_at, ended_at)
    return seconds
