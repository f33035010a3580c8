"""Which members have counted which parts of an update, and what is left to do: pure decisions.

A part that no member of a stage has counted is missing there. It begins again at the stage before
the first one that lacks it, which still has what it sent, and goes on up to the last one that lacks
it. A part that two members of a stage have counted is taken out of the sums of one of them.

Of a stage, the next part goes to the member that has then computed all of its parts first, by how
long it computes for one. One with which orders have failed, maybe as it reaches nobody of the next
stage, comes behind its mates. With 4 stages of two members, one of all three times slower, this
comes to 96 % of what the slowest stage could do; SWARM's interleaved weighted round robin (Ryabinin
et al., 2023) to 76 %, and drawing members to 50 % (`benchmarks/simulation/pipeline.py`).
"""

from __future__ import annotations

import math
import random
from collections import Counter, deque
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from statistics import fmean

from ..ids import MemberId, find_peer_id

LEAST_PER_MEMBER = 2
"""Parts under way per member: one that it computes, and one on its way or in a queue. Members keep
what belongs to a part until the commit in any case, so more of them take memory for graphs only.
"""

_LEAST_SECONDS = 1e-6
"""Of a part: members tell how long they take."""

_MOST_PER_MEMBER = 8
"""A member of the first stage keeps graphs of as many parts as are under way, and computes forward
passes again beyond its memory for graphs."""

PART_DIGEST_BYTES = 8
"""Bytes of the digest of what a member has computed of a part."""
_INDEX_BYTES = 2


@dataclass(frozen=True)
class MemberManifest:
    """A member's account of its current update, as it tells the leader."""

    update: int
    is_ready: bool
    """Whether it has the state of the newest decision that it knows."""
    is_applying: bool = False
    """Whether it will have it soon, as it has the sums."""
    counted: Mapping[int, bytes] = field(default_factory=dict[int, bytes])
    """The parts that it has counted, and the digests of what it has computed of each."""
    audited: Mapping[int, bytes] = field(default_factory=dict[int, bytes])
    """The same of parts that it has computed for audits."""
    refused: Set[int] = frozenset[int]()
    """Parts of which it computes numbers that are not finite."""
    state: bytes = b""
    """Digest of weights and optimizer before the update, equal at all members of a stage."""
    is_leaving: bool = False
    """Whether it wants to leave the run behind the update."""
    accused: tuple[MemberId, ...] = ()
    """Members that have sent it numbers which no honest member sends."""
    unreachable: tuple[MemberId, ...] = ()
    """Mates from which it could not read their sums, in attempt after attempt."""
    part_seconds: float = 0.0
    """How long it computes for a part; 0: not known yet."""
    part_wait_seconds: float = 0.0
    """How long a part waits there for its turns to be computed; 0: not known yet."""
    fetched_bytes: int = 0
    state_bytes: int = 0
    """The size of the state of its stage that it downloads, of which it has so much; 0: none."""

    @property
    def has_begun(self) -> bool:
        """Whether it builds its stage, or has some of the state that it downloads."""
        return not self.state or self.fetched_bytes > 0

    def describe_download(self) -> str:
        """Return how much of its state it has, in tenths, for people.

        >>> told = MemberManifest(0, False, fetched_bytes=123_000_000, state_bytes=360_000_000)
        >>> told.describe_download()
        '108 of 360 MB'
        """
        if not self.state_bytes:
            return "nothing"
        tenths = 10 * self.fetched_bytes // self.state_bytes
        most = self.state_bytes / 1e6
        return f"{most * tenths / 10:.3g} of {most:.3g} MB"


@dataclass(frozen=True)
class PartOrder:
    """One run of a part through stages; the first member of the route begins."""

    index: int
    route: tuple[MemberId, ...]
    last_stage: int
    """The last stage that has to compute it."""
    without: MemberId | None = None
    """This member takes the part out of its sums; None: those count it that lack it."""
    is_audit: bool = False
    """Whether the member of the last stage computes the part without counting it."""

    @property
    def auditor(self) -> MemberId:
        """The member that computes an audit: it comes behind the one of the stage before."""
        return self.route[min(self.last_stage, 1)]


@dataclass
class UpdateParts:
    """The parts of one update, as manifests tell of them. `stages` are the ready members of each.

    >>> parts = UpdateParts(2, [[MemberId("a")], [MemberId("b")]])
    >>> parts.note(MemberId("a"), [0, 1])
    >>> parts.note(MemberId("b"), [0])
    >>> parts.choose_next(random.Random(0))
    PartOrder(index=1, route=('a', 'b'), last_stage=1, without=None, is_audit=False)
    """

    num_parts: int
    stages: Sequence[Sequence[MemberId]]
    leaving: Collection[MemberId] = ()
    """They get new parts only where nobody else of their stage takes any."""
    part_seconds: Mapping[MemberId, float] = field(default_factory=dict[MemberId, float])
    """How long members compute for a part, where that is known."""
    growing: Collection[int] = ()
    """Stages of which more members will be ready."""
    failures: Counter[MemberId] = field(default_factory=Counter[MemberId])
    """How many orders have failed with a member on the route since the last one that did not."""
    audits: deque[PartOrder] = field(default_factory=deque[PartOrder])
    """Those that come before all other orders."""
    _counted: dict[MemberId, set[int]] = field(default_factory=dict[MemberId, set[int]])
    _refused: dict[MemberId, set[int]] = field(default_factory=dict[MemberId, set[int]])
    _num_taken: Counter[MemberId] = field(default_factory=Counter[MemberId])
    """How many parts a member has counted, or was ordered to."""
    _waiting: deque[int] = field(default_factory=deque[int])
    """Parts that are not under way, and may not be complete."""

    def __post_init__(self) -> None:
        self._waiting.extend(range(self.num_parts))

    def note(self, member: MemberId, indices: Iterable[int], refused: Iterable[int] = ()) -> None:
        """Note all parts that a member has counted, and those of which it computes no finite
        numbers, in place of what was known of it.
        """
        self._counted[member] = set(indices)
        self._refused[member] = set(refused)
        self._num_taken[member] = len(self._counted[member])

    def note_passed(self, order: PartOrder, route: Sequence[MemberId]) -> bool:
        """Note that an order was carried out by these members.

        Returns whether we know all of them: another one, that has become ready meanwhile, may have
        stood in for a member, and what it counts is nothing here.
        """
        if order.is_audit:
            return True
        for member in route:
            self.failures.pop(member, None)
            counted = self._counted.setdefault(member, set())
            if order.without == member:
                counted.discard(order.index)
            else:
                counted.add(order.index)
        self._waiting.append(order.index)  # something else may be left to do
        first_stage = len(self.stages) - len(order.route)
        known = {member for stage in self.stages for member in stage}
        return known.issuperset(route[: order.last_stage + 1 - first_stage])

    def note_failed(self, order: PartOrder) -> None:
        """Note that an order was not carried out. Which member of the route is at fault shows when
        the others carry out another one.
        """
        if not order.is_audit:
            self.failures.update(order.route)

    def list_holders(self, stage: int, index: int) -> list[MemberId]:
        """Return the members of a stage that have counted a part, in order."""
        return [m for m in self.stages[stage] if index in self._counted.get(m, ())]

    def find_refused(self) -> tuple[int, int] | None:
        """Return a part, and the stage of which all members refuse it; None: there is none.

        Whether all do does not depend on which of them was asked first.
        """
        for index in range(self.num_parts):
            for stage in range(len(self.stages)):
                if stage not in self.growing and self._is_refused(stage, index):
                    return index, stage
        return None

    def _is_refused(self, stage: int, index: int) -> bool:
        members = self.stages[stage]
        return bool(members) and all(index in self._refused.get(one, ()) for one in members)

    @property
    def counted(self) -> set[tuple[int, int]]:
        """All stages and parts of which a ready member has counted that part."""
        return {
            (stage, index)
            for stage, members in enumerate(self.stages)
            for member in members
            for index in self._counted.get(member, ())
        }

    @property
    def is_complete(self) -> bool:
        """Whether each part is counted once at each stage, and no audit is left."""
        return not self.audits and self.is_counted

    @property
    def is_counted(self) -> bool:
        """Whether each part is counted once at each stage."""
        return all(
            len(self.list_holders(stage, index)) == 1
            for stage in range(len(self.stages))
            for index in range(self.num_parts)
        )

    def choose_next(self, rng: random.Random) -> PartOrder | None:
        """Return the next order; None when nothing but parts that are under way is left to do.

        A part is under way from then on until `note_passed`.
        """
        if self.audits:
            return self.audits.popleft()
        while self._waiting:
            order = self._plan(self._waiting.popleft(), rng)
            if order is not None:
                return order
        return None

    def choose_num_under_way(self, trip_seconds: float | None) -> int:
        """Return how many parts to have under way at once.

        `trip_seconds` is how long an order takes that waits in no queue; None: that is not known.
        For so long the slowest stage has to compute others, and each member has one in its queue.

        >>> parts = UpdateParts(64, [["a", "b"], ["c"]], (), {"a": 1.0, "b": 1.0, "c": 0.25})
        >>> [parts.choose_num_under_way(seconds) for seconds in (None, 1.5, 4.0, 1000.0)]
        [6, 6, 11, 24]
        >>> UpdateParts(4, [["a"]], (), {"a": 5e-324}).choose_num_under_way(1.0)
        8
        """
        num_members = sum(map(len, self.stages))
        seconds = [[self.part_seconds.get(one) for one in members] for members in self.stages]
        rates = [sum(1 / max(one, _LEAST_SECONDS) for one in stage if one) for stage in seconds]
        num_passed = (trip_seconds or 0.0) * min(filter(None, rates), default=0.0)
        num = max(LEAST_PER_MEMBER * num_members, num_members + math.ceil(num_passed))
        return min(num, _MOST_PER_MEMBER * num_members)

    def _plan(self, index: int, rng: random.Random) -> PartOrder | None:
        holders = [self.list_holders(stage, index) for stage in range(len(self.stages))]
        lacking = [stage for stage, members in enumerate(holders) if not members]
        doubled = [stage for stage, members in enumerate(holders) if len(members) > 1]
        if not lacking and not doubled:
            return None
        if any(self._is_refused(stage, index) for stage in lacking):
            return None  # by all that are ready: others may compute it later
        first, last = (lacking[0], lacking[-1]) if lacking else (doubled[0], doubled[0])
        # To take it out, a member has to reach the next stage, too.
        without = None if lacking else min(reversed(holders[first]), key=self.failures.__getitem__)
        while lacking and first and self._has_to_be_redone(first - 1, index, holders[first - 1]):
            first -= 1
            holders[first] = []
        route = [members[0] if members else self._choose_member(stage, index, rng)
                 for stage, members in enumerate(holders)]  # fmt: skip
        if without is not None:
            route[first] = without
        begin = max(first - 1, 0)
        return PartOrder(index, tuple(route[begin:]), last, without)

    def list_auditors(self, stage: int, index: int) -> list[MemberId]:
        """Return the members of a stage that can compute a part beside those that have counted it,
        the one first that has then computed all of its own first.
        """
        holders = self.list_holders(stage, index)
        able = [one for one in self.stages[stage] if one not in (*holders, *self.leaving)]
        usual = self._find_usual_seconds(able)
        return sorted(able, key=lambda one: self._rate(one, usual))

    def order_audit(self, stage: int, index: int, auditor: MemberId) -> None:
        """Have a part computed again, with what the members before and behind have counted.

        Nothing where one of them has not counted it, maybe as it was lost.
        """
        last_stage = len(self.stages) - 1
        around = range(max(stage - 1, 0), min(stage + 1, last_stage) + 1)
        holders = [
            [auditor] if each == stage else self.list_holders(each, index)[:1] for each in around
        ]
        route = tuple(member for members in holders for member in members)
        if len(route) == len(around):
            self._num_taken[auditor] += 1
            self.audits.append(PartOrder(index, route, stage, is_audit=True))

    def _has_to_be_redone(self, stage: int, index: int, holders: Sequence[MemberId]) -> bool:
        """Return whether a mate computes what members have counted, but maybe cannot hand on."""
        mates = [one for one in self._list_able(stage, index) if one not in holders]
        has_failed = self.failures.__getitem__
        return all(map(has_failed, holders)) and not all(map(has_failed, mates))

    def _choose_member(self, stage: int, index: int, rng: random.Random) -> MemberId:
        able = self._list_able(stage, index)
        usual = self._find_usual_seconds(able)
        chosen = min(able, key=lambda one: (*self._rate(one, usual), rng.random()))
        self._num_taken[chosen] += 1
        return chosen

    def _find_usual_seconds(self, members: Iterable[MemberId]) -> float:
        known = [seconds for member in members if (seconds := self.part_seconds.get(member))]
        return fmean(known) if known else 1.0

    def _rate(self, member: MemberId, usual_seconds: float) -> tuple[int, float]:
        """Return how often orders failed with a member, and when it would have computed one more
        part.
        """
        seconds = self.part_seconds.get(member) or usual_seconds
        return self.failures[member], (self._num_taken[member] + 1) * seconds

    def _list_able(self, stage: int, index: int) -> Sequence[MemberId]:
        """Return the members of a stage that have not refused a part."""
        able = [m for m in self.stages[stage] if index not in self._refused.get(m, ())]
        return [member for member in able if member not in self.leaving] or able

    def list_parts(self, member: MemberId) -> frozenset[int]:
        """Return the parts that a member has counted."""
        return frozenset(self._counted.get(member, ()))


class TripTimes:
    """How long orders take that wait in no queue, in the newest update and the one before.

    >>> trips = TripTimes()
    >>> for update, seconds in ((3, 0.5), (4, 2.0), (4, 1.0), (5, 3.0)):
    ...     trips.note(update, MemberId("a"), seconds)
    >>> trips.usual_seconds
    2.0
    """

    def __init__(self) -> None:
        self._shortest: dict[tuple[int, MemberId], float] = {}

    def note(self, update: int, first: MemberId, seconds: float) -> None:
        """Note an order of all stages that was carried out, by its first member."""
        recent = {key: least for key, least in self._shortest.items() if key[0] >= update - 1}
        least = min(seconds, recent.get((update, first), seconds))
        self._shortest = recent | {(update, first): least}

    @property
    def usual_seconds(self) -> float | None:
        """The mean of the shortest by each first member, as some are nearer; None: not known."""
        return fmean(self._shortest.values()) if self._shortest else None


class LostParts:
    """How many parts of an update were counted, and lost with the members that had them.

    >>> lost = LostParts()
    >>> for counted in ({(0, 0), (0, 1)}, {(0, 1)}, {(0, 0), (0, 1)}):
    ...     lost.note(7, counted)
    >>> lost.num
    1
    """

    def __init__(self) -> None:
        self.num = 0
        self._update: int | None = None
        self._counted: Set[tuple[int, int]] = frozenset[tuple[int, int]]()

    def note(self, update: int, counted: Set[tuple[int, int]]) -> None:
        """Note what is counted now, by stages and parts; what was before and is not is lost."""
        if update != self._update:
            self._update, self._counted, self.num = update, set[tuple[int, int]](), 0
        self.num += len(self._counted - counted)
        self._counted = counted


class HeldOutLosses:
    """The losses of held-out parts after an update, as far as they are measured.

    All members come to the same numbers, so those that are there count whoever fails meanwhile.

    >>> losses = HeldOutLosses(2)
    >>> losses.begin(7)
    >>> losses.note(1, 0.5)
    >>> losses.missing, losses.mean
    ([0], None)
    """

    def __init__(self, num_parts: int) -> None:
        self._num_parts = num_parts
        self._update: int | None = None
        self._losses = dict[int, float]()
        self.failure: str | None = None
        """What keeps it from being measured."""

    def begin(self, update: int) -> None:
        """Measure after so many updates; what is known of another number is forgotten."""
        if update != self._update:
            self._update, self._losses, self.failure = update, {}, None

    def note(self, index: int, loss: float) -> None:
        """Note the loss of a part."""
        self._losses[index] = loss

    @property
    def missing(self) -> list[int]:
        """The parts that are not measured yet."""
        return [index for index in range(self._num_parts) if index not in self._losses]

    @property
    def mean(self) -> float | None:
        """The loss of all parts together; None while one is missing."""
        return None if self.missing else fmean(self._losses.values())


def pack_parts(indices: Iterable[int]) -> bytes:
    """Return a set of parts as bits.

    >>> unpack_parts(pack_parts([0, 9])) == {0, 9}
    True
    """
    bits = 0
    for index in indices:
        bits |= 1 << index
    return bits.to_bytes((bits.bit_length() + 7) // 8, "little")


def unpack_parts(data: bytes) -> set[int]:
    """Return the parts of bits."""
    bits = int.from_bytes(data, "little")
    return {index for index in range(bits.bit_length()) if bits >> index & 1}


def pack_digests(digests: Mapping[int, bytes]) -> bytes:
    """Return digests of parts, each behind the number of its part.

    >>> unpack_digests(pack_digests({9: b"digest 9", 300: b"digest x"}))
    {9: b'digest 9', 300: b'digest x'}
    """
    return b"".join(index.to_bytes(_INDEX_BYTES, "little") + digests[index] for index in digests)


def unpack_digests(data: bytes) -> dict[int, bytes]:
    """Return the digests of parts. Raises ValueError for bytes that are none."""
    size = _INDEX_BYTES + PART_DIGEST_BYTES
    entries = [data[start : start + size] for start in range(0, len(data), size)]
    digests = {int.from_bytes(one[:_INDEX_BYTES], "little"): one[_INDEX_BYTES:] for one in entries}
    if len(digests) * size != len(data):
        raise ValueError(f"{len(data)} bytes are no digests, or of one part twice")
    return digests


@dataclass(frozen=True)
class Difference:
    """Members of a stage whose answers should be equal. Others compute wrongly, or lie."""

    equal: tuple[MemberId, ...]
    """Those with the most frequent answer; of equally many, with that of the one named first."""
    others: tuple[MemberId, ...]
    is_tie: bool
    """Whether as many have another answer, so that it is open which of them is right."""

    def describe(self, what: str, follows: str = "") -> str:
        """Return which members differ, and what follows: those count that are equal, if nothing
        else is said.
        """
        equal, others = (
            ", ".join(f"…{find_peer_id(member)[-8:]}" for member in members)
            for members in (self.equal, self.others)
        )
        differ = f"the {what} of {others} differ from those of {equal}"
        if follows:
            return f"{differ}, {follows}"
        if not self.is_tie:
            return f"{differ}, which count, as most have them"
        return f"{differ}, which count as {equal} came first: nothing shows that they are right"


def find_difference(told: Mapping[MemberId, Hashable]) -> Difference:
    """Return which members tell something else than most.

    >>> find_difference({MemberId("a"): b"x", MemberId("b"): b"y"})
    Difference(equal=('a',), others=('b',), is_tie=True)
    """
    if not told:
        return Difference((), (), is_tie=False)
    (best, num_equal), *rivals = Counter(told.values()).most_common()  # the first one at a tie
    return Difference(
        tuple(member for member, answer in told.items() if answer == best),
        tuple(member for member, answer in told.items() if answer != best),
        is_tie=any(num == num_equal for _, num in rivals),
    )
