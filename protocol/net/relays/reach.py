"""From where others can dial a peer, by the answers of those who were asked to try. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from ...endpoints import find_local_network, is_loopback
from ..addresses import DialBackAnswer
from ..tcp.dial_rules import can_be_dialled


class Scope(StrEnum):
    """Who can dial a peer."""

    INTERNET = "internet"
    NETWORK = "network"
    """Those in its local network; nobody outside was asked."""
    INSIDE = "inside"
    """Those in its local network, and nobody outside."""
    NOBODY = "nobody"
    UNKNOWN = "unknown"
    """Nobody on another machine has tried, as for the first peer of a swarm."""


@dataclass(frozen=True)
class Reach:
    """From where a peer can be dialled, and the address at which that was tried."""

    scope: Scope
    seen_host: str = ""
    """The address that most of those see who decided; empty if nobody did."""

    @property
    def needs_relay(self) -> bool:
        """Whether there are others who cannot dial the peer."""
        return self.scope in (Scope.INSIDE, Scope.NOBODY)

    def list_hosts(self, own_hosts: Sequence[str]) -> list[str]:
        """Return the hosts to announce, best first: also the one of a NAT that lets the port in."""
        is_reached = self.scope in (Scope.INTERNET, Scope.NETWORK)
        best = [self.seen_host] if is_reached else []
        return list(dict.fromkeys([*best, *own_hosts]))


def judge_reach(own_hosts: Sequence[str], answers: Sequence[DialBackAnswer]) -> Reach:
    """Return what answers come to; half of those outside decide, else half of those inside.

    >>> judge_reach(["10.0.0.2"], [DialBackAnswer(True, "198.51.100.7")])
    Reach(scope=<Scope.INTERNET: 'internet'>, seen_host='198.51.100.7')
    >>> judge_reach(["10.0.0.2"], [DialBackAnswer(True, "10.0.0.2")]).scope
    <Scope.NETWORK: 'network'>
    """
    told = [a for a in answers if a.is_reached is not None and can_be_dialled(a.seen_host)]
    # Who sees us at loopback is on our machine, and says nothing about others.
    told = [a for a in told if a.seen_host in own_hosts or not is_loopback(a.seen_host)]
    outside = [answer for answer in told if find_local_network(answer.seen_host) is None]
    inside = [answer for answer in told if answer not in outside]
    if _most_reach(outside):
        return Reach(Scope.INTERNET, _find_seen(outside))
    if _most_reach(inside):
        return Reach(Scope.INSIDE if outside else Scope.NETWORK, _find_seen(inside))
    return Reach(Scope.NOBODY, _find_seen(told)) if told else Reach(Scope.UNKNOWN)


def _most_reach(answers: Sequence[DialBackAnswer]) -> bool:
    return bool(answers) and 2 * sum(bool(a.is_reached) for a in answers) >= len(answers)


def _find_seen(answers: Sequence[DialBackAnswer]) -> str:
    """Return the address that most of those see who reached us, else most of all."""
    reaching = [answer for answer in answers if answer.is_reached] or answers
    return Counter(answer.seen_host for answer in reaching).most_common(1)[0][0]
