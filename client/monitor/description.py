"""Describes a swarm's state for people: numbers and texts, each with its age.

The page, the terminal and `--json` show this and nothing else, so that they agree.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ...protocol.ids import ModelId, PeerId
from ...protocol.records.announcements import TrainingProgress
from .canary import CanaryHop, CanaryRun, CanaryState
from .state import Event, Health, SwarmState, Visibility, WatchedModel, WatchedPeer


@dataclass(frozen=True)
class PeerRow:
    """One peer. Speeds are through its whole span; None is what nobody has measured."""

    peer_id: PeerId
    span: str
    state: str
    """How it announces itself (joining, online, draining), or: unconfirmed, not seen, lost, left.

    An unconfirmed peer announces that it is online, and does not answer: it is not counted."""
    since: float
    """Wall seconds since when all that is so."""
    last_seen_seconds_ago: float
    """Since it announced itself, or answered."""
    name: str
    """What its owner calls it; empty for nothing."""
    device: str
    """What computes; empty where it does not say."""
    num_sessions: int
    weights: str
    block_bytes: int
    """Memory that one block takes there; 0 where it does not say."""
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
    probed_seconds_ago: float | None
    answered_seconds_ago: float | None
    """Since it last was what it announces; None if it never was."""
    fault: str
    """Why the last probe failed; empty if it did not."""


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
    """Peers that are counted: they announce that they are online, and answer."""
    num_unconfirmed: int
    peers: tuple[PeerRow, ...]
    age_seconds: float | None
    """How long ago the directory told its peers."""
    error: str
    """Why it does not tell them now; empty while it does."""
    training: TrainingProgress | None
    """How far the training run has come; None for a model that is served."""

    @property
    def progress(self) -> str:
        """How far the training run has come, in words; empty for a model that is served."""
        if self.training is None:
            return ""
        loss = f", loss {self.training.loss:.4g} nats per token" if self.training.update else ""
        if self.training.held_out_loss is not None:
            loss += f", held-out loss {self.training.held_out_loss:.4g}"
        return f"Update {self.training.update} of {self.training.num_updates}{loss}"


@dataclass(frozen=True)
class CanaryPanel:
    """The last run of a canary. Times are None, and the text is empty, where it failed."""

    name: str
    model_id: ModelId
    health: str
    """healthy, failing, or unknown before its first run."""
    error: str
    age_seconds: float | None
    """How long ago it began; None before the first one."""
    first_token_seconds: float | None
    tokens_per_second: float | None
    text: str
    first_text: str
    is_same: bool | None
    """Whether the text is the first one that it said."""
    hops: tuple[CanaryHop, ...]
    """Seconds per token at each hop of the last run."""
    failovers: tuple[str, ...]
    """Peers that were lost during the last run, in words."""
    num_runs: int
    """Since the monitor began."""
    num_failed: int


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
    canaries: tuple[CanaryPanel, ...] = ()
    warnings: tuple[str, ...] = ()
    """Problems of the monitor itself, such as a history that cannot be written."""

    def to_json(self) -> str:
        """Return all of it: what `dataclasses.asdict` copies, at a tenth of its cost."""
        return json.dumps(self, default=vars, ensure_ascii=False, separators=(",", ":"))

    @property
    def sentence(self) -> str:
        """The state of the swarm in one sentence."""
        if self.age_seconds is None and not self.error:
            return "The swarm is being joined."
        if self.health == str(Health.UNKNOWN):
            if not self.error:
                return self._explain_unknown()
            since = "" if self.age_seconds is None else f" for {self.age_seconds:.0f} s"
            known = ": what is shown was known before" if self.models else ""
            return f"No directory answers{since}{known}."
        if not self.models:
            return "No peer of this swarm serves a model."
        num_failing = sum(model.health == str(Health.FAILING) for model in self.models)
        num_degraded = sum(model.health == str(Health.DEGRADED) for model in self.models)
        if num_failing:
            return f"{_count(num_failing, 'model')} cannot be used: blocks are missing."
        if num_degraded:
            count = _count(num_degraded, "model")
            return f"{count} can lose no peer: blocks have a single replica."
        if any(model.health == str(Health.UNKNOWN) for model in self.models):
            return "Every block has two replicas or more, of models whose peers answer."
        return "Every block of every model has two replicas or more."

    def _explain_unknown(self) -> str:
        if any(model.error for model in self.models):
            return "The directory does not tell the peers of every model."
        peers = [peer for model in self.models for peer in model.peers]
        if any(peer.probed_seconds_ago is None for peer in peers):
            return "Peers are being dialled."
        return "No peer that is announced answers from here."


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


def describe_canaries(states: Iterable[CanaryState], now: float) -> tuple[CanaryPanel, ...]:
    """Return what people see of canaries at `now`."""
    return tuple(_describe_canary(state, now) for state in states)


def _describe_canary(state: CanaryState, now: float) -> CanaryPanel:
    last = state.last or CanaryRun(now, ModelId(""))
    health = Health.FAILING if last.error else Health.HEALTHY
    return CanaryPanel(
        name=state.name,
        model_id=last.model_id,
        health=str(Health.UNKNOWN if state.last is None else health),
        error=last.error,
        age_seconds=None if state.last is None else max(0.0, now - last.at),
        first_token_seconds=last.first_token_seconds,
        tokens_per_second=last.tokens_per_second,
        text=last.text,
        first_text=state.first_text or "",
        is_same=state.is_same,
        hops=last.hops,
        failovers=last.failovers,
        num_runs=state.num_runs,
        num_failed=state.num_failed,
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
        model.num_unconfirmed,
        tuple(_describe_peer(peer, now) for peer in order),
        None if model.read_at is None else max(0.0, now - model.read_at),
        model.error,
        model.training,
    )


def _describe_peer(peer: WatchedPeer, now: float) -> PeerRow:
    one, probe = peer.announcement, peer.probe
    return PeerRow(
        peer_id=one.peer_id,
        span=str(one.span),
        state=_name_state(peer),
        since=peer.since,
        last_seen_seconds_ago=max(0.0, now - peer.last_seen_at),
        name=one.name,
        device=one.device,
        num_sessions=one.num_sessions if _is_there(peer) else 0,
        weights=one.weights,
        block_bytes=one.block_bytes,
        reachability="direct" if one.endpoints else "relayed" if one.relays else "none",
        free_kv_tokens=one.free_kv_tokens if peer.is_serving else 0,
        decode_steps_per_second=one.decode_steps_per_second,
        loaded_decode_steps_per_second=one.loaded_decode_steps_per_second,
        prefill_tokens_per_second=one.prefill_tokens_per_second,
        queue_seconds=one.queue_seconds,
        software=one.software,
        kernels=one.kernels,
        rtt_seconds=None if probe is None else probe.rtt_seconds,
        probed_seconds_ago=None if probe is None else max(0.0, now - probe.at),
        answered_seconds_ago=None if peer.answered_at is None else max(0.0, now - peer.answered_at),
        fault="" if probe is None else probe.fault,
    )


def _is_there(peer: WatchedPeer) -> bool:
    return peer.visibility in (Visibility.SEEN, Visibility.NOT_SEEN)


def _name_state(peer: WatchedPeer) -> str:
    if peer.visibility is not Visibility.SEEN:
        return str(peer.visibility)
    if peer.is_online and not peer.is_confirmed:
        return "unconfirmed"
    return str(peer.announcement.state)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
