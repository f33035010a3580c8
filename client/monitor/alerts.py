"""Finds what the owner of a swarm is to be told at once. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...protocol.ids import ModelId, PeerId
from .state import Event, EventKind, Health, SwarmState, WatchedModel

_OF_CANARIES = (EventKind.CANARY_FAILED, EventKind.CANARY_RECOVERED, EventKind.CANARY_DIFFERS)

_MAX_TEXT_CHARACTERS = 500


@dataclass(frozen=True)
class Alert:
    """One alert; its fields are the body that a webhook gets."""

    at: float
    kind: str
    """model healthy, model degraded, model failing, peer lost, or that of a canary's event."""
    model_id: ModelId
    model: str
    """What peers call it; may be empty."""
    peer_id: PeerId
    """Empty where none is meant."""
    text: str
    """One sentence; peers may have chosen some of the words."""


HealthOf = Mapping[ModelId, Health]


def find_alerts(
    known: HealthOf, state: SwarmState, events: Sequence[Event], now: float
) -> tuple[HealthOf, list[Alert]]:
    """Return the health of models as told, and alerts of what is new.

    What is not known is no news: a silent directory changes nothing. A model that is well at first
    is no news either.
    """
    told, alerts = dict[ModelId, Health](), list[Alert]()
    for model_id, model in state.models.items():
        before = known.get(model_id)
        told[model_id] = health = model.health
        if state.error or health is Health.UNKNOWN:
            if before is None:
                del told[model_id]
            else:
                told[model_id] = before
        elif health is not (Health.HEALTHY if before is None else before):
            text = _describe_health(model)
            kind = f"model {health}"
            alerts.append(Alert(now, kind, model_id, model.name, PeerId(""), text))
    alerts += (_describe(event, state) for event in events if _is_alert(event, state))
    return told, alerts


def _is_alert(event: Event, state: SwarmState) -> bool:
    if event.kind in _OF_CANARIES:
        return True
    model = state.models.get(event.model_id)
    if event.kind is not EventKind.LOST or model is None:
        return False
    return 0 in model.depths[event.span.start : event.span.stop]


def _describe(event: Event, state: SwarmState) -> Alert:
    model = state.models.get(event.model_id)
    name = "" if model is None else model.name
    if event.kind is EventKind.LOST:
        kind = "peer lost"
        text = f"The peer …{event.peer_id[-8:]} is lost, the only one at some of its blocks "
        text += f"{event.span}. {event.detail}"
    else:
        kind, text = str(event.kind), f"{event.kind}: {event.detail}".rstrip(": ")
    text = text.strip()[:_MAX_TEXT_CHARACTERS]
    return Alert(event.at, kind, event.model_id, name, event.peer_id, text)


def _describe_health(model: WatchedModel) -> str:
    """Return the health of a model in a sentence."""
    name = model.name or model.model_id[:8]
    if model.health is Health.HEALTHY:
        return f"{name} is healthy again: every block has two replicas or more."
    depth, words = (0, "have no peer") if model.health is Health.FAILING else (1, "have one peer")
    blocks = ", ".join(map(str, model.find_spans(depth)))
    return f"{name} is {model.health}: blocks {blocks} {words}."[:_MAX_TEXT_CHARACTERS]
