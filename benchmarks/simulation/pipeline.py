"""The parts of an update on their way through the stages of a training run, in simulated time.

The leader keeps some parts under way for each member. Which members compute a part is chosen by the
real `UpdateParts`, or by what it is compared with. Members compute one thing after the other. Times
are those of a part at a stage of a usual member, of which the forward pass takes a third.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from statistics import fmean
from typing import NamedTuple, Protocol

from shoal.protocol.ids import MemberId
from shoal.protocol.runs.update_parts import TripTimes, UpdateParts

_FORWARD = 1 / 3
_VARIATION = 0.2
"""Of the speeds of members, and of the times of passes, to both sides."""

_SLOW = 3.0
_NUM_DRAWS = 10
"""How many sets of members the mean is taken over."""

_NUM_UPDATES = 4
"""Of each set; the first one does not count, as nothing is measured before."""


@dataclass(frozen=True)
class Pipeline:
    """What a run consists of."""

    num_replicas: int = 2
    """Members of each stage."""
    num_stages: int = 4
    num_parts: int = 64
    per_member: int | None = 2
    """Parts under way; None: as many as `UpdateParts` chooses."""
    link_delay: float = 0.0
    """One way, in times of a part."""
    has_slow_member: bool = False
    """Whether one member of the second stage takes three times as long as usual."""
    has_backward_first: bool = False
    """Whether members compute backward passes first, in place of what has come first."""

    def draw_seconds(self, rng: random.Random) -> list[dict[MemberId, float]]:
        """Return how long the members of each stage take for a part."""
        replicas = range(self.num_replicas)
        stages = [
            {MemberId(f"{stage}/{replica}"): _vary(rng) for replica in replicas}
            for stage in range(self.num_stages)
        ]
        if self.has_slow_member:
            stages[1][MemberId("1/0")] = _SLOW
        return stages


def _vary(rng: random.Random) -> float:
    return rng.uniform(1 - _VARIATION, 1 + _VARIATION)


class Wiring(Protocol):
    """Chooses the members that compute parts."""

    def __init__(self, pipeline: Pipeline, stages: Sequence[Mapping[MemberId, float]]) -> None: ...

    def begin_update(self) -> None:
        """Begin with the parts of another update."""
        ...

    def choose_route(self, rng: random.Random) -> Sequence[MemberId]:
        """Return a member of each stage for the next part."""
        ...

    def note(self, member: MemberId, seconds: float) -> None:
        """Note how long a member took for a part, by what a pass of it took."""
        ...


class FirstDone(Wiring):
    """Ours: the member that has then computed all of its parts first, by its median seconds."""

    def __init__(self, pipeline: Pipeline, stages: Sequence[Mapping[MemberId, float]]) -> None:
        self._num_parts = pipeline.num_parts
        self._stages = [list(stage) for stage in stages]
        self._seconds = {member: one for stage in stages for member, one in stage.items()}
        self.begin_update()

    def begin_update(self) -> None:
        self._parts = UpdateParts(self._num_parts, self._stages, (), self._seconds)

    def choose_route(self, rng: random.Random) -> Sequence[MemberId]:
        order = self._parts.choose_next(rng)
        assert order is not None
        return order.route

    def note(self, member: MemberId, seconds: float) -> None:
        pass


class RoundRobin(Wiring):
    """SWARM's interleaved weighted round robin: the member whose turns add up to the least time.

    A turn takes what the last ones have taken, with the wait in the queue and the way there and
    back. SWARM has one such scheduler for each trainer, which does not know of the others.
    """

    _NEWEST = 0.1
    """How much the newest time counts."""

    def __init__(self, pipeline: Pipeline, stages: Sequence[Mapping[MemberId, float]]) -> None:
        self._way = 2 * pipeline.link_delay
        self._usual = {member: 1.0 for stage in stages for member in stage}
        self._turns = [dict.fromkeys(stage, 0.0) for stage in stages]

    def begin_update(self) -> None:
        pass

    def choose_route(self, rng: random.Random) -> Sequence[MemberId]:
        route: list[MemberId] = []
        for turns in self._turns:
            route.append(min(turns, key=lambda member: (turns[member], rng.random())))
            turns[route[-1]] += self._usual[route[-1]]
        return route

    def note(self, member: MemberId, seconds: float) -> None:
        self._usual[member] += self._NEWEST * (self._way + seconds - self._usual[member])


class Drawn(Wiring):
    """Any member of a stage, whichever is drawn."""

    def __init__(self, pipeline: Pipeline, stages: Sequence[Mapping[MemberId, float]]) -> None:
        self._stages = [list(stage) for stage in stages]

    def begin_update(self) -> None:
        pass

    def choose_route(self, rng: random.Random) -> Sequence[MemberId]:
        return [rng.choice(stage) for stage in self._stages]

    def note(self, member: MemberId, seconds: float) -> None:
        pass


class _Part(NamedTuple):
    """A part on its way."""

    ordered_at: float
    first: MemberId
    passes: Sequence[tuple[MemberId, float]]
    """What is left: members, and which share of a part they compute."""


class _Update:
    """An update that is computed."""

    def __init__(
        self,
        pipeline: Pipeline,
        stages: Sequence[Mapping[MemberId, float]],
        wiring: Wiring,
        trips: TripTimes,
        rng: random.Random,
    ) -> None:
        self._pipeline = pipeline
        self._seconds = {member: one for stage in stages for member, one in stage.items()}
        self._parts = UpdateParts(0, [list(stage) for stage in stages], (), self._seconds)
        self._wiring = wiring
        self._trips = trips
        self._number = 0
        self._rng = rng
        self._num_left = pipeline.num_parts
        self._num_under_way = 0
        self._computing = set[MemberId]()
        self._waiting: dict[MemberId, list[tuple[bool, int, float, _Part]]]
        self._waiting = {member: [] for member in self._seconds}
        """What has come to members, what they compute next first, and when it has come."""
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._now = 0.0

    def run(self, number: int) -> float:
        """Return how long it takes; `number` is that of the update."""
        self._number = number
        self._order_parts()
        while self._events:
            self._now, _, act = heappop(self._events)
            act()
        return self._now

    def _order_parts(self) -> None:
        """Order parts until as many are under way as may be."""
        while self._num_left and self._num_under_way < self._choose_num_under_way():
            self._num_left -= 1
            self._num_under_way += 1
            *others, last = route = self._wiring.choose_route(self._rng)
            forward = [(member, _FORWARD) for member in others]
            backward = [(member, 1 - _FORWARD) for member in reversed(others)]
            self._send(_Part(self._now, route[0], [*forward, (last, 1.0), *backward]))

    def _choose_num_under_way(self) -> int:
        per_member = self._pipeline.per_member
        if per_member is None:
            return self._parts.choose_num_under_way(self._trips.usual_seconds)
        return per_member * len(self._seconds)

    def _send(self, part: _Part) -> None:
        """Send a part to where it is computed next; behind the last pass, the leader is told."""
        if part.passes:
            self._act_in(self._pipeline.link_delay, lambda: self._arrive(part))
        else:
            self._act_in(self._pipeline.link_delay, lambda: self._end_order(part))

    def _end_order(self, part: _Part) -> None:
        self._trips.note(self._number, part.first, self._now - part.ordered_at)
        self._num_under_way -= 1
        self._order_parts()

    def _act_in(self, seconds: float, act: Callable[[], None]) -> None:
        heappush(self._events, (self._now + seconds, next(self._numbers), act))

    def _arrive(self, part: _Part) -> None:
        member, share = part.passes[0]
        is_later = self._pipeline.has_backward_first and share == _FORWARD
        heappush(self._waiting[member], (is_later, next(self._numbers), self._now, part))
        self._compute(member)

    def _compute(self, member: MemberId) -> None:
        """Have a member compute what is next, if it computes nothing."""
        if member in self._computing or not self._waiting[member]:
            return
        self._computing.add(member)
        _, _, came_at, part = heappop(self._waiting[member])
        _, share = part.passes[0]
        seconds = share * self._seconds[member] * _vary(self._rng)
        self._act_in(seconds, lambda: self._end_pass(came_at, part))

    def _end_pass(self, came_at: float, part: _Part) -> None:
        (member, share), *rest = part.passes
        self._wiring.note(member, (self._now - came_at) / share)
        self._send(part._replace(passes=rest))
        self._computing.remove(member)
        self._compute(member)


def measure_pipeline(pipeline: Pipeline, wiring: type[Wiring], seed: int) -> float:
    """Return how fast updates are computed, as a share of what the slowest stage could do if its
    members always computed.
    """
    shares: list[float] = []
    for draw in range(_NUM_DRAWS):
        rng = random.Random(f"{seed}/{draw}")
        stages = pipeline.draw_seconds(rng)
        least = max(pipeline.num_parts / sum(1 / one for one in stage.values()) for stage in stages)
        chosen, trips = wiring(pipeline, stages), TripTimes()
        for update in range(_NUM_UPDATES):
            chosen.begin_update()
            taken = _Update(pipeline, stages, chosen, trips, rng).run(update)
            if update:
                shares.append(least / taken)
    return fmean(shares)


def compare_wirings(seed: int) -> dict[str, dict[str, float]]:
    """Return the shares of each way to choose members, by the members of a stage."""
    settings = {
        "1 member per stage": Pipeline(num_replicas=1),
        "2 members per stage": Pipeline(),
        "3 members per stage": Pipeline(num_replicas=3),
        "2, one of all is slow": Pipeline(has_slow_member=True),
        "3, one of all is slow": Pipeline(num_replicas=3, has_slow_member=True),
    }
    return {
        name: {
            "first done": measure_pipeline(setting, FirstDone, seed),
            "backward 1st": measure_pipeline(
                replace(setting, has_backward_first=True), FirstDone, seed
            ),
            "round robin": measure_pipeline(setting, RoundRobin, seed),
            "drawn": measure_pipeline(setting, Drawn, seed),
        }
        for name, setting in settings.items()
    }


def compare_delays(seed: int) -> dict[str, dict[str, float]]:
    """Return the shares with as many parts under way for each member, by the delays of links."""
    nums = {"1 per member": 1, "2 per member": 2, "3 per member": 3, "as chosen": None}
    return {
        f"a link takes {delay:g}": {
            name: measure_pipeline(
                replace(Pipeline(), link_delay=delay, per_member=per_member), FirstDone, seed
            )
            for name, per_member in nums.items()
        }
        for delay in (0.0, 0.1, 0.25, 0.5, 1.0, 2.0)
    }
