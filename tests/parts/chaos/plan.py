"""What is done to a swarm, and when: a pure function of a seed.

A plan is made before anything runs, on what every action should lead to. So it can be printed, and
the same seed does the same again. It keeps a floor: each block stays on one peer at least that
nothing is done to.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from random import Random

from shoal.protocol.spans import Span, find_gaps

CLIENTS = "clients"
"""The other end of a link that leads to all clients, where others have the name of a peer."""

JOIN_SECONDS = 8.0
"""How long after its start a peer is counted on; whoever carries out the plan waits for it."""


class Kind(StrEnum):
    """What can be done."""

    KILL = "kill"
    """SIGKILL."""
    PAUSE = "pause"
    """SIGSTOP: connections stay, and nobody answers."""
    RESUME = "resume"
    """SIGCONT, after a pause."""
    DRAIN = "drain"
    """SIGTERM: the peer lets its sessions go on for a while, and leaves."""
    CUT = "cut"
    """Nothing passes between two ends any more, in either direction; neither is told."""
    HEAL = "heal"
    """Everything passes again, after a cut."""
    RESET = "reset"
    """Every open connection between two ends breaks; new ones work."""
    JOIN = "join"
    """A new peer starts, sometimes with the identity of one that is gone."""
    ONLINE = "online"
    """From here on the plan counts on a peer that has joined: nothing goes on before it serves."""


CHOSEN = (
    Kind.KILL, Kind.KILL, Kind.KILL, Kind.PAUSE, Kind.PAUSE, Kind.DRAIN, Kind.DRAIN,
    Kind.CUT, Kind.CUT, Kind.RESET, Kind.JOIN, Kind.JOIN, Kind.JOIN, Kind.JOIN, Kind.JOIN,
)  # fmt: skip
"""A deck to draw from, shuffled whenever it is used up: so no kind is left out for long. The others
follow by themselves."""

_GAP_SECONDS = (0.5, 2.5)
_TROUBLE_SECONDS = (0.5, 8.0)
"""How long a pause or a cut lasts: from what nobody notices to longer than announcements live."""

_OLD_IDENTITY_SHARE = 0.4


@dataclass(frozen=True)
class Action:
    """One line of a plan."""

    at: float
    """Seconds after the beginning; later, when the plan had to wait for a peer."""
    kind: Kind
    target: str
    """Name of a peer."""
    other: str = ""
    """The other end of a link; for one that joins, a peer that stays until it is online."""
    span: Span | None = None
    """What one that joins serves."""
    identity_of: str = ""
    """The peer that is gone and whose identity one that joins takes over; or its own name."""
    begun_at: float | None = None
    """When that began which this ends, such as a pause; None for what ends nothing."""

    def __str__(self) -> str:
        text = f"{self.at:6.1f} s  {self.kind:<7}{self.target}"
        if self.kind is Kind.JOIN:
            text += f" with blocks {self.span}"
        if self.identity_of not in ("", self.target):
            text += f" as {self.identity_of}"
        word = "through" if self.kind is Kind.JOIN else "from"
        return f"{text} {word} {self.other}" if self.other else text


def name_peer(number: int) -> str:
    """Return the name of the peer that was started as this one, from 0.

    >>> name_peer(0), name_peer(12)
    ('P1', 'P13')
    """
    return f"P{number + 1}"


def plan_chaos(seed: int, seconds: float, spans: Sequence[Span]) -> list[Action]:
    """Return what is done to a swarm whose first peers serve these spans.

    Whatever was cut or paused is as before in the end, and who joined is online.
    """
    return list(_Planner(seed, spans).plan(seconds))


class _Planner:
    """The swarm as it should be at a moment of the plan."""

    def __init__(self, seed: int, spans: Sequence[Span]) -> None:
        self._rng = Random(seed)
        self._wanted = tuple(spans)
        self._running = {name_peer(n): span for n, span in enumerate(spans)}
        self._sound = set(self._running)
        self._identities = {name: name for name in self._running}
        self._num_started = len(spans)
        self._deck: list[Kind] = []
        self._endings: list[tuple[float, int, Action]] = []
        self._num_endings = 0
        self._sponsors: dict[str, str] = {}
        self._cut_links: set[frozenset[str]] = set()

    def plan(self, seconds: float) -> Iterator[Action]:
        at = 0.0
        while (at := at + self._rng.uniform(*_GAP_SECONDS)) < seconds:
            yield from self._end_what_is_over(at)
            yield from self._draw(at)
        yield from self._end_what_is_over(float("inf"))

    def _end_what_is_over(self, now: float) -> Iterator[Action]:
        while self._endings and self._endings[0][0] <= now:
            *_, action = heapq.heappop(self._endings)
            if action.kind is Kind.ONLINE:
                del self._sponsors[action.target]
            if action.kind is Kind.HEAL:
                self._cut_links.discard(frozenset((action.target, action.other)))
            if action.other in ("", CLIENTS):
                self._sound.add(action.target)
            yield action

    def _end_later(
        self, begun_at: float, at: float, kind: Kind, target: str, other: str = ""
    ) -> None:
        action = Action(at, kind, target, other, begun_at=begun_at)
        self._num_endings += 1  # of two at the same moment, the first to be foreseen comes first
        heapq.heappush(self._endings, (at, self._num_endings, action))

    def _draw(self, at: float) -> Iterator[Action]:
        """Do the first thing of the deck that is possible now, if any is."""
        if not self._deck:
            self._deck = self._rng.sample(CHOSEN, len(CHOSEN))
        for kind in self._deck:
            action = self._choose(kind, at)
            if action is not None:
                self._deck.remove(kind)
                yield action
                return
        self._deck.clear()

    def _choose(self, kind: Kind, at: float) -> Action | None:
        match kind:
            case Kind.PAUSE:
                return self._pause(at)
            case Kind.CUT:
                return self._cut_from_clients(at) if self._rng.random() < 0.5 else self._cut(at)
            case Kind.RESET:
                return self._reset(at)
            case Kind.JOIN:
                return self._join(at)
            case _:
                return self._end(at, kind)

    def _end(self, at: float, kind: Kind) -> Action | None:
        target = self._choose_victim()
        if target is None:
            return None
        del self._running[target]
        return Action(at, kind, target)

    def _pause(self, at: float) -> Action | None:
        target = self._choose_victim()
        if target is None:
            return None
        self._end_later(at, self._choose_end(at), Kind.RESUME, target)
        return Action(at, Kind.PAUSE, target)

    def _cut_from_clients(self, at: float) -> Action | None:
        target = self._choose_victim()
        if target is None:
            return None
        self._end_later(at, self._choose_end(at), Kind.HEAL, target, CLIENTS)
        return Action(at, Kind.CUT, target, CLIENTS)

    def _cut(self, at: float) -> Action | None:
        """Cut two peers off from each other; both stay sound, as clients can stand in between."""
        target, other = self._choose_pair()
        if target is None or frozenset((target, other)) in self._cut_links:
            return None
        self._cut_links.add(frozenset((target, other)))
        self._end_later(at, self._choose_end(at), Kind.HEAL, target, other)
        return Action(at, Kind.CUT, target, other)

    def _reset(self, at: float) -> Action | None:
        target, other = self._choose_pair()
        other = self._rng.choice((CLIENTS, other))
        return Action(at, Kind.RESET, target, other) if target else None

    def _join(self, at: float) -> Action | None:
        """Start a peer for what is missing most, or one more than at the beginning."""
        if len(self._running) > len(self._wanted):
            return None
        missing = Counter(self._wanted) - Counter(self._running.values())
        span = self._rng.choice(sorted(missing.elements()) or self._wanted)
        name = name_peer(self._num_started)
        used = {self._identities[name] for name in self._running}
        free = sorted(set(self._identities.values()) - used)
        is_known = bool(free) and self._rng.random() < _OLD_IDENTITY_SHARE
        identity_of = self._rng.choice(free) if is_known else name
        self._num_started += 1
        self._running[name], self._identities[name] = span, identity_of
        self._sponsors[name] = self._choose_sponsor()
        self._end_later(at, at + JOIN_SECONDS, Kind.ONLINE, name)
        return Action(at, Kind.JOIN, name, self._sponsors[name], span, identity_of)

    def _choose_sponsor(self) -> str:
        """Return a sound peer, to be spared until whoever joins through it is online.

        One that is spared already, if any: the others are there to be lost.
        """
        spared = self._sound.intersection(self._sponsors.values())
        return self._rng.choice(sorted(spared or self._sound))

    def _choose_end(self, at: float) -> float:
        return at + self._rng.uniform(*_TROUBLE_SECONDS)

    def _choose_victim(self) -> str | None:
        """Return a sound peer that the others can do without, sound no more; None without any."""
        free = sorted(self._sound.difference(self._sponsors.values()))
        candidates = [name for name in free if self._can_do_without(name)]
        if not candidates:
            return None
        name = self._rng.choice(candidates)
        self._sound.remove(name)
        return name

    def _can_do_without(self, name: str) -> bool:
        span = self._running[name]
        others = [self._running[other] for other in self._sound - {name}]
        kept = [shared for other in others if (shared := span.overlap(other))]
        return not find_gaps(span.stop, [Span(0, span.start), *kept] if span.start else kept)

    def _choose_pair(self) -> tuple[str | None, str]:
        names = sorted(self._sound)
        if len(names) < 2:
            return None, ""
        target, other = self._rng.sample(names, 2)
        return target, other
