"""Routes and failovers in words for people, and as plain JSON types for programs."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ...client.routing.route import Failover, Hop
    from ...client.trace.trace import SessionFailover


def describe_route(route: "Sequence[Hop]") -> str:
    """Return a route in words, such as `…3kQpZa[0:4] → …8dFsWx[4:8]`."""
    return " → ".join(f"{tail_of(hop.peer.peer_id)}[{hop.span}]" for hop in route)


def describe_failover(failover: "SessionFailover") -> str:
    """Return a failover in words: the lost hop, its replacements, and if the text may differ."""
    sentence = (
        f"failover at token {failover.position}: {_describe_loss(failover)}, "
        f"{_describe_end(failover)} after {failover.seconds:.2f} s"
    )
    if failover.changed_weights is None:
        return sentence
    before, after = failover.lost.peer.weights, failover.changed_weights
    return f"{sentence}, with {after} weights instead of {before}: the text may differ"


def describe_pass_failover(update: int, failover: "Failover") -> str:
    """Return a failover in an update of a fine-tuning run in words."""
    return f"failover at update {update}: {_describe_loss(failover)}, {_describe_end(failover)}"


def _describe_loss(failover: "Failover") -> str:
    lost = failover.lost
    return f"{tail_of(lost.peer.peer_id)}[{lost.span}] {failover.what_happened}"


def _describe_end(failover: "Failover") -> str:
    """Return who goes on. That may be the lost peer itself, where it has room again or is back."""
    lost = failover.lost.peer.peer_id
    if [hop.peer.peer_id for hop in failover.replacements] == [lost]:
        return "and went on itself"
    return f"{describe_route(failover.replacements) or 'several others'} took over"


def tail_of(peer_id: str) -> str:
    """Return the end of a peer id; the beginning is the same for all peers."""
    return f"…{peer_id[-6:]}"


def route_facts(route: "Sequence[Hop]") -> list[dict[str, str]]:
    """Return a route as plain JSON types."""
    return [_hop_facts(hop) for hop in route]


def pass_failover_facts(failover: "Failover") -> dict[str, Any]:
    """Return a failover of a fine-tuning run as plain JSON types."""
    return {
        **_hop_facts(failover.lost),
        "reason": failover.reason,
        "replaced_by": route_facts(failover.replacements),
    }


def failover_facts(failover: "SessionFailover") -> dict[str, Any]:
    """Return a failover as plain JSON types."""
    return {
        **pass_failover_facts(failover),
        "position": failover.position,
        "seconds": round(failover.seconds, 4),
        "replayed_tokens": failover.num_replayed_tokens,
        "changed_weights": failover.changed_weights,
    }


def _hop_facts(hop: "Hop") -> dict[str, str]:
    return {"peer_id": hop.peer.peer_id, "span": str(hop.span)}
