"""How many records each sender may have checked by a node of the DHT: pure rules over a window.

A check takes 0.2 ms, and whoever sends decides how many there are.
"""

from __future__ import annotations

from collections.abc import Hashable

WINDOW_SECONDS = 10.0

MAX_RECORDS = 2000
"""Records of a window that are checked, of all senders together: 4 % of a core. A peer announces
itself every 30 s, so this is enough for 6,000 that have the same five nodes near their key."""

NUM_FOR_CERTAIN = 8
"""Records of each sender that are checked whatever others send. An announcement needs one place,
the list of the owner another one. Who comes as many senders pays a TLS handshake for each, which
costs about as much as these checks."""


class StoreBudget:
    """Counts what each sender had checked in the current window; nobody gets more than stays free.

    >>> budget = StoreBudget()
    >>> budget.take("greedy", MAX_RECORDS // 2, now=0.0), budget.take("greedy", 1, now=1.0)
    (True, False)
    >>> budget.take("other", MAX_RECORDS // 4, now=1.0), budget.take("other", 1, now=1.0)
    (True, False)
    >>> budget.take("greedy", 1, now=WINDOW_SECONDS)
    True
    """

    def __init__(self) -> None:
        self._begun_at = float("-inf")
        self._taken: dict[Hashable, int] = {}
        self._num_taken = 0

    def take(self, sender: Hashable, num_records: int, now: float) -> bool:
        """Return whether a sender may have so many records checked now, and count them then."""
        if not 0 <= now - self._begun_at < WINDOW_SECONDS:
            self._begun_at, self._taken, self._num_taken = now, {}, 0
        num_before = self._taken.get(sender, 0)
        num_after = num_before + num_records
        share = (MAX_RECORDS - (self._num_taken - num_before)) // 2
        if num_after > max(share, NUM_FOR_CERTAIN):
            return False
        self._taken[sender] = num_after
        self._num_taken += num_records
        return True
