"""Which span of blocks a peer should serve: a pure decision over a swarm view.

First every block gets two replicas, then the weakest blocks get more steps per second, then spans
join into few hops. All peers decide by themselves and by the same measure: what the swarm would
lose without the peer at a place. Each move makes the swarm better by that measure, so moves end.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import numpy as np

from ...protocol.ids import PeerId
from ...protocol.spans import Span
from .supply import LEAST_SPEED, MIN_REPLICAS, BlockRoom, Column, Supply, compute_prefix_sums

LOOKS_PER_PERIOD = 2
"""How often a peer decides in one announcement period."""

INTENT_PERIODS = 0.2
"""How long an intent is announced before it is looked at again and carried out: a replicated
directory shows it to everybody within a few seconds."""

MAX_INTENTS = 8
"""How often a newcomer gives way to others. A peer that always claims the same place would else
keep it out for ever, and a crowd of newcomers all of its members."""

MIN_RESIDENCY_SECONDS = 600.0
"""How long a peer stays at least, unless there is a gap."""

_RESIDENCY_AFTER_MOVE_SECONDS = 3600.0
"""The same for a peer that has moved before: as long as a move is expected to be of use. Or else
some would move back because others come and go."""

_HYSTERESIS = 1.0
"""How much more a peer must be worth elsewhere. Worth falls with the ninth power of the speed that
is there without it, so twice as much is where blocks are about 7 % slower."""

_PATIENCE = 50.0
"""The same for a newcomer whose intent is out, which is where others have a half more speed: in a
crowd of newcomers everybody's place gets worse while they wait, and none would ever begin."""

_STEEPNESS = 8
"""How much more a step per second is worth at weak blocks than at strong ones: the loss of having
c times less is c to this power. High enough that the weakest block decides."""

_NEXT_TO_NOTHING = 0.05
"""Of the even share of steps per second; keeps the loss finite where peers are very slow."""

_ALIKE = 0.97
"""Places worth at least this part of the best one differ only in hops."""

_HORIZON_SECONDS = 3600.0
"""How long a move is expected to be of use; loading takes its part of it."""

_MOVERS_PER_LOOK = 4
"""How many peers of a swarm consider a move for speed at a time, on average; few of them want to.
So 1,000 peers make about one move per peer and hour at most."""

_MOVERS_PER_GAP = 8
"""How many peers consider closing a gap. The first announcement holds back all later ones."""

_RELUCTANCE = 16
"""How much less likely somebody considers it who is missed: there may be peers that nobody misses
and that were told to stay where they are."""


@dataclass(frozen=True)
class Intent:
    """A span that a peer has announced as JOINING and not begun to load."""

    span: Span
    planned_on: Supply
    """The supply on which the decision was based."""


@dataclass(frozen=True)
class Candidate:
    """The peer that decides: what it can do, and where it is."""

    peer_id: PeerId
    room: BlockRoom
    """Which spans its memory holds."""
    blocks_per_second: float
    """Measured steps of one token through one block of average cost."""
    load_seconds: float
    """Seconds that loading a block takes."""
    span: Span | None = None
    """The span that it serves; None before its first one."""
    residency_seconds: float = 0.0
    """For how long."""
    has_moved: bool = False
    """Whether it served another span before."""
    avoided: frozenset[int] = frozenset()
    """Blocks that it could not load lately."""
    intent: Intent | None = None


@dataclass(frozen=True)
class Placement:
    """Where a peer is to be, and the reason for people to read.

    Another span than its own is announced as JOINING for a while, then loaded if the next decision
    is the same. None is for a peer without a span that cannot take one.
    """

    span: Span | None
    why: str


class _Worth(NamedTuple):
    """The worth of a peer at a span, compared from the first field on."""

    num_gaps: int
    """Blocks that nobody else serves."""
    num_thin: int
    """Blocks that too few others serve."""
    worth: float
    """Throughput that the swarm loses without the peer there."""


def decide_placement(supply: Supply, candidate: Candidate, rng: random.Random) -> Placement:
    """Return what a peer should do now, given `Supply.of_view(view)`.

    The same view, candidate and seed decide alike.
    """
    own, intent = candidate.span, candidate.intent
    if intent is None and own is not None and rng.random() >= _chance_to_consider(supply, own):
        return Placement(own, "other peers are chosen to move")
    starts, stops = _list_places(candidate, supply.num_blocks)
    if not starts.size:
        return Placement(own, "no block fits into memory, or none can be loaded")
    others = supply.without([candidate.peer_id])
    if intent is not None:
        others = _send_back_rivals(others, candidate.peer_id, intent.planned_on)
        return _confirm(_Survey(others, candidate, starts, stops), own, intent.span, rng)
    survey = _Survey(others, candidate, starts, stops)
    if own is None:
        return survey.choose(survey.find_best(rng))
    return _reconsider(survey, candidate, own, rng)


def _list_places(candidate: Candidate, num_blocks: int) -> tuple[Column, Column]:
    """Return where the spans begin and end that a peer can take.

    All are as long as its memory allows: speed is the same in sum, and hops are fewer.
    """
    starts, stops = np.arange(num_blocks), candidate.room.find_stops(num_blocks)
    # A span that ends where the span from one block before ends is a part of that one.
    stops_before = np.concatenate(([0], stops))[:-1]
    num_avoided = compute_prefix_sums(np.isin(starts, list(candidate.avoided)))
    is_place = (stops > np.maximum(starts, stops_before)) & (
        num_avoided[stops] == num_avoided[starts]
    )
    return starts[is_place], stops[is_place]


def _chance_to_consider(supply: Supply, own: Span) -> float:
    """Return how likely this peer is one of the few that think of moving.

    To close a gap, those come first whom nobody misses.
    """
    if not supply.has_gap:
        return _MOVERS_PER_LOOK / max(1, supply.num_serving)
    if (supply.num_hosts[own.start : own.stop] > MIN_REPLICAS).all():
        return _MOVERS_PER_GAP / max(1, supply.num_dispensable)
    reluctance = _RELUCTANCE if supply.num_dispensable else 1
    return _MOVERS_PER_GAP / max(1, supply.num_serving) / reluctance


def _send_back_rivals(others: Supply, peer_id: PeerId, planned_on: Supply) -> Supply:
    """Return the supply as if peers that have to give way were back where they were.

    Of intents that came up at about the same time the one with the highest peer id holds. Those
    that were known when ours was planned were taken into account.
    """
    known = planned_on.list_joining()
    rivals = [other for other in others.list_joining() if other not in known and other < peer_id]
    return others.with_earlier(rivals, planned_on)


def _confirm(survey: _Survey, own: Span | None, planned: Span, rng: random.Random) -> Placement:
    """Return whether what was announced is still right, now that others have spoken too."""
    place = survey.judge(planned)
    if own is None:
        if not _improves(place, survey.judge(survey.find_best(rng)), _PATIENCE):
            return survey.choose(planned)
        # Many have come at once and chose the same. If they did so again, it would not end.
        return survey.choose(survey.draw(rng))
    if survey.may_leave(own, planned) and _improves(survey.judge(own), place, _HYSTERESIS / 2):
        return survey.choose(planned)
    return Placement(own, f"other peers already take blocks {planned}")


def _reconsider(survey: _Survey, candidate: Candidate, own: Span, rng: random.Random) -> Placement:
    """Return whether a peer that serves should be somewhere else."""
    best = survey.find_best(rng)
    if not survey.may_leave(own, best):
        return Placement(own, f"too few other peers serve blocks {own}")
    own_place, best_place = survey.judge(own), survey.judge(best)
    is_urgent = best_place.num_gaps > own_place.num_gaps
    least_seconds = _RESIDENCY_AFTER_MOVE_SECONDS if candidate.has_moved else MIN_RESIDENCY_SECONDS
    if not is_urgent and candidate.residency_seconds < least_seconds:
        return Placement(own, "it moved here only recently")
    if not _improves(own_place, best_place, _HYSTERESIS):
        return Placement(own, f"moving away from blocks {own} would gain too little")
    return survey.choose(best)


def _improves(place: _Worth, other: _Worth, hysteresis: float) -> bool:
    """Return whether the other place is so much better that it is worth the trouble."""
    if place[:2] != other[:2]:
        return other[:2] > place[:2]
    return other.worth > (1 + hysteresis) * place.worth


class _Survey:
    """The worth of a candidate at each span, given the supply of all others."""

    def __init__(self, others: Supply, candidate: Candidate, starts: Column, stops: Column) -> None:
        """Survey the spans with these starts and stops, given what all others supply."""
        self.others = others
        self._candidate = candidate
        self._starts, self._stops = starts, stops
        self._work = compute_prefix_sums(others.work)
        # As others see it, for all must go by the same measure.
        self._speed = min(max(candidate.blocks_per_second, LEAST_SPEED), others.fastest)
        self._even = (others.total_blocks_per_second + self._speed) / others.num_blocks
        """Steps per second of every block if speed were spread evenly."""

    def may_leave(self, own: Span, span: Span) -> bool:
        """Return whether blocks have the hosts they need the moment the candidate leaves.

        That is one for each block; two where they are about to come, unless others have none at
        all.
        """
        num_online = self.others.num_online[own.start : own.stop]
        num_hosts = self.others.num_hosts[own.start : own.stop]
        is_missed = bool((num_online == 0).any())
        is_early = bool((num_online < np.minimum(num_hosts, MIN_REPLICAS)).any())
        is_urgent = self.judge(span).num_gaps > self.judge(own).num_gaps
        return not is_missed and (is_urgent or not is_early)

    def judge(self, span: Span) -> _Worth:
        """Return what the candidate is worth at a span."""
        blocks = slice(span.start, span.stop)
        worth = self._rate(np.array([span.start]), np.array([span.stop]))
        return _Worth(
            int((self.others.num_hosts[blocks] == 0).sum()),
            int((self.others.num_hosts[blocks] < MIN_REPLICAS).sum()),
            float(worth[0]),
        )

    def find_best(self, rng: random.Random) -> Span:
        """Return where the candidate is worth most; of places about alike, where hops are few."""
        starts, stops, worth = self._list_best_places()
        alike = worth >= _ALIKE * worth.max()
        places = zip(starts[alike], stops[alike], worth[alike] / worth.max(), strict=True)
        return min(
            ((Span(int(start), int(stop)), float(part)) for start, stop, part in places),
            key=lambda place: (
                *self._count_pieces(place[0]),
                self._count_hops(place[0]),
                self._count_loose_edges(place[0]),
                -round(place[1], 3),
                rng.random(),
            ),
        )[0]

    def draw(self, rng: random.Random) -> Span:
        """Return a place by chance: the more it is worth, the likelier."""
        starts, stops, worth = self._list_best_places()
        row = rng.choices(range(len(worth)), worth.tolist())[0]
        return Span(int(starts[row]), int(stops[row]))

    def _list_best_places(self) -> tuple[Column, Column, Column]:
        """Return where the spans begin and end that close the largest gap, and their worth."""
        starts, stops = self._starts, self._stops
        for num_hosts in (1, MIN_REPLICAS):
            sums = compute_prefix_sums(self.others.num_hosts < num_hosts)
            num_lacking = sums[stops] - sums[starts]
            is_best = num_lacking == num_lacking.max()
            starts, stops = starts[is_best], stops[is_best]
        # A peer so slow that nobody would notice it is worth the same everywhere.
        return starts, stops, self._rate(starts, stops).clip(min=1e-30)

    def choose(self, span: Span) -> Placement:
        """Return that the candidate is to be at a span, and why it is wanted there."""
        place, blocks = self.judge(span), slice(span.start, span.stop)
        if place.num_gaps:
            which = "them" if place.num_gaps == len(span) else f"{place.num_gaps} of them"
            return Placement(span, f"no peer serves {which}")
        if place.num_thin:
            which = "each has" if place.num_thin == len(span) else f"{place.num_thin} of them have"
            return Placement(span, f"{which} fewer than {MIN_REPLICAS} other peers")
        percent = 100 * float(self.others.steps_per_second[blocks].min()) / self._even
        why = f"the slowest of them has {percent:.0f} % of an even share of throughput"
        return Placement(span, why)

    def _rate(self, starts: Column, stops: Column) -> Column:
        """Return what the candidate is worth at each span.

        That is what the swarm loses without it at the blocks there, each as dear as the work that
        it takes: or else speed would gather where blocks are cheap.
        """
        works, which = np.unique(self._work[stops] - self._work[starts], return_inverse=True)
        sums = compute_prefix_sums(self.others.work * self._list_losses(works))
        worth = sums[which, stops] - sums[which, starts]
        return worth * self._find_useful_part(starts, stops)

    def _list_losses(self, works: Column) -> Column:
        """Return what the swarm loses at each block if the candidate's steps take so much work.

        Blocks that nobody else serves are left out. They are counted, and so great a loss would
        hide all others.
        """
        without = self.others.steps_per_second / self._even + _NEXT_TO_NOTHING
        shares = self._speed / works[:, np.newaxis] / self._even
        losses = without**-_STEEPNESS - (without + shares) ** -_STEEPNESS
        return np.where(self.others.num_hosts == 0, 0.0, losses)

    def _find_useful_part(self, starts: Column, stops: Column) -> Column:
        """Return which part of the time ahead is left once a span is loaded."""
        own = self._candidate.span
        if own is None:
            return np.ones(len(starts))
        kept = np.minimum(stops, own.stop) - np.maximum(starts, own.start)
        load_seconds = (stops - starts - kept.clip(min=0)) * self._candidate.load_seconds
        return (1.0 - load_seconds / _HORIZON_SECONDS).clip(min=0.0)

    def _count_pieces(self, span: Span) -> list[int]:
        """Return how many peers like this one it still takes to close gaps, and to have replicas.

        Spans that begin where others end leave the fewest.
        """
        num_hosts = self.others.num_hosts.copy()
        num_hosts[span.start : span.stop] += 1
        return [
            sum(
                math.ceil(len(list(run)) / len(span))
                for is_lacking, run in groupby(num_hosts < wanted)
                if is_lacking
            )
            for wanted in (1, MIN_REPLICAS)
        ]

    def _count_hops(self, span: Span) -> int:
        """Return how many hops the shortest route needs; a block that nobody serves is one."""
        num_hops, block, reach = 0, 0, self.others.reach
        while block < self.others.num_blocks:
            onward = max(int(reach[block]), span.stop if block in span else 0)
            num_hops, block = num_hops + 1, max(onward, block + 1)
        return num_hops

    def _count_loose_edges(self, span: Span) -> int:
        """Return at how many of its two ends a span meets no other, nor the end of the model."""
        starts, stops = self.others.edges
        begins_well = span.start == 0 or span.start in stops
        ends_well = span.stop == self.others.num_blocks or span.stop in starts
        return 2 - begins_well - ends_well
