"""Time as an argument: the seam, the real clock, and a virtual one for tests and simulations."""

from typing import Protocol


class Clock(Protocol):
    """Two readings of time. Waiting is asyncio's own, on a loop that follows the same clock."""

    def now(self) -> float:
        """Return monotonic seconds: for deadlines and durations, meaningless across processes."""
        ...

    def wall(self) -> float:
        """Return seconds since the Unix epoch: for expiry dates that others must understand."""
        ...
