"""Describes a swarm's state for people: numbers and texts, each with its age.

The page, the terminal and `--json` show this and nothing else, so that they agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...protocol.ids import ModelId, PeerId
from .state import Event, Health, SwarmState, Visibility, WatchedModel, WatchedPeer


@dataclass(frozen=True)
class PeerRow:
    """One peer. Speeds are through its whole span; None is what nobody has measured."""

    peer_id: PeerId
    span: str
    state: str
    """How it announces itself (joining, online, draining), or: not seen, lost, left."""
    since: float
    """Wall seconds since when all that is so."""
    heard_seconds_ago: float
    weights: str
    reachability: str
    """How others reach it: directly, or through a relay."""
    free_kv_tokens: int
    decode_steps_per_second: float | None
    loaded_decode_steps_per_second: float | None
    prefill_tokens_per_second: float | None
    queue_seconds: float
    software: str
    kernels: str
    rtt_seconds: float | None
    dialled_seconds_ago: float | None
    fault: str
    """Why the last dial was in vain; empty if it was not."""


@dataclass(frozen=True)
class ModelPanel:
    """One model and its peers."""

    model_id: ModelId
    name: str
    num_blocks: int
    health: str
    missing: tuple[str, ...]
    """Spans of blocks that nobody serves."""
    single: tuple[str, ...]
    """Spans of blocks that one peer serves."""
    depths: tuple[int, ...]
    """For each block, how many peers serve it."""
    num_serving: int
    peers: tuple[PeerRow, ...]
    age_seconds: float | None
    """How long ago the directory told its peers."""
    error: str
    """Why it does not tell them now; empty while it does."""


@dataclass(frozen=True)
class EventRow:
    """Something that has happened."""

    at: float
    kind: str
    model_id: ModelId
    peer_id: PeerId
    span: str
    detail: str


@dataclass(frozen=True)
class Description:
    """The swarm at one moment."""

    taken_at: float
    health: str
    exit_code: int
    error: str
    """Why no directory answers; empty while one does."""
    age_seconds: float | None
    """How long ago the directory answered; None if it never has."""
    models: tuple[ModelPanel, ...]
    """The models, by name."""
    events: tuple[EventRow, ...]
    """The newest first."""

    @property
    def sentence(self) -> str:
        """The state of the swarm in one sentence."""
        if self.age_seconds is None and not self.error:
            return "The swarm is being joined."
        if self.health == str(Health.UNKNOWN):
            if not self.error:
                return "The directory does not tell the peers of every model."
            since = "" if self.age_seconds is None else f" for {self.age_seconds:.0f} s"
            known = ": what is shown was known before" if self.models else ""
            return f"No directory answers{since}{known}."
        if not self.models:
            return "No peer of this swarm serves a model."
        num_failing = sum(model.health == str(Health.FAILING) for model in self.models)
        num_thin = sum(model.health == str(Health.DEGRADED) for model in self.models)
        if num_failing:
            return f"{_count(num_failing, 'model')} cannot be used: blocks are missing."
        if num_thin:
            return f"{_count(num_thin, 'model')} can lose no peer: blocks have a single replica."
        return "Every block of every model has two replicas or more."


def describe(state: SwarmState, now: float, events: Sequence[Event] = ()) -> Description:
    """Return what people see at `now` (wall seconds); `events` with the newest first."""
    order = sorted(state.models.values(), key=lambda model: (model.name, model.model_id))
    return Description(
        taken_at=now,
        health=str(state.health),
        exit_code=int(state.health),
        error=state.error,
        age_seconds=None if state.read_at is None else max(0.0, now - state.read_at),
        models=tuple(_describe_model(model, now) for model in order),
        events=tuple(
            EventRow(one.at, str(one.kind), one.model_id, one.peer_id, str(one.span), one.detail)
            for one in events
        ),
    )


def _describe_model(model: WatchedModel, now: float) -> ModelPanel:
    order = sorted(
        model.peers.values(),
        key=lambda peer: (not peer.is_serving, peer.announcement.span, peer.announcement.peer_id),
    )
    return ModelPanel(
        model.model_id,
        model.name,
        model.num_blocks,
        str(model.health),
        tuple(map(str, model.find_spans(0))),
        tuple(map(str, model.find_spans(1))),
        model.depths,
        len(model.serving),
        tuple(_describe_peer(peer, now) for peer in order),
        None if model.read_at is None else max(0.0, now - model.read_at),
        model.error,
    )


def _describe_peer(peer: WatchedPeer, now: float) -> PeerRow:
    one, dialled = peer.announcement, peer.dialled
    is_there = peer.visibility in (Visibility.SEEN, Visibility.NOT_SEEN)
    return PeerRow(
        peer_id=one.peer_id,
        span=str(one.span),
        state=str(one.state if peer.visibility is Visibility.SEEN else peer.visibility),
        since=peer.since,
        heard_seconds_ago=max(0.0, now - peer.heard_at),
        weights=one.weights,
        reachability="direct" if one.endpoints else "relayed" if one.relays else "none",
        free_kv_tokens=one.free_kv_tokens if is_there else 0,
        decode_steps_per_second=one.decode_steps_per_second,
        loaded_decode_steps_per_second=one.loaded_decode_steps_per_second,
        prefill_tokens_per_second=one.prefill_tokens_per_second,
        queue_seconds=one.queue_seconds,
        software=one.software,
        kernels=one.kernels,
        rtt_seconds=None if dialled is None else dialled.rtt_seconds,
        dialled_seconds_ago=None if dialled is None else max(0.0, now - dialled.at),
        fault="" if dialled is None else dialled.fault,
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
