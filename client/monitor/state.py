"""The state of a swarm as a monitor knows it, and the events that change it.

All pure: `reduce_…` take what was observed and the time, and return another state. Times are wall
seconds of the monitor: the clocks of peers only date their own announcements.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum, StrEnum
from functools import cached_property

from ...protocol.ids import ModelId, PeerId
from ...protocol.records.announcements import Announcement, PeerState
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
    """What happens to a peer. A late renewal is none: it is a state, and mostly ends by itself."""

    JOINED = "joined"
    ONLINE = "online"
    DRAINING = "draining"
    LEFT = "left"
    MOVED = "moved"
    LOST = "lost"
    BACK = "back"


class Health(IntEnum):
    """The state of a model or of a swarm; the number is the exit code of `monitor --once`."""

    HEALTHY = 0
    DEGRADED = 1
    """A block has a single replica."""
    FAILING = 2
    """A block has none."""
    UNKNOWN = 3
    """No directory answers."""

    def __str__(self) -> str:
        return self.name.lower()


@dataclass(frozen=True)
class Event:
    """Something that happened to a peer, as it was observed."""

    at: float
    kind: EventKind
    model_id: ModelId
    peer_id: PeerId
    span: Span
    detail: str = ""
    """More for people to read; a peer may have chosen some of the words."""


@dataclass(frozen=True)
class Dialled:
    """The result of dialling a peer."""

    at: float
    fault: str = ""
    """Why it is not what it announces; empty if it is."""
    is_refusal: bool = False
    """Whether it is there all the same: it is loading its blocks, or speaks another version."""
    rtt_seconds: float | None = None

    @property
    def is_absent(self) -> bool:
        """Whether the peer is not where it announced itself."""
        return bool(self.fault) and not self.is_refusal


@dataclass(frozen=True)
class WatchedPeer:
    """A peer as it was last heard of."""

    announcement: Announcement
    """The newest, which may have expired."""
    heard_at: float
    """When the peer said that, or last answered."""
    since: float
    """Since when it is in this state, at this span and there, or not there."""
    visibility: Visibility = Visibility.SEEN
    dialled: Dialled | None = None

    @property
    def is_serving(self) -> bool:
        """Whether it counts as a replica of its blocks."""
        is_there = self.visibility in (Visibility.SEEN, Visibility.NOT_SEEN)
        return is_there and self.announcement.state is PeerState.ONLINE

    def is_overdue(self, now: float) -> bool:
        """Return whether it should have renewed its announcement."""
        lifetime_seconds = self.announcement.expires_at - self.announcement.issued_at
        return now - self.heard_at > lifetime_seconds / PERIODS_PER_LIFETIME + GRACE_SECONDS


@dataclass(frozen=True)
class WatchedModel:
    """One model of the swarm, and its peers."""

    model_id: ModelId
    read_at: float | None = None
    """When the directory last told its peers."""
    error: str = ""
    """Why it does not tell them now; empty while it does."""
    peers: Mapping[PeerId, WatchedPeer] = field(default_factory=dict)

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
        """Return what peers say of the model: those that answered, if there are any."""
        there = [peer for peer in self.peers.values() if peer.is_serving] or self.peers.values()
        answered = [one for one in there if one.dialled is not None and not one.dialled.fault]
        return [peer.announcement for peer in answered or there]

    @cached_property
    def serving(self) -> tuple[WatchedPeer, ...]:
        """The peers that count as replicas of their blocks."""
        return tuple(
            peer
            for peer in self.peers.values()
            if peer.is_serving and peer.announcement.num_blocks == self.num_blocks
        )

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """For each block, how many peers serve it."""
        changes = [0] * (self.num_blocks + 1)
        for peer in self.serving:
            changes[peer.announcement.span.start] += 1
            changes[peer.announcement.span.stop] -= 1
        depth, depths = 0, []
        for change in changes[: self.num_blocks]:
            depth += change
            depths.append(depth)
        return tuple(depths)

    @cached_property
    def health(self) -> Health:
        """The health of the model; UNKNOWN while the directory does not tell its peers."""
        if self.error or self.read_at is None:
            return Health.UNKNOWN
        least = min(self.depths, default=None)
        if least is None:
            return Health.FAILING
        if least >= MIN_REPLICAS:
            return Health.HEALTHY
        return Health.DEGRADED if least else Health.FAILING

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
        """The health of the worst model."""
        if self.error or self.read_at is None:
            return Health.UNKNOWN
        return max((model.health for model in self.models.values()), default=Health.FAILING)


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

    A model whose peers have all gone is forgotten with them.
    """
    known = state.models.get(model_id, WatchedModel(model_id))
    is_first = known.read_at is None
    peers, events = dict(known.peers), list[Event]()
    for announcement in announced:
        peer_id = announcement.peer_id
        if peer_id not in peers and announcement.state is PeerState.OFFLINE:
            continue  # nobody here has seen it
        peer, kind = _hear(peers.get(peer_id), announcement, now)
        peers[peer_id] = peer
        if kind is not None and not (is_first and kind is EventKind.JOINED):
            events.append(_make_event(peer, kind, now))
    told = {announcement.peer_id for announcement in announced}
    for peer_id, peer in list(peers.items()):
        visibility = _find_visibility(peer, peer_id in told, now)
        if visibility is not peer.visibility:
            peers[peer_id] = peer = replace(peer, visibility=visibility, since=now)
            if visibility is not Visibility.NOT_SEEN:
                events.append(_make_event(peer, EventKind(visibility.value), now))
        if visibility in _DEPARTED and now - peer.since > DEPARTED_SECONDS:
            del peers[peer_id]
    departed = [peer for peer in peers.values() if peer.visibility in _DEPARTED]
    departed.sort(key=lambda peer: peer.since, reverse=True)
    for peer in departed[MOST_DEPARTED:]:
        del peers[peer.announcement.peer_id]
    models = {**state.models, model_id: WatchedModel(model_id, now, peers=peers)}
    if not peers:  # nobody has served it for an hour
        del models[model_id]
    return SwarmState(models, now), tuple(events)


def reduce_dialling(
    state: SwarmState,
    model_id: ModelId,
    peer_id: PeerId,
    dialled: Dialled,
    must_answer: bool = False,
) -> Change:
    """Take the answer of one peer: one that should have renewed its announcement may be lost.

    A peer that is dialled in vain and announces itself in time stays, unless it `must_answer`: the
    way from here to it may be closed, and to others open.
    """
    model = state.models.get(model_id)
    peer = None if model is None else model.peers.get(peer_id)
    if model is None or peer is None:
        return state, ()
    events = ()
    changed = replace(peer, dialled=dialled)
    is_late = peer.visibility is Visibility.NOT_SEEN
    if dialled.is_absent and (is_late or must_answer):
        changed = replace(changed, visibility=Visibility.LOST, since=dialled.at)
        events = (_make_event(changed, EventKind.LOST, dialled.at, dialled.fault),)
    elif is_late:
        changed = replace(
            changed, visibility=Visibility.SEEN, since=dialled.at, heard_at=dialled.at
        )
    model = replace(model, peers={**model.peers, peer_id: changed})
    return replace(state, models={**state.models, model_id: model}), events


def _hear(
    known: WatchedPeer | None, announcement: Announcement, now: float
) -> tuple[WatchedPeer, EventKind | None]:
    """Return a peer after it was heard of, and what has happened to it."""
    # A clock that is ahead or behind moves this by one period at most, and costs a dial.
    period_seconds = (announcement.expires_at - announcement.issued_at) / PERIODS_PER_LIFETIME
    heard_at = min(now, max(announcement.issued_at, now - period_seconds))
    if known is None:
        return WatchedPeer(announcement, heard_at, now), EventKind.JOINED
    before = known.announcement
    if announcement == before:
        return known, None
    peer = replace(known, announcement=announcement, heard_at=heard_at, visibility=Visibility.SEEN)
    if known.visibility in _DEPARTED:
        return replace(peer, since=now, dialled=None), EventKind.BACK
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
