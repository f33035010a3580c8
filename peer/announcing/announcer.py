"""Keeps the announcement of one peer fresh: every period, and at once when its state changes."""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import replace

from ...protocol import limits
from ...protocol.errors import DirectoryError, RevokedError
from ...protocol.identity import Identity
from ...protocol.ids import PeerId
from ...protocol.net.clock import Clock
from ...protocol.net.directory import Directory
from ...protocol.records.announcements import Announcement, PeerState, sign_announcement

_logger = logging.getLogger(__name__)

LIFETIME_PERIODS = 3
"""An announcement outlives two that were lost on the way."""

_RETRY_PERIODS = 0.5
"""The pause after a loss: after whole periods the third attempt would come just too late."""

_GROWTH_SECONDS = 0.001
"""How much later than the one before an announcement expires at least."""


class Announcer:
    """Publishes what `describe(state, sequence, now)` returns, signed. Owned by one peer.

    Of two announcements a directory keeps the one that expires later. So each expires later than
    the one before, and the first one later than what the peer said before a restart, even if it
    was started with a shorter period.
    """

    def __init__(
        self,
        directory: Directory,
        identity: Identity,
        describe: Callable[[PeerState, int, float], Announcement],
        clock: Clock,
        period_seconds: float,
    ) -> None:
        self._directory = directory
        self._identity = identity
        self._describe = describe
        self._clock = clock
        self.period_seconds = period_seconds
        self.state = PeerState.JOINING
        # Wall time in milliseconds: what is higher than before even if nothing can be read back.
        self._sequence = int(clock.wall() * 1000)
        self._expires_at = 0.0
        self._has_read_back = False
        self._turn = asyncio.Lock()
        self._is_outdated = asyncio.Event()

    @property
    def peer_id(self) -> PeerId:
        """The id of the announcing peer."""
        return self._identity.peer_id

    async def announce(self, state: PeerState) -> None:
        """Publish a state now. Raises DirectoryError when no replica took it."""
        self.state = state
        async with self._turn:  # a renewal under way must not come out behind a newer state
            if not self._has_read_back:
                await self._read_back(state)
            self._sequence += 1
            announcement = self._describe(state, self._sequence, self._clock.wall())
            self._expires_at = max(self._expires_at + _GROWTH_SECONDS, announcement.expires_at)
            latest = announcement.issued_at + limits.MAX_ANNOUNCEMENT_LIFETIME_SECONDS
            announcement = replace(
                announcement, sequence=self._sequence, expires_at=min(self._expires_at, latest)
            )
            await self._directory.announce(sign_announcement(self._identity, announcement))

    def renew_now(self) -> None:
        """Have `run` renew the announcement at once: what it describes has changed."""
        self._is_outdated.set()

    async def _read_back(self, state: PeerState) -> None:
        """Go on from what the directory still holds of this peer."""
        draft = self._describe(state, self._sequence, self._clock.wall())
        for known in await self._directory.lookup(draft.model_id):
            if known.peer_id == self._identity.peer_id:
                self._sequence = max(self._sequence, known.sequence)
                self._expires_at = known.expires_at
        self._has_read_back = True

    async def run(self) -> None:
        """Renew the announcement until cancelled; a directory in trouble is asked again sooner.

        Warns once of two losses in a row, which an announcement outlives: peers that have just
        left lose one. The end of trouble is no news, for a peer that has become alone keeps its own
        announcement. Raises RevokedError when the owner of the swarm has shut the peer out.
        """
        pause_periods, num_losses = 1.0, 0
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_periods * self.period_seconds):
                    await self._is_outdated.wait()
            self._is_outdated.clear()
            pause_periods = 1.0
            try:
                await self.announce(self.state)
                if num_losses:
                    num_losses = 0
                    _logger.info("the announcement is renewed again")
                    await self._read_back(self.state)  # others may be back as well
            except RevokedError:
                self.state = PeerState.OFFLINE  # nobody would hear a goodbye
                raise
            except DirectoryError as error:
                pause_periods = _RETRY_PERIODS
                num_losses += 1
                level = logging.WARNING if num_losses == 2 else logging.DEBUG
                _logger.log(level, "could not renew the announcement, trying again: %s", error)


async def announce_offline(announcer: Announcer) -> None:
    """Announce OFFLINE unless that was done: once a peer has shown itself, others wait for it."""
    if announcer.state is PeerState.OFFLINE:
        return
    try:
        await announcer.announce(PeerState.OFFLINE)
    except DirectoryError as error:
        _logger.info("could not announce to the directory that the peer stopped: %s", error)
