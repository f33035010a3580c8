"""Turns a description into the texts of the page: the template shows them first, and page.js keeps
them up to date.

Times are wall seconds; the page says how long ago they were.
"""

from __future__ import annotations

from typing import Any

from ....protocol.ids import ModelId
from ..description import CanaryPanel, Description, EventRow, ModelPanel, PeerRow

COLUMNS = (
    ("peer", "Peer"),
    ("span", "Blocks"),
    ("state", "State"),
    ("since", "Since"),
    ("rtt", "Last probe"),
    ("queue", "Queue"),
    ("decode", "Decode steps/s"),
    ("prefill", "Prefill tokens/s"),
    ("sessions", "Sessions"),
    ("kv", "Free KV tokens"),
    ("reach", "Reached"),
    ("weights", "Weights"),
    ("device", "Device"),
    ("software", "Version"),
)
"""Names and headings of the columns of a model's peers."""

_MAX_PEERS = 1000
"""Rows of one table; a larger one is no use to people. `/state.json` has all."""

_ENDING_CHARACTERS = 8
_PROBE_AGE_SECONDS = 10


def make_view(described: Description) -> dict[str, Any]:
    """Return the texts of the page."""
    return {
        "health": described.health,
        "sentence": described.sentence,
        "error": described.error,
        "warnings": list(described.warnings),
        "taken_at": described.taken_at,
        "read_at": _find_time(described, described.age_seconds),
        "models": [
            # By their ids: names change, and what stands on a page does not move.
            _make_model(model, described)
            for model in sorted(described.models, key=lambda model: model.model_id)
        ],
        "events": [
            {
                "at": event.at,
                "kind": event.kind,
                "text": _describe_event(event, described),
            }
            for event in described.events
        ],
        "canaries": [_make_canary(canary, described) for canary in described.canaries],
    }


def _describe_event(event: EventRow, described: Description) -> str:
    """Return who it was and what, behind the kind."""
    name = name_of(described, event.model_id)
    if not event.peer_id:
        return f"{name} {event.detail}".strip()
    return f"{_shorten(event.peer_id)} at blocks {event.span} of {name} {event.detail}"


def _make_canary(canary: CanaryPanel, described: Description) -> dict[str, Any]:
    facts = [
        f"First token after {_show_ms(canary.first_token_seconds)}"
        if canary.first_token_seconds is not None
        else "",
        f"{canary.tokens_per_second:.3g} tokens/s" if canary.tokens_per_second else "",
        {None: "", True: "same text as the first run", False: "text differs from the first run"}[
            canary.is_same
        ],
    ]
    texts = list(canary.failovers)
    if canary.is_same is False:
        texts += [f"Text: {canary.text!r}", f"First text: {canary.first_text!r}"]
    return {
        "name": canary.name,
        "health": canary.health,
        "at": _find_time(described, canary.age_seconds),
        "summary": canary.error or ", ".join(filter(None, facts)) or "not run yet",
        "texts": texts,
        "hops": [
            [
                _shorten(hop.peer_id),
                hop.span,
                _show_ms(hop.queue_seconds),
                _show_ms(hop.compute_seconds),
                _show_ms(hop.network_seconds),
            ]
            for hop in canary.hops
        ],
    }


def name_of(described: Description, model_id: ModelId) -> str:
    """Return how people call a model."""
    names = {model.model_id: model.name for model in described.models}
    return names.get(model_id) or model_id[:8]


def _make_model(model: ModelPanel, described: Description) -> dict[str, Any]:
    return {
        "id": model.model_id,
        "name": model.name or model.model_id[:8],
        "health": model.health,
        "num_blocks": model.num_blocks,
        "progress": model.progress,
        "num_serving": model.num_serving,
        "read_at": _find_time(described, model.age_seconds),
        "findings": list(_list_findings(model)),
        "peers": [_make_row(peer, described) for peer in model.peers[:_MAX_PEERS]],
        "num_hidden": max(0, len(model.peers) - _MAX_PEERS),
    }


def _list_findings(model: ModelPanel) -> list[str]:
    """Return what is wrong with a model, in sentences."""
    findings = list[str]()
    if model.error:
        findings.append(f"The directory does not tell its peers: {model.error}")
    if model.missing:
        findings.append(f"No peer serves blocks {', '.join(model.missing)}.")
    if model.single:
        findings.append(f"Blocks {', '.join(model.single)} have a single replica.")
    if model.num_unconfirmed:
        peers = "peer is" if model.num_unconfirmed == 1 else "peers are"
        findings.append(
            f"{model.num_unconfirmed} {peers} announced, not confirmed by an answer, and not "
            "counted."
        )
    return findings


def _make_row(peer: PeerRow, described: Description) -> dict[str, Any]:
    """Return the cells of a peer; `since` is a time, all others are texts."""
    return {
        "id": peer.peer_id,
        "is_there": peer.state not in ("lost", "left"),
        "since": peer.since,
        "fault": peer.fault,
        "peer": f"{peer.name} {_shorten(peer.peer_id)}".lstrip(),
        "span": peer.span,
        "state": peer.state,
        "rtt": _show_probe(peer),
        "queue": _show_ms(peer.queue_seconds),
        "decode": _show_number(peer.loaded_decode_steps_per_second or peer.decode_steps_per_second),
        "prefill": _show_number(peer.prefill_tokens_per_second),
        "sessions": f"{peer.num_sessions}",
        "kv": f"{peer.free_kv_tokens:,}",
        "reach": peer.reachability,
        "weights": peer.weights,
        "device": peer.device or "-",
        "software": peer.software,
    }


def _find_time(described: Description, age_seconds: float | None) -> float | None:
    return None if age_seconds is None else described.taken_at - age_seconds


def _show_probe(peer: PeerRow) -> str:
    """Return the round trip with its age, or why there is none."""
    if peer.probed_seconds_ago is None:
        return "-"
    found = peer.fault.partition(":")[0] if peer.fault else _show_ms(peer.rtt_seconds or 0.0)
    # In steps: a text that changes each second for each peer costs a browser the most.
    age_seconds = int(peer.probed_seconds_ago // _PROBE_AGE_SECONDS) * _PROBE_AGE_SECONDS
    age = f"{age_seconds} s ago" if age_seconds else f"< {_PROBE_AGE_SECONDS} s ago"
    return f"{found}, {age}"


def _show_ms(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms" if seconds < 1 else f"{seconds:.1f} s"


def _show_number(number: float | None) -> str:
    return "-" if number is None else f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _shorten(peer_id: str) -> str:
    return f"…{peer_id[-_ENDING_CHARACTERS:]}"
