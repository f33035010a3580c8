"""Memory that strangers share: an account of who holds how much of it."""

import asyncio
import contextlib
from collections import Counter, deque

from ...protocol.errors import ErrorCode, RefusedError
from ...protocol.fair_share import Holder, compute_share
from ...protocol.net.clock import Clock


class SharedBytes:
    """A budget of memory for what strangers send and do not fetch, and who holds how much of it."""

    def __init__(self, budget_bytes: int, times_free: int = 1) -> None:
        """Let nobody hold more than `times_free` times what stays free."""
        self._budget_bytes = budget_bytes
        self._times_free = times_free
        self._held: Counter[Holder] = Counter()
        self._freed = asyncio.Event()

    def __repr__(self) -> str:
        return f"<SharedBytes {self.used_bytes}/{self._budget_bytes}, {len(self._held)} holders>"

    @property
    def used_bytes(self) -> int:
        """Bytes that all holders have together."""
        return self._held.total()

    def check_room_for(self, holder: Holder, num_bytes: int) -> None:
        """Raise RefusedError unless a holder may have so many bytes more."""
        if not self.has_room_for(holder, num_bytes):
            raise RefusedError(
                ErrorCode.BUSY, "too many steps are waiting at this peer; try again later", 1.0
            )

    async def wait_for_room(self, holder: Holder, num_bytes: int, seconds: float) -> None:
        """Wait until a holder may have so many bytes more. Raises RefusedError after so long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not self.has_room_for(holder, num_bytes):
                    self._freed.clear()
                    await self._freed.wait()
        self.check_room_for(holder, num_bytes)

    def count(self, holder: Holder, num_bytes: int) -> None:
        """Enter bytes of a holder into the account, or strike them if there are less than none."""
        self._held[holder] += num_bytes
        if not self._held[holder]:
            del self._held[holder]
        if num_bytes < 0:
            self._freed.set()

    def has_room_for(self, holder: Holder, num_bytes: int) -> bool:
        """Return whether a holder may have so many bytes more."""
        held_bytes, share_bytes = self.measure(holder)
        return held_bytes + num_bytes <= share_bytes

    def measure(self, holder: Holder) -> tuple[int, int]:
        """Return how many bytes a holder has, and how many of all it may have at present."""
        share_bytes = compute_share(holder, self._held, self._budget_bytes, self._times_free)
        return self._held[holder], share_bytes


class RecentBytes:
    """Bytes that strangers have had a peer send in the last minute, bounded and shared fairly."""

    def __init__(self, clock: Clock, budget_bytes: int, times_free: int = 1) -> None:
        """Let nobody have more than `times_free` times what is left to others."""
        self._clock = clock
        self._budget_bytes = budget_bytes
        self._times_free = times_free
        self._taken: deque[tuple[float, Holder, int]] = deque()

    def __repr__(self) -> str:
        return f"<RecentBytes {sum(taken for *_, taken in self._taken)}/{self._budget_bytes}>"

    def take(self, holder: Holder, num_bytes: int) -> None:
        """Count bytes of a holder. Raises RefusedError when that is too much in a minute."""
        now = self._clock.now()
        while self._taken and now - self._taken[0][0] >= 60.0:
            self._taken.popleft()
        held = Counter[Holder]()
        for _, other, num_taken in self._taken:
            held[other] += num_taken
        share = compute_share(holder, held, self._budget_bytes, self._times_free)
        if held[holder] + num_bytes > share:
            raise RefusedError(ErrorCode.LOG_INCOMPLETE, "too much was sent again in this minute")
        self._taken.append((now, holder, num_bytes))
