"""Peers that have held up a run, and that it does not take back for a while."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from ..errors import ErrorCode, RefusedError
from ..ids import MemberId, PeerId

_REST_FACTOR = 10
"""A peer rests so many times as long as it has held up the run."""
_LONGEST_SECONDS = 3600.0
"""The longest rest, and for how long it is remembered."""
_MOST_DOUBLINGS = 16

_NUM_FAILED_SUMS = 3
"""How many attempts to sum in a row fail for a member before it is put aside: a part that comes
late, counted by a mate meanwhile, fails one.
"""


@dataclass(frozen=True)
class _Rest:
    until: float
    why: str
    number: int
    """How many rests in a row, with this one."""


class Rests:
    """Peers that stay away from a run for a while; owned by its leader.

    A peer rests ten times as long as it has held up the run, twice as long each further time, and
    an hour at most: a peer that comes back with the same fault costs the run little of its time.

    >>> rests, slow = Rests(floor_seconds=10.0), PeerId("slow")
    >>> rests.note(slow, "it was too slow", 30.0, now=0.0)
    >>> rests.check(slow, now=100.0)
    Traceback (most recent call last):
    ...
    shoal.protocol.errors.RefusedError: put aside: it was too slow; it may join again in 200 s
    """

    def __init__(self, floor_seconds: float) -> None:
        """Every peer counts as one that has held up the run for `floor_seconds` at least."""
        self._floor_seconds = floor_seconds
        self._rests: dict[PeerId, _Rest] = {}

    def note(self, peer_id: PeerId, why: str, held_up_seconds: float, now: float) -> None:
        """Let a peer rest that has held up the run for so long; `why` is what it is told."""
        self._rests = {
            one: rest for one, rest in self._rests.items() if now < rest.until + _LONGEST_SECONDS
        }
        before = self._rests.get(peer_id)
        num_before = 0 if before is None else before.number
        first_seconds = _REST_FACTOR * max(held_up_seconds, self._floor_seconds)
        seconds = min(first_seconds * 2.0 ** min(num_before, _MOST_DOUBLINGS), _LONGEST_SECONDS)
        self._rests[peer_id] = _Rest(now + seconds, why, num_before + 1)

    def check(self, peer_id: PeerId, now: float) -> None:
        """Raise RefusedError for a peer that rests: with the reason, and when it may come back."""
        rest = self._rests.get(peer_id)
        if rest is not None and now < rest.until:
            seconds = rest.until - now
            detail = f"put aside: {rest.why}; it may join again in {seconds:.0f} s"
            raise RefusedError(ErrorCode.LEFT_OUT, detail, seconds)


class FailedSums:
    """Attempts to sum the gradients of an update that failed, in a row; owned by the leader.

    >>> failed, one = FailedSums(), MemberId("b/1")
    >>> for _ in range(3):
    ...     failed.note_failed(one, 30.0)
    >>> failed.failing, failed.seconds
    (['b/1'], 90.0)
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        """How long they took."""
        self._num_failed = Counter[MemberId]()
        """How many of them failed for a member."""

    @property
    def failing(self) -> list[MemberId]:
        """Members that do not sum, again and again."""
        return [member for member, num in self._num_failed.items() if num >= _NUM_FAILED_SUMS]

    def note_failed(self, member: MemberId, seconds: float) -> None:
        """Note an attempt that took so long, and failed for a member."""
        self._num_failed[member] += 1
        self.seconds += seconds

    def note_summed(self, members: Collection[MemberId]) -> None:
        """Note the members that came to the end of an attempt."""
        for member in members:
            del self._num_failed[member]

    def clear(self) -> None:
        """Begin again: an attempt came to its end at all, or those that failed may be gone."""
        self._num_failed.clear()
        self.seconds = 0.0
