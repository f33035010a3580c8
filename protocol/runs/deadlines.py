"""How long something may take before it is late: deadlines that follow from what was measured."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from statistics import median

from ..ids import MemberId, PeerId, find_peer_id

_NUM_KEPT = 32
_NUM_SPREADS = 10
_UNKNOWN_FLOORS = 10
"""The deadline, in floors, of what was never measured."""
_MOST_DOUBLINGS = 6

_HELD_FLOORS = 3
"""How many floors of an update a run waits for the first byte of a state."""

_HELD_UPDATES = 10
"""How many usual updates a run waits for a member at most."""

_MOST_HELD_SECONDS = 600.0
_REST_FACTOR = 10
"""A peer that was waited for rests so many times as long: a run loses an eleventh of its time to
it at most, whatever it does."""


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
    """How long things of one kind took lately. Each that was late doubles the deadline of the next.

    So a network or machine that has become slow is given enough time in the end.
    """

    def __init__(self, floor_seconds: float) -> None:
        self._floor_seconds = floor_seconds
        self._taken_seconds: deque[float] = deque(maxlen=_NUM_KEPT)
        self._num_late = 0

    @property
    def usual_seconds(self) -> float:
        """The median; 0 where nothing has come to its end yet."""
        return median(self._taken_seconds) if self._taken_seconds else 0.0

    @property
    def deadline_seconds(self) -> float:
        """After how many seconds the next one is late."""
        usual = choose_deadline(self._taken_seconds, self._floor_seconds)
        return usual * 2 ** min(self._num_late, _MOST_DOUBLINGS)

    def note(self, seconds: float) -> None:
        """Note one that came to its end."""
        self._taken_seconds.append(seconds)
        self._num_late = 0

    def note_late(self) -> None:
        """Note one that was given up at its deadline."""
        self._num_late += 1


class CommitHolds:
    """Which members a leader waits for with a commit, and which it has waited for long enough.

    The commit of an update makes the state stale that others download, so that a download which
    outlasts an update would never end. Parts of the update are computed meanwhile.

    >>> holds, slow = CommitHolds(floor_seconds=10.0), MemberId("slow/1")
    >>> [holds.note_fetching({slow: 1000}, now) for now in (0.0, 99.0, 100.0)]
    [set(), set(), {'slow/1'}]
    >>> holds.find_rest_seconds(PeerId("slow"), now=100.0)
    1000.0
    """

    def __init__(self, floor_seconds: float) -> None:
        """A member is waited for as long as for ten updates of `floor_seconds` at least."""
        self._floor_seconds = floor_seconds
        self._updates = UsualTimes(floor_seconds)
        self._updated_at: float | None = None
        self._since: dict[MemberId, float] = {}
        """The members that are waited for, and since when."""
        self._rests_until: dict[PeerId, float] = {}

    @property
    def is_on(self) -> bool:
        """Whether somebody is waited for."""
        return bool(self._since)

    @property
    def most_seconds(self) -> float:
        """How long a member is waited for at most."""
        usual = max(self._updates.usual_seconds, self._floor_seconds)
        return min(_HELD_UPDATES * usual, _MOST_HELD_SECONDS)

    def note_commit(self, now: float) -> None:
        """Note that an update was committed."""
        if self._updated_at is not None:
            self._updates.note(now - self._updated_at)
        self._updated_at = now

    def count_seconds(self, member: MemberId, now: float) -> float:
        """Return how long a member has been waited for."""
        return now - self._since.get(member, now)

    def note_fetching(self, fetching: Mapping[MemberId, int], now: float) -> set[MemberId]:
        """Wait for members that download their state, and for nobody else any more.

        `fetching` says how many bytes they have; one without any may reach no mate. Returns those
        that are not waited for any longer: now they rest.
        """
        late = {one for one in fetching if self.find_rest_seconds(find_peer_id(one), now) > 0}
        for member, num_bytes in fetching.items():
            since = self._since.setdefault(member, now)
            nothing_seconds = min(_HELD_FLOORS * self._floor_seconds, self.most_seconds)
            if now - since >= (self.most_seconds if num_bytes else nothing_seconds):
                late.add(member)
        over = [one for one in self._since if one not in fetching or one in late]
        for member in over:
            rest_seconds = _REST_FACTOR * (now - self._since.pop(member))
            peer_id = find_peer_id(member)
            rests_until = max(self._rests_until.get(peer_id, now), now + rest_seconds)
            self._rests_until[peer_id] = rests_until
        self._rests_until = {one: until for one, until in self._rests_until.items() if until > now}
        return late

    def find_rest_seconds(self, peer_id: PeerId, now: float) -> float:
        """Return how long a peer is not waited for yet; 0: it would be."""
        return max(self._rests_until.get(peer_id, now) - now, 0.0)


def describe_download(fetched_bytes: int, state_bytes: int) -> str:
    """Return how far a download is, in tenths, for people.

    >>> describe_download(123_000_000, 360_000_000)
    '108 of 360 MB'
    """
    tenths = 10 * fetched_bytes // state_bytes
    most = state_bytes / 1e6
    return f"{most * tenths / 10:.3g} of {most:.3g} MB"
