"""The state of a swarm as a monitor knows it, and the events that change it.

All pure: `reduce_…` take what was observed and the time, and return another state. Times are wall
seconds of the monitor: the clocks of peers only date their own announcements.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum, StrEnum
from functools import cached_property
from itertools import accumulate

from ...protocol.ids import ModelId, PeerId
from ...protocol.records.announcements import Announcement, PeerState, TrainingProgress
from ...protocol.spans import Span, find_gaps

MIN_REPLICAS = 2
"""Peers at every block of a healthy swarm: any one of them may leave."""

PERIODS_PER_LIFETIME = 3
"""Announcement periods in the lifetime of an announcement; see peer/announcing/announcer.py."""

GRACE_SECONDS = 5.0
"""How long after its period a renewal may come before its peer is not seen."""

DEPARTED_SECONDS = 3600.0
"""How long peers that have left or are lost are still shown."""


MOST_DEPARTED = 500
"""Of one model: identities are free, and whoever makes many would fill our memory."""


class Visibility(StrEnum):
    """Whether a peer is there, as far as a monitor can tell."""

    SEEN = "seen"
    NOT_SEEN = "not seen"
    """Its announcement was not renewed in time."""
    LOST = "lost"
    """Nor did it answer as it announced, or its announcement has expired."""
    LEFT = "left"
    """It has said goodbye."""


_DEPARTED = Visibility.LOST, Visibility.LEFT


class EventKind(StrEnum):
    """What happens to a peer, or a canary.

    A late renewal is none: it is a state, and mostly ends by itself."""

    JOINED = "joined"
    ONLINE = "online"
    DRAINING = "draining"
    LEFT = "left"
    MOVED = "moved"
    LOST = "lost"
    BACK = "back"
    CANARY_FAILED = "canary failed"
    CANARY_RECOVERED = "canary recovered"
    CANARY_DIFFERS = "canary text differs"


class Health(IntEnum):
    """The state of a model or of a swarm; the number is the exit code of `monitor --once`."""

    HEALTHY = 0
    DEGRADED = 1
    """A block has a single replica."""
    FAILING = 2
    """A block has none."""
    UNKNOWN = 3
    """No directory answers, or none of the peers that would make a difference has been dialled."""

    def __str__(self) -> str:
        return self.name.lower()


@dataclass(frozen=True)
class Event:
    """Something that happened to a peer or a canary, as it was observed."""

    at: float
    kind: EventKind
    model_id: ModelId
    peer_id: PeerId
    """Empty for a canary, whose span is the whole model."""
    span: Span
    detail: str = ""
    """More for people to read; a peer may have chosen some of the words."""


@dataclass(frozen=True)
class ProbeResult:
    """The result of dialling a peer."""

    at: float
    fault: str = ""
    """Why it is not what it announces; empty if it is."""
    is_refusal: bool = False
    """Whether it is there all the same: it is loading its blocks, or has too much to do."""
    rtt_seconds: float | None = None

    @property
    def is_absent(self) -> bool:
        """Whether the peer is not where it announced itself."""
        return bool(self.fault) and not self.is_refusal


@dataclass(frozen=True)
class WatchedPeer:
    """A peer as it was last seen."""

    announcement: Announcement
    """The newest, which may have expired."""
    last_seen_at: float
    """When the peer said that, or last answered."""
    since: float
    """Since when it is in this state, at this span and there, or not there."""
    visibility: Visibility = Visibility.SEEN
    probe: ProbeResult | None = None
    """The last one."""
    answered_at: float | None = None
    """When it last was what it announces; None: never."""
    is_confirmed: bool = False
    """Whether it is what it announces, as far as a dial can tell: it has answered one since it
    came, and not failed the last two."""

    @property
    def is_online(self) -> bool:
        """Whether it announces that it serves its blocks."""
        is_there = self.visibility in (Visibility.SEEN, Visibility.NOT_SEEN)
        return is_there and self.announcement.state is PeerState.ONLINE

    @property
    def is_serving(self) -> bool:
        """Whether it counts as a replica of its blocks: anybody can announce anything."""
        return self.is_online and self.is_confirmed

    @property
    def is_pending(self) -> bool:
        """Whether it may turn out to be a replica: no dial has told yet."""
        is_untold = self.probe is None or self.probe.is_refusal
        return self.is_online and not self.is_confirmed and is_untold

    @property
    def period_seconds(self) -> float:
        """How often it announces itself."""
        lifetime_seconds = self.announcement.expires_at - self.announcement.issued_at
        return lifetime_seconds / PERIODS_PER_LIFETIME

    def is_overdue(self, now: float) -> bool:
        """Return whether it should have renewed its announcement."""
        return now - self.last_seen_at > self.period_seconds + GRACE_SECONDS


@dataclass(frozen=True)
class WatchedModel:
    """One model of the swarm, and its peers."""

    model_id: ModelId
    read_at: float | None = None
    """When the directory last told its peers."""
    error: str = ""
    """Why it does not tell them now; empty while it does."""
    peers: Mapping[PeerId, WatchedPeer] = field(default_factory=dict)
    first_read_at: float | None = None

    @cached_property
    def num_blocks(self) -> int:
        """Blocks of the model, as most of its peers say."""
        votes = Counter(announced.num_blocks for announced in self._trusted)
        return min(votes, key=lambda count: (-votes[count], count), default=0)

    @cached_property
    def name(self) -> str:
        """What most of its peers call it; empty if they say nothing."""
        names = Counter(one.model_name for one in self._trusted if one.model_name)
        return min(names, key=lambda name: (-names[name], name), default="")

    @cached_property
    def _trusted(self) -> list[Announcement]:
        """Return what peers say of the model: those that are confirmed, if there are any."""
        peers = self.peers.values()
        confirmed = [peer for peer in peers if peer.is_serving]
        there = confirmed or [peer for peer in peers if peer.is_online] or peers
        return [peer.announcement for peer in there]

    @cached_property
    def has_answered(self) -> bool:
        """Whether any of its peers has ever been what it announces: a model is made up easily."""
        return any(peer.answered_at is not None for peer in self.peers.values())

    @cached_property
    def pending(self) -> tuple[WatchedPeer, ...]:
        """Those of the first reading that have not been dialled. Others have to answer first: or
        strangers could keep what is known from being told.
        """
        known = self.peers.values()
        return tuple(one for one in known if one.is_pending and one.since == self.first_read_at)

    @cached_property
    def num_unconfirmed(self) -> int:
        """Peers that announce themselves online, and are not counted."""
        return sum(peer.is_online and not peer.is_confirmed for peer in self.peers.values())

    @cached_property
    def serving(self) -> tuple[WatchedPeer, ...]:
        """The peers that count as replicas of their blocks."""
        return tuple(
            peer
            for peer in self.peers.values()
            if peer.is_serving and peer.announcement.num_blocks == self.num_blocks
        )

    @cached_property
    def training(self) -> TrainingProgress | None:
        """How far a training run has come: the median of what its peers say; None: it is none."""
        told = [one.training for one in self._trusted if one.training is not None]
        if 2 * len(told) <= len(self._trusted):
            return None
        told.sort(key=lambda progress: (progress.num_updates, progress.update, progress.loss))
        return told[len(told) // 2]

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """For each block, how many peers serve it."""
        return tuple(self._count_replicas(self.serving))

    def _count_replicas(self, peers: Iterable[WatchedPeer]) -> Iterable[int]:
        changes = [0] * (self.num_blocks + 1)
        for peer in peers:
            changes[peer.announcement.span.start] += 1
            changes[peer.announcement.span.stop] -= 1
        return accumulate(changes[: self.num_blocks])

    @cached_property
    def health(self) -> Health:
        """The health of the model.

        UNKNOWN while the directory does not tell its peers, none of them has ever answered, or
        those that are still to be dialled may make it better.
        """
        if self.error or self.read_at is None or not self.has_answered:
            return Health.UNKNOWN
        health = _judge(self.depths)
        if health is Health.HEALTHY or not self.pending:
            return health
        fitting = (one for one in self.pending if one.announcement.num_blocks == self.num_blocks)
        best = _judge(tuple(self._count_replicas([*self.serving, *fitting])))
        return health if best is health else Health.UNKNOWN

    def find_spans(self, depth: int) -> list[Span]:
        """Return the maximal spans whose blocks have exactly so many replicas."""
        others = (
            Span(block, block + 1) for block, count in enumerate(self.depths) if count != depth
        )
        return list(find_gaps(self.num_blocks, others))


@dataclass(frozen=True)
class SwarmState:
    """All models of a swarm, and whether its directory answers."""

    models: Mapping[ModelId, WatchedModel] = field(default_factory=dict)
    read_at: float | None = None
    """When the directory last answered."""
    error: str = ""
    """Why it does not answer; empty while it does."""

    @property
    def health(self) -> Health:
        """The health of the worst model; those that nobody may serve count only among others such.

        A stranger who announces models that are not there changes nothing.
        """
        if self.error or self.read_at is None:
            return Health.UNKNOWN
        models = self.models.values()
        known = [model.health for model in models if model.has_answered or model.error]
        return max(known, default=Health.UNKNOWN if models else Health.FAILING)


def _judge(depths: Sequence[int]) -> Health:
    least = min(depths, default=0)
    if least >= MIN_REPLICAS:
        return Health.HEALTHY
    return Health.DEGRADED if least else Health.FAILING


Change = tuple[SwarmState, tuple[Event, ...]]
"""Another state, and what has happened."""


def reduce_failure(state: SwarmState, error: str, model_id: ModelId | None = None) -> Change:
    """Note that no directory answers, or not for a model.

    What is known grows old, and no peer is taken for lost.
    """
    if model_id is None:
        return replace(state, error=error), ()
    known = state.models.get(model_id, WatchedModel(model_id))
    return replace(state, models={**state.models, model_id: replace(known, error=error)}), ()


def reduce_reading(
    state: SwarmState, model_id: ModelId, announced: Sequence[Announcement], now: float
) -> Change:
    """Take what the directory tells of a model: the announcements that hold.

    A model whose peers have all gone is forgotten with them. Peers that have never answered make no
    events: whoever makes up many would displace all others.
    """
    known = state.models.get(model_id, WatchedModel(model_id))
    peers, events = dict(known.peers), list[Event]()
    for announcement in announced:
        peer_id = announcement.peer_id
        if peer_id not in peers and announcement.state is PeerState.OFFLINE:
            continue  # nobody here has seen it
        peer, kind = _take_announcement(peers.get(peer_id), announcement, now)
        peers[peer_id] = peer
        if kind is not None and peer.answered_at is not None:
            events.append(_make_event(peer, kind, now))
    told = {announcement.peer_id for announcement in announced}
    for peer_id, peer in list(peers.items()):
        visibility = _find_visibility(peer, peer_id in told, now)
        if visibility is not peer.visibility:
            peers[peer_id] = peer = replace(peer, visibility=visibility, since=now)
            if visibility is not Visibility.NOT_SEEN and peer.answered_at is not None:
                events.append(_make_event(peer, EventKind(visibility.value), now))
        if visibility in _DEPARTED and now - peer.since > DEPARTED_SECONDS:
            del peers[peer_id]
    departed = [peer for peer in peers.values() if peer.visibility in _DEPARTED]
    departed.sort(key=lambda peer: peer.since, reverse=True)
    for peer in departed[MOST_DEPARTED:]:
        del peers[peer.announcement.peer_id]
    first_read_at = now if known.first_read_at is None else known.first_read_at
    model = WatchedModel(model_id, now, peers=peers, first_read_at=first_read_at)
    models = {**state.models, model_id: model}
    if not peers:  # nobody has served it for an hour
        del models[model_id]
    return SwarmState(models, now), tuple(events)


def reduce_probe(
    state: SwarmState,
    model_id: ModelId,
    peer_id: PeerId,
    probe: ProbeResult,
) -> Change:
    """Take the answer of one peer: one that should have renewed its announcement may be lost.

    The first answer of a peer that was not there at first is its event that it joined.
    A peer that is dialled in vain and announces itself in time stays, and is not counted: the way
    from here to it may be closed, and to others open.
    """
    model = state.models.get(model_id)
    peer = None if model is None else model.peers.get(peer_id)
    if model is None or peer is None:
        return state, ()
    events = ()
    changed = replace(peer, probe=probe)
    if not probe.fault:
        if peer.answered_at is None and peer.since != model.first_read_at:
            events = (_make_event(peer, EventKind.JOINED, probe.at),)
        changed = replace(changed, answered_at=probe.at, is_confirmed=True)
    elif probe.is_absent and peer.probe is not None and peer.probe.is_absent:
        changed = replace(changed, is_confirmed=False)
    is_late = peer.visibility is Visibility.NOT_SEEN
    if probe.is_absent and is_late:
        changed = replace(changed, visibility=Visibility.LOST, since=probe.at)
        if peer.answered_at is not None:
            events = (_make_event(changed, EventKind.LOST, probe.at, probe.fault),)
    elif is_late:
        changed = replace(
            changed, visibility=Visibility.SEEN, since=probe.at, last_seen_at=probe.at
        )
    model = replace(model, peers={**model.peers, peer_id: changed})
    return replace(state, models={**state.models, model_id: model}), events


def reduce_forgetting(state: SwarmState, model_id: ModelId) -> Change:
    """Forget a model, whose place another one gets."""
    models = {known: model for known, model in state.models.items() if known != model_id}
    return replace(state, models=models), ()


def _take_announcement(
    known: WatchedPeer | None, announcement: Announcement, now: float
) -> tuple[WatchedPeer, EventKind | None]:
    """Return a peer with what it announces, and what has happened to it."""
    # A clock that is ahead or behind moves this by one period at most, and costs a dial.
    period_seconds = (announcement.expires_at - announcement.issued_at) / PERIODS_PER_LIFETIME
    last_seen_at = min(now, max(announcement.issued_at, now - period_seconds))
    if known is None:
        return WatchedPeer(announcement, last_seen_at, now), EventKind.JOINED
    before = known.announcement
    if announcement == before:
        return known, None
    peer = replace(
        known, announcement=announcement, last_seen_at=last_seen_at, visibility=Visibility.SEEN
    )
    if known.visibility in _DEPARTED:
        return replace(peer, since=now, probe=None, is_confirmed=False), EventKind.BACK
    if announcement.state is not before.state and announcement.state is not PeerState.OFFLINE:
        kind = EventKind.JOINED if announcement.state is PeerState.JOINING else None
        return replace(peer, since=now), kind or EventKind(announcement.state.value)
    if announcement.span != before.span:
        return replace(peer, since=now), EventKind.MOVED
    return peer, None


def _find_visibility(peer: WatchedPeer, is_told: bool, now: float) -> Visibility:
    if peer.announcement.state is PeerState.OFFLINE:
        return Visibility.LEFT
    if peer.visibility is Visibility.LOST:
        return Visibility.LOST  # until it announces itself again
    if not is_told and peer.announcement.expires_at <= now:
        return Visibility.LOST
    return Visibility.NOT_SEEN if peer.is_overdue(now) else peer.visibility


def _make_event(peer: WatchedPeer, kind: EventKind, now: float, detail: str = "") -> Event:
    one = peer.announcement
    return Event(now, kind, one.model_id, one.peer_id, one.span, detail)
