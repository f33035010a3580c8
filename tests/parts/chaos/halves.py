"""Half of the peers of a block killed at once, every minute: the other way to plan a chaos."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random

from chaos.plan import JOIN_SECONDS, Action, Kind, name_peer

from shoal.protocol.spans import Span

PERIOD_SECONDS = 60.0

_FIRST_SECONDS = 5.0
_REST_SECONDS = 10.0
"""How long the swarm has to do with the other half before new peers start."""


def plan_halves(seed: int, seconds: float, spans: Sequence[Span]) -> list[Action]:
    """Return the kills of a swarm whose first peers serve these spans, and what replaces the dead.

    Of the peers of a block drawn by lot, half die, rounded down, so that one at least stays.
    """
    return list(_plan(Random(seed), seconds, spans))


def _plan(rng: Random, seconds: float, spans: Sequence[Span]) -> Iterator[Action]:
    running = {name_peer(number): span for number, span in enumerate(spans)}
    num_started = len(spans)
    num_blocks = max(span.stop for span in spans)
    at = _FIRST_SECONDS
    while at < seconds:
        block = rng.randrange(num_blocks)
        hosts = [name for name, span in running.items() if block in span]
        victims = rng.sample(hosts, len(hosts) // 2)
        lost = [running.pop(name) for name in victims]
        yield from (Action(at, Kind.KILL, name) for name in victims)
        joined_at = at + _REST_SECONDS
        names = [name_peer(num_started + number) for number in range(len(lost))]
        sponsor = rng.choice(sorted(running))
        for name, span in zip(names, lost, strict=True):
            yield Action(joined_at, Kind.JOIN, name, sponsor, span, name, begun_at=at)
        for name in names:
            online_at = joined_at + JOIN_SECONDS
            yield Action(online_at, Kind.ONLINE, name, begun_at=at)
        running.update(zip(names, lost, strict=True))
        num_started += len(lost)
        at += PERIOD_SECONDS
