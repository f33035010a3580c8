"""The peer book of a client: for each peer its announcement, its speed at steps and passes, its
faults, and whether it is avoided for them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median, median_low

from ...protocol.errors import ErrorCode, RefusedError, SilentError
from ...protocol.ids import ModelId, PeerId
from ...protocol.limits import MIN_BYTES_PER_SECOND
from ...protocol.messages.passes import PassKind
from ...protocol.net.clock import Clock
from ...protocol.records.announcements import Announcement
from ...protocol.records.swarm_view import SwarmView
from ...protocol.versions import PASS_VERSION
from .route import Fault, Hop, LostHopError, PeerFailure, find_fault

_UNKNOWN_BYTES_PER_SECOND = 256 * 2**10
"""A line of two megabits per second, until a large step was answered."""

_LARGE_BYTES = 64 * 2**10
"""Answers to smaller steps tell of round trips and computing only."""


class Bandwidth:
    """How fast one line is: that of a client, shared by all of its steps, or one between two peers.

    The transport buffers what is sent, so that only an answer says when a step had arrived: an
    answer to so many bytes in so many seconds means that the line is at least so fast.
    """

    def __init__(self) -> None:
        self._shown_bytes_per_second: deque[float] = deque(maxlen=16)
        self._guessed_bytes_per_second: float = _UNKNOWN_BYTES_PER_SECOND
        self.num_bytes = 0
        """How many bytes are under way."""

    @contextmanager
    def carry(self, num_bytes: int) -> Iterator[float]:
        """Count bytes as under way; gives the seconds until they and all others have arrived."""
        self.num_bytes += num_bytes
        try:
            yield self.expect_seconds(self.num_bytes)
        finally:
            self.num_bytes -= num_bytes

    def expect_seconds(self, num_bytes: int) -> float:
        """Return how long so many bytes take at most, as far as the line has shown."""
        known = self._shown_bytes_per_second
        return num_bytes / max(known, default=self._guessed_bytes_per_second)

    def note_answer(self, num_bytes: int, seconds: float) -> None:
        """Note that so many bytes, there and back, were carried in at most so many seconds."""
        if num_bytes >= _LARGE_BYTES and seconds > 0:
            self._shown_bytes_per_second.append(num_bytes / seconds)

    def note_silence(self, num_bytes: int) -> None:
        """Note that no answer came: as long as nothing else is known, the line may be slow."""
        if num_bytes >= _LARGE_BYTES:
            self.doubt()

    def doubt(self) -> None:
        """Take the line for slower than before, as long as nothing else is known."""
        halved = self._guessed_bytes_per_second / 2
        self._guessed_bytes_per_second = max(halved, MIN_BYTES_PER_SECOND)


Pair = tuple[PeerId, PeerId]
"""A peer that pushes, and the one that it pushes to."""

_FIRST_BROKEN_SECONDS = 30.0
_LONGEST_BROKEN_SECONDS = 1800.0
"""How long a link is left alone that failed between two live peers; twice as long each time."""


@dataclass
class _PeerLink:
    bandwidth: Bandwidth = field(default_factory=Bandwidth)
    broken_until: float = float("-inf")
    broken_seconds: float = 0.0


class PeerLinks:
    """The links between peers, shared by all sessions of a client. Part of its `PeerBook`."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._links: dict[Pair, _PeerLink] = {}

    @property
    def broken(self) -> frozenset[Pair]:
        """Those that are not to be used now."""
        now = self._clock.now()
        return frozenset(pair for pair, link in self._links.items() if now < link.broken_until)

    def is_broken(self, before: PeerId, after: PeerId) -> bool:
        """Return whether a link is left alone for now."""
        link = self._links.get((before, after))
        return link is not None and self._clock.now() < link.broken_until

    def note_broken(self, before: PeerId, after: PeerId) -> None:
        """Leave a link alone for a while: it failed, and both of its ends live.

        It may have been too slow for what it had to carry; the next time it gets longer for that.
        Many sessions may tell of one failure; it counts once.
        """
        link = self._find((before, after))
        if self.is_broken(before, after):
            return
        link.broken_seconds = min(
            max(2 * link.broken_seconds, _FIRST_BROKEN_SECONDS), _LONGEST_BROKEN_SECONDS
        )
        link.broken_until = self._clock.now() + link.broken_seconds
        link.bandwidth.doubt()

    @contextmanager
    def carry(self, peer_ids: Sequence[PeerId], num_bytes: int) -> Iterator[float]:
        """Count bytes as under way from each peer to the next; gives the seconds that they take."""
        with ExitStack() as carrying:
            yield sum(
                carrying.enter_context(self._find(pair).bandwidth.carry(num_bytes))
                for pair in pairwise(peer_ids)
            )

    def note_answer(self, peer_ids: Sequence[PeerId], num_bytes: int, seconds: float) -> None:
        """Note that so many bytes went over all these links, one after the other, in that time."""
        for pair in pairwise(peer_ids):
            link = self._find(pair)
            link.bandwidth.note_answer(num_bytes, seconds)
            link.broken_seconds = 0.0

    def forget(self, peer_ids: Collection[PeerId]) -> None:
        """Drop what is known of peers that left long ago."""
        self._links = {
            pair: link for pair, link in self._links.items() if not set(pair) & set(peer_ids)
        }

    def _find(self, pair: Pair) -> _PeerLink:
        return self._links.setdefault(pair, _PeerLink())


FLOOR_SECONDS = 1.0
"""Below this a busy machine looks dead: schedulers and garbage collectors pause that long."""

_PATIENCE = 6.0
"""How many times slower than its worst recent answer a healthy peer may be."""

_MAX_SILENCES = 4

_UNKNOWN_SECONDS = 4.0
"""First deadline for a peer that neither announced a speed nor answered yet."""

_LONGEST_ON_TRUST_SECONDS = 30.0
"""A peer that announced to be slow gets no more than this until it has shown it: it may lie."""

_SLOWEST_OF_ALL = 4.0
"""How many times slower than what is usual among other peers a peer may be at ease: beyond half a
minute it gets no more than that."""

_FEW_TOKENS = 16
"""Steps of up to so many tokens cost about as much as one: the weights are read once."""


@dataclass
class AnswerTimes:
    """Recent answer times of one peer, apart for few tokens and for prompts (per token).

    `block_seconds` are those for few tokens without the way there and back, per block.
    """

    decode_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=64))
    prefill_seconds_per_token: deque[float] = field(default_factory=lambda: deque(maxlen=16))
    block_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=16))
    num_silences: int = 0

    @property
    def has_answered(self) -> bool:
        """Return whether the peer has ever taken a step."""
        return bool(self.decode_seconds or self.prefill_seconds_per_token)

    def note_silence(self) -> None:
        """Note that a deadline passed: if the peer is only slow, the next one is twice as long."""
        self.num_silences = min(self.num_silences + 1, _MAX_SILENCES)

    def note(
        self, num_tokens: int, seconds: float, rtt_seconds: float = 0.0, num_blocks: int = 1
    ) -> None:
        """Note that a step of so many tokens (rows times length) was answered."""
        self.num_silences = 0
        if num_tokens <= _FEW_TOKENS:
            self.decode_seconds.append(seconds)
            self.block_seconds.append(max(0.0, seconds - rtt_seconds) / num_blocks)
        else:
            self.prefill_seconds_per_token.append(seconds / num_tokens)

    def choose_timeout_seconds(
        self, num_tokens: int, peer: Announcement, others: Iterable[AnswerTimes] = ()
    ) -> float:
        """Return how long the answer of the peer to a step of `num_tokens` may take.

        The times of `others` bound how slow a peer may plausibly be.
        """
        shown = FLOOR_SECONDS + _PATIENCE * self._expect_seconds(num_tokens, max)
        seconds = max(shown, self._trust_seconds(num_tokens, peer))
        if seconds > _LONGEST_ON_TRUST_SECONDS:
            seconds = min(seconds, self._find_ceiling_seconds(num_tokens, others))
        return seconds * 2**self.num_silences

    def _trust_seconds(self, num_tokens: int, peer: Announcement) -> float:
        """Return how long to wait where an announcement stands in for what was not measured."""
        decode = max(self.decode_seconds, default=_invert(peer.decode_steps_per_second))
        announced = _invert(peer.prefill_tokens_per_second)
        per_token = max(self.prefill_seconds_per_token, default=announced)
        expected = decode or 0.0
        if num_tokens > _FEW_TOKENS:
            share = decode or 0.0 if per_token is None else per_token
            expected = max(num_tokens * share, expected)
        seconds = FLOOR_SECONDS + _PATIENCE * expected
        if decode is None:
            seconds = max(_UNKNOWN_SECONDS, seconds)
        if not (
            self.decode_seconds if num_tokens <= _FEW_TOKENS else self.prefill_seconds_per_token
        ):
            seconds += peer.queue_seconds  # what was measured has waited there as well
        return min(seconds, _LONGEST_ON_TRUST_SECONDS)

    def _expect_seconds(self, num_tokens: int, choose: Callable[[Sequence[float]], float]) -> float:
        """Return what `choose` makes of the measured times; 0 where nothing was measured."""
        expected = choose(self.decode_seconds) if self.decode_seconds else 0.0
        if num_tokens > _FEW_TOKENS and self.prefill_seconds_per_token:
            expected = max(num_tokens * choose(self.prefill_seconds_per_token), expected)
        return expected

    def _find_ceiling_seconds(self, num_tokens: int, others: Iterable[AnswerTimes]) -> float:
        """Return what no slow answer extends the deadline beyond.

        From the worst answer alone, a peer that stalls would get six times as long every time.
        """
        ceilings = [FLOOR_SECONDS + _PATIENCE * self._expect_seconds(num_tokens, median_low)]
        usual = [other._expect_seconds(num_tokens, median_low) for other in others]
        if known := [seconds for seconds in usual if seconds > 0]:
            ceilings.append(FLOOR_SECONDS + _PATIENCE * _SLOWEST_OF_ALL * median_low(known))
        return max(_LONGEST_ON_TRUST_SECONDS, min(ceilings))


def _invert(speed: float | None) -> float | None:
    """Return the seconds for one of what is done so often in a second."""
    return 1.0 / speed if speed else None


_UNKNOWN_TOKENS_PER_SECOND = 500.0
"""Of a peer that neither says how fast it takes passes nor has shown it."""

_WORK = {PassKind.FORWARD: 1.0, PassKind.BACKWARD: 3.0}
"""The cost of a pass in forwards: a backward pass computes blocks twice and differentiates."""

_SMOOTHING = 0.3
"""How much the newest pass counts beside those before."""


@dataclass
class PassTimes:
    """How fast one peer takes passes, and its line. By the clock of this end alone: a peer that
    could say how fast it is would be asked for everything.
    """

    line: Bandwidth = field(default_factory=Bandwidth)
    answered_at: float = float("-inf")
    """When its newest answer came."""
    block_token_seconds: dict[PassKind, float] = field(default_factory=dict[PassKind, float])
    """For one token through one block, and for waiting until others' passes are over."""
    network_token_seconds: float = 0.0
    """For the tensors of one token, there and back."""
    busy_seconds: float = 0.0
    """Expected of what is under way."""

    def expect_seconds(self, hop: Hop, num_tokens: int, kind: PassKind) -> float:
        """Return how long a pass takes at the peer if it has nothing else to do."""
        peer, queue_seconds = hop.peer, 0.0
        block_seconds = self.block_token_seconds.get(kind)
        if block_seconds is None:
            announced = peer.prefill_tokens_per_second or _UNKNOWN_TOKENS_PER_SECOND
            block_seconds = _WORK[kind] / announced / len(peer.span)
            # The measured times include waiting there.
            queue_seconds = peer.queue_seconds + peer.pass_queue_seconds
        token_seconds = block_seconds * len(hop.span) + self.network_token_seconds
        return num_tokens * token_seconds + queue_seconds

    @contextmanager
    def count(self, expected_seconds: float) -> Iterator[None]:
        """Count a pass as under way at the peer."""
        self.busy_seconds += expected_seconds
        try:
            yield
        finally:
            self.busy_seconds -= expected_seconds

    def note(
        self, hop: Hop, num_tokens: int, kind: PassKind,
        asked_at: float, answered_at: float, way_seconds: float,
    ) -> None:  # fmt: skip
        """Note an answer, of whose time its tensors were on their way for `way_seconds`. The peer
        was at it since the last one: it takes one pass at a time.
        """
        seconds = answered_at - max(asked_at, self.answered_at)
        self.answered_at = answered_at
        way_seconds = min(way_seconds, seconds)
        shown = (seconds - way_seconds) / num_tokens / len(hop.span)
        known = self.block_token_seconds.get(kind, shown)
        self.block_token_seconds[kind] = known + _SMOOTHING * (shown - known)
        shown = way_seconds / num_tokens
        self.network_token_seconds += _SMOOTHING * (shown - self.network_token_seconds)


_FIRST_QUARANTINE_SECONDS = 15.0
_LONGEST_QUARANTINE_SECONDS = 600.0

_MEMORY_SECONDS = 3600.0
"""How long a peer is remembered that is not announced any more; longer than any quarantine."""

NO_DOUBT, _UNPROVEN = -1, 0
"""The state of a peer outside quarantine: no fault, or it failed us and never worked."""


@dataclass
class _Quarantine:
    """Why a peer is not used for a while. `sequence` is the announcement that was not kept."""

    until: float
    seconds: float
    sequence: int
    fault: Fault


@dataclass(eq=False)
class _PeerRecord:
    """The measured speed of one peer."""

    seen_at: float
    steps: AnswerTimes = field(default_factory=AnswerTimes)
    passes: PassTimes = field(default_factory=PassTimes)
    rtt_seconds: float | None = None
    quarantine: _Quarantine | None = None
    has_taken_pass: bool = False

    @property
    def has_worked(self) -> bool:
        return self.has_taken_pass or self.steps.has_answered


def make_filter(
    allowed: Collection[str] | None, blocked: Collection[str]
) -> Callable[[Announcement], bool]:
    """Return what tells whether a client may use a peer, by lists of peer ids."""
    return lambda peer: peer.peer_id not in blocked and (allowed is None or peer.peer_id in allowed)


class PeerBook:
    """The record of all peers of one swarm, shared by all sessions and passes of a client.

    `revision` counts round trips that were measured and views that were read: what follows from
    either, such as `way_seconds` of chains, is to be found anew then.
    """

    def __init__(
        self,
        read: Callable[[], Awaitable[object]],
        list_known: Callable[[float], Iterable[Announcement]],
        may_use: Callable[[Announcement], bool],
        model_id: ModelId,
        num_blocks: int,
        clock: Clock,
    ) -> None:
        """`read` reads the directory, `list_known` has what it or others told (by wall time)."""
        self._read = read
        self._list_known = list_known
        self._may_use = may_use
        self.clock = clock
        self._refreshed_at = float("-inf")
        self._records: dict[PeerId, _PeerRecord] = {}
        self.view = SwarmView.from_announcements(model_id, (), clock.wall(), num_blocks)
        self.bandwidth = Bandwidth()
        """Of the line of this client."""
        self.links = PeerLinks(clock)
        self.way_seconds: dict[tuple[PeerId, ...], list[float]] = {}
        self.revision = 0

    def __repr__(self) -> str:
        num_quarantines = sum(one.quarantine is not None for one in self._records.values())
        return f"<PeerBook: {self.view!r}, {num_quarantines} in quarantine>"

    async def refresh(self, max_age_seconds: float = 0.0) -> SwarmView:
        """Read the directory unless the view is fresh enough, and return the view.

        Raises DirectoryError when the directory cannot be read. Then, and when it is cancelled, the
        view has what peers have told until then.
        """
        if self.clock.now() - self._refreshed_at > max_age_seconds:
            try:
                await self._read()
                self._refreshed_at = self.clock.now()
            finally:
                self.take_view()
        return self.view

    def take_view(self) -> None:
        """Make a view of all that is known now."""
        now = self.clock.wall()
        usable = filter(self._may_use, self._list_known(now))
        self.view = SwarmView.from_announcements(
            self.view.model_id, usable, now, self.view.num_blocks
        )
        self.revision += 1
        self.way_seconds.clear()
        self._forget_absent()

    def _forget_absent(self) -> None:
        """Drop what is known of peers that left long ago: identities are free and many."""
        now = self.clock.now()
        for peer in self.view.peers:
            if (record := self._records.get(peer.peer_id)) is not None:
                record.seen_at = now
        absent = [p for p, one in self._records.items() if now - one.seen_at > _MEMORY_SECONDS]
        for peer_id in absent:
            del self._records[peer_id]
        self.links.forget(absent)

    def _find(self, peer_id: PeerId) -> _PeerRecord:
        record = self._records.get(peer_id)
        if record is None:
            record = self._records[peer_id] = _PeerRecord(self.clock.now())
        return record

    def find_pass_hosts(
        self, block: int, exclude: Collection[PeerId], weights: str | None, least_version: int = 0
    ) -> list[Announcement]:
        """Return the least doubtful hosts of a block that take passes.

        Liars, and peers whose announcement is stale, are not among them.
        """
        doubts = self.list_doubts()
        hosts: dict[int, list[Announcement]] = {}
        for peer in self.view.serving(block):
            doubt = doubts.get(peer.peer_id, NO_DOUBT)
            is_able = takes_passes(peer, weights) and peer.max_version >= least_version
            if is_able and peer.peer_id not in exclude and doubt not in (Fault.STALE, Fault.LYING):
                hosts.setdefault(doubt, []).append(peer)
        return hosts[min(hosts)] if hosts else []

    def list_by_doubt(self) -> list[Announcement]:
        """Return peers that serve blocks and take adapters, those that have worked for us first.

        Peers in quarantine come last; liars are not among them.
        """
        doubts = self.list_doubts()
        peers = [
            peer
            for peer in self.view.online
            if peer.max_version >= PASS_VERSION and doubts.get(peer.peer_id) != Fault.LYING
        ]

        def doubt(peer: Announcement) -> tuple[int, bool]:
            record = self._records.get(peer.peer_id)
            return doubts.get(peer.peer_id, NO_DOUBT), record is None or not record.has_worked

        return sorted(peers, key=doubt)

    def list_doubts(self) -> dict[PeerId, int]:
        """Return the peers to use only if nobody else is there, and how reluctantly.

        One that failed us and never worked stays among them when the quarantine is over: it may be
        a black hole, of which there can be as many as somebody likes.
        """
        doubts: dict[PeerId, int] = {}
        for peer_id, record in self._records.items():
            if record.quarantine is None or (peer := self.view.find(peer_id)) is None:
                continue
            if self.is_quarantined(peer):
                doubts[peer_id] = record.quarantine.fault
            elif not record.has_worked:
                doubts[peer_id] = _UNPROVEN
        return doubts

    @property
    def avoided(self) -> frozenset[PeerId]:
        """The peers in quarantine that are announced."""
        return frozenset(peer.peer_id for peer in self.view.peers if self.is_quarantined(peer))

    def is_quarantined(self, peer: Announcement) -> bool:
        """Return whether a peer is to be avoided: not for ever, and not once it has come back."""
        record = self._records.get(peer.peer_id)
        if record is None or (quarantine := record.quarantine) is None:
            return False
        has_come_back = peer.sequence > quarantine.sequence and (
            quarantine.fault is Fault.STALE
            or (quarantine.fault is not Fault.LYING and record.has_worked)
        )
        return self.clock.now() < quarantine.until and not has_come_back

    def quarantine(self, peer: Announcement, fault: Fault) -> None:
        """Avoid a peer that failed us, at once and for longer each time it comes back.

        Only this announcement is stale, not the next. Otherwise a newer one ends it if the peer
        has worked before: it was restarted or is alive after all. Not so for one that lied or never
        worked: announcing costs nothing. Many sessions may tell of one failure; it counts once.
        """
        record = self._find(peer.peer_id)
        previous = record.quarantine
        newest = self.view.find(peer.peer_id) or peer
        if fault is Fault.STALE and peer.sequence < newest.sequence:
            return
        if previous is None:
            seconds = _FIRST_QUARANTINE_SECONDS
        elif self.is_quarantined(newest):
            seconds = previous.seconds
            fault = max(fault, previous.fault)
        else:
            seconds = min(2 * previous.seconds, _LONGEST_QUARANTINE_SECONDS)
        record.quarantine = _Quarantine(self.clock.now() + seconds, seconds, newest.sequence, fault)

    def blame(self, hop: Hop, error: PeerFailure, forgiven: set[PeerId]) -> LostHopError:
        """Have a peer avoided for a failure of its own; return what to raise of the failure.

        A peer that was restarted has lost the session and is sound: that is `forgiven` once.
        """
        peer_id, fault = hop.peer.peer_id, find_fault(error)
        has_lost_session = (
            isinstance(error, RefusedError) and error.code is ErrorCode.UNKNOWN_SESSION
        )
        if has_lost_session and peer_id not in forgiven:
            forgiven.add(peer_id)
        elif fault is not None:
            if isinstance(error, SilentError):
                self.times(peer_id).note_silence()
            self.quarantine(hop.peer, fault)
        return LostHopError(hop, str(error))

    def note_pass(self, peer_id: PeerId) -> None:
        """Note that a peer took a pass: forget what it did wrong."""
        record = self._find(peer_id)
        record.has_taken_pass, record.quarantine = True, None

    def note_answer(
        self, hop: Hop, num_tokens: int, seconds: float, way_seconds: float | None = None
    ) -> None:
        """Note that a hop took a step of so many tokens: forget what its peer did wrong.

        `way_seconds` are what is expected of the ways there and on; None: the round trip.
        """
        record = self._find(hop.peer.peer_id)
        if way_seconds is None:
            way_seconds = record.rtt_seconds or 0.0
        record.steps.note(num_tokens, seconds, way_seconds, len(hop.span))
        record.quarantine = None

    def note_rtt(self, peer_id: PeerId, seconds: float) -> None:
        """Note a measured round trip; the newest counts."""
        self._find(peer_id).rtt_seconds = seconds
        self.revision += 1
        self.way_seconds.clear()

    def rtt_seconds(self, peer_id: PeerId) -> float | None:
        """Return the newest measured round trip, None if there is none."""
        record = self._records.get(peer_id)
        return None if record is None else record.rtt_seconds

    @property
    def rtts_seconds(self) -> dict[PeerId, float]:
        """The newest round trips of all peers that were measured."""
        known = ((peer_id, one.rtt_seconds) for peer_id, one in self._records.items())
        return {peer_id: seconds for peer_id, seconds in known if seconds is not None}

    def times(self, peer_id: PeerId) -> AnswerTimes:
        """Return the record of a peer's answer times."""
        return self._find(peer_id).steps

    def pass_times(self, peer_id: PeerId) -> PassTimes:
        """Return the record of how fast a peer takes passes."""
        return self._find(peer_id).passes

    def times_of_others(self, peer_id: PeerId) -> list[AnswerTimes]:
        """Return the records of all peers but one."""
        return [one.steps for other, one in self._records.items() if other != peer_id]

    def list_block_seconds(self) -> dict[PeerId, float]:
        """Return what a block takes for one token at each peer that has worked for us."""
        used = ((peer_id, one.steps.block_seconds) for peer_id, one in self._records.items())
        return {peer_id: median(seconds) for peer_id, seconds in used if seconds}


def takes_passes(peer: Announcement, weights: str | None) -> bool:
    """Return whether a peer takes passes, through these weights if any are named."""
    is_able = peer.max_version >= PASS_VERSION and peer.takes_passes
    return is_able and weights in (None, peer.weights)
