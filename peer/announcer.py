"""Keeps the announcement of one peer fresh: every period, and at once when its state changes."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from ..protocol.announcements import Announcement, PeerState, sign_announcement
from ..protocol.errors import DirectoryError
from ..protocol.identity import Identity
from ..protocol.net.clock import Clock
from ..protocol.net.directory import Directory

_logger = logging.getLogger(__name__)

LIFETIME_PERIODS = 3
"""An announcement outlives two that were lost on the way."""

_RETRY_PERIODS = 0.5
"""The pause after a loss: after whole periods the third attempt would come just too late."""


class Announcer:
    """Publishes what `await describe(state, sequence, now)` returns, signed. Owned by one peer."""

    def __init__(
        self,
        directory: Directory,
        identity: Identity,
        describe: Callable[[PeerState, int, float], Awaitable[Announcement]],
        clock: Clock,
        period_seconds: float,
    ) -> None:
        self._directory = directory
        self._identity = identity
        self._describe = describe
        self._clock = clock
        self._period_seconds = period_seconds
        self.state = PeerState.JOINING
        # Wall time in milliseconds: a restarted peer goes on counting without remembering.
        self._sequence = int(clock.wall() * 1000)
        self._turn = asyncio.Lock()

    async def announce(self, state: PeerState) -> None:
        """Publish a state now. Raises DirectoryError when no replica took it."""
        self.state = state
        async with self._turn:  # a renewal under way must not come out behind a newer state
            self._sequence += 1
            announcement = await self._describe(state, self._sequence, self._clock.wall())
            await self._directory.announce(sign_announcement(self._identity, announcement))

    async def run(self) -> None:
        """Renew the announcement until cancelled; a directory in trouble is asked again sooner."""
        pause_periods = 1.0
        while True:
            await asyncio.sleep(pause_periods * self._period_seconds)
            pause_periods = 1.0
            try:
                await self.announce(self.state)
            except DirectoryError as error:
                pause_periods = _RETRY_PERIODS
                _logger.warning("could not renew the announcement: %s", error)
