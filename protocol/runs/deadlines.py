"""How long something may take before it is late: deadlines that follow from what was measured."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from statistics import median

from ..ids import MemberId

_NUM_KEPT = 32
_NUM_SPREADS = 10
_UNKNOWN_FLOORS = 10
"""The deadline, in floors, of what was never measured."""
_MOST_DOUBLINGS = 6

_IDLE_FLOORS = 3
"""How many floors of an update a commit waits for a member that has nothing of its state yet."""

_LONGEST_UPDATES = 10
"""How many usual updates a commit waits for one member at most."""

_LONGEST_SECONDS = 600.0
_DELAYED_FRACTION = 0.1
"""The part of its time that a run waits for members, beside one longest wait."""


def choose_deadline(taken_seconds: Collection[float], floor_seconds: float) -> float:
    """Return after how many seconds something is late, by how long it took before.

    That is a floor, the median, and ten times the median absolute deviation from it, which a few
    stragglers do not change.

    >>> choose_deadline([2.0, 2.5, 3.0, 60.0], floor_seconds=10.0)
    17.75
    >>> choose_deadline([], floor_seconds=10.0)
    100.0
    """
    if not taken_seconds:
        return _UNKNOWN_FLOORS * floor_seconds
    middle = median(taken_seconds)
    spread = median(abs(seconds - middle) for seconds in taken_seconds)
    return floor_seconds + middle + _NUM_SPREADS * spread


class UsualTimes:
    """How long things of one kind took lately. Each late one doubles the deadline of the next.

    So a network or machine that has become slow is given enough time in the end.

    >>> all_members = UsualTimes(10.0)
    >>> slow, quick = UsualTimes(10.0, all_members), UsualTimes(10.0, all_members)
    >>> slow.note_late(), quick.note(2.0)
    (None, None)
    >>> slow.deadline_seconds, quick.deadline_seconds
    (24.0, 12.0)
    """

    def __init__(self, floor_seconds: float, alike: UsualTimes | None = None) -> None:
        """`alike`: all things of this kind, whose times count until one of these has ended."""
        self._floor_seconds = floor_seconds
        self._alike = alike
        self._taken_seconds: deque[float] = deque(maxlen=_NUM_KEPT)
        self._num_late = 0

    @property
    def usual_seconds(self) -> float:
        """The median; 0 where nothing has come to its end yet."""
        return median(self._taken_seconds) if self._taken_seconds else 0.0

    @property
    def deadline_seconds(self) -> float:
        """After how many seconds the next one is late."""
        taken_seconds = self._taken_seconds
        if not taken_seconds and self._alike is not None:
            taken_seconds = self._alike._taken_seconds
        usual = choose_deadline(taken_seconds, self._floor_seconds)
        return usual * 2 ** min(self._num_late, _MOST_DOUBLINGS)

    def note(self, seconds: float) -> None:
        """Note one that came to its end."""
        self._taken_seconds.append(seconds)
        self._num_late = 0
        if self._alike is not None:
            self._alike.note(seconds)

    def note_late(self) -> None:
        """Note one that was given up at its deadline."""
        self._num_late += 1


class CommitDelays:
    """How long a leader delays commits for members that are not ready, and which of them are late.

    The commit of an update makes the state stale that others download, so a download that takes
    longer than an update would never end. Parts of the update are computed meanwhile. Each member
    has a clock, which runs while a commit waits for it, and stands while something else does not
    come further. The sum of a run's delays has a limit, too, whoever causes them.

    >>> delays, slow = CommitDelays(floor_seconds=10.0, begun_at=0.0), MemberId("slow/1")
    >>> [delays.note_missing({slow: True}, now) for now in (0.0, 99.0, 100.0)]
    [set(), set(), {'slow/1'}]
    """

    def __init__(self, floor_seconds: float, begun_at: float) -> None:
        """A member is waited for as long as for ten updates of `floor_seconds` at least."""
        self._floor_seconds = floor_seconds
        self._begun_at = begun_at
        self._updates = UsualTimes(floor_seconds)
        self._settling = UsualTimes(floor_seconds)
        self._settling_since: float | None = None
        """When members were seen first that still apply the last update."""
        self._updated_at: float | None = None
        """When the last update was committed, and how long the next one was delayed, later."""
        self._waiting_at: float | None = None
        """Up to which moment waits of a commit are counted; None: no commit waits."""
        self._waited_seconds: dict[MemberId, float] = {}
        """How long commits have waited for the members that are not ready."""
        self._begun: set[MemberId] = set()
        """Those of them that had some of their state once."""
        self._delayed_seconds = 0.0
        """How long commits have waited at all."""

    @property
    def is_on(self) -> bool:
        """Whether a commit waits."""
        return self._waiting_at is not None

    @property
    def most_seconds(self) -> float:
        """How long a member is waited for at most."""
        usual = max(self._updates.usual_seconds, self._floor_seconds)
        return min(_LONGEST_UPDATES * usual, _LONGEST_SECONDS)

    def note_commit(self, now: float) -> None:
        """Note that an update was committed; how long that was delayed is not usual."""
        self.pause(now)
        if self._updated_at is not None:
            self._updates.note(now - self._updated_at)
        self._updated_at, self._settling_since = now, None

    def has_to_settle(self, is_settling: bool, now: float) -> bool:
        """Return whether members still apply the last update, and may take that long."""
        since = self._settling_since
        if is_settling:
            self._settling_since = now if since is None else since
            return now - self._settling_since < self._settling.deadline_seconds
        if since is not None:
            self._settling.note(now - since)
        self._settling_since = None
        return False

    def pause(self, now: float) -> None:
        """Note that no commit waits for members alone any more."""
        if self._waiting_at is not None:
            seconds = now - self._waiting_at
            self._delayed_seconds += seconds
            if self._updated_at is not None:
                self._updated_at += seconds
            for member in self._waited_seconds:
                self._waited_seconds[member] += seconds
        self._waiting_at = None

    def note_missing(self, missing: Mapping[MemberId, bool], now: float) -> set[MemberId]:
        """Delay a commit for members that are not ready; return those that are late.

        `missing` says whether one has something of its state; without, it may reach no mate.
        """
        self.pause(now)
        self._waiting_at = now if missing else None
        self._waited_seconds = {one: self.count_seconds(one) for one in missing}
        self._begun = {one for one, has_begun in missing.items() if has_begun or one in self._begun}
        most_seconds = self.most_seconds
        allowed_seconds = most_seconds + _DELAYED_FRACTION * (now - self._begun_at)
        if self._delayed_seconds >= allowed_seconds:
            return set(missing)
        idle_seconds = min(_IDLE_FLOORS * self._floor_seconds, most_seconds)
        return {
            one
            for one, seconds in self._waited_seconds.items()
            if seconds >= (most_seconds if one in self._begun else idle_seconds)
        }

    def count_seconds(self, member: MemberId) -> float:
        """Return how long commits have waited for a member."""
        return self._waited_seconds.get(member, 0.0)
