"""Replaces hops: for each hop whose peer leaves, and for every hop of a session with hot standbys,
another peer is brought to its state.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from ...protocol.errors import RouteError, ShoalError, UnavailableError
from ...protocol.ids import PeerId
from ...protocol.net.clock import SuspendAwareTimeout
from ...protocol.net.retry import Backoff, Retry
from ...protocol.net.tasks import cancel_all
from ..concurrency.tasks import Background
from ..routing.route import LostHopError
from ..trace.trace import Handoff
from .hop_link import BrokenSegmentError, LiveHop, MissingHops, StartOverError
from .standby import CannotMoveError, Standby, SteppedSession

_logger = logging.getLogger(__name__)

_AGAIN = Backoff(0.1, 10.0)
"""Between attempts to find a standby: there may be no replica with room."""

_MOVE_AGAIN = Backoff(0.1, 2.0)
"""The same for a hop whose peer leaves, which waits some seconds for its sessions."""

_CATCH_UP_SECONDS = 0.5
"""How long a step may wait for a standby that lacks some steps; a replay is the other way."""


class Replacements:
    """The standbys of one session: of hops whose peers leave, and, with hot standbys, of all hops
    for which there is a replica.

    It begins and ends tasks as the hops change; `stop` ends all.
    """

    def __init__(self, session: SteppedSession) -> None:
        self._session = session
        self._by_hop: dict[LiveHop, _Replacement] = {}
        self._left: set[PeerId] = set()  # peers that ever announced to leave
        self._background = Background()
        self._is_stopped = False

    @property
    def ready(self) -> list[LiveHop]:
        """The hops whose standby could take over now."""
        return [live for live, one in self._by_hop.items() if one.is_ready]

    def follow_hops(self) -> None:
        """Keep a standby for each hop in use that is to have one, and for no others."""
        if self._is_stopped:
            return
        hops, keeps_all = self._session.live_hops, self._session.state.config.standby
        # Otherwise a peer that says so in every session would get the session back, over and over.
        self._left |= {live.hop.peer.peer_id for live in hops if live.is_leaving}
        known = list(self._by_hop.items())
        for live in [live for live, one in known if not one.fits(hops)]:
            self._background.begin_closing(self._by_hop.pop(live))
        used = {live.hop.peer.peer_id for live in hops}
        for live in hops:
            if live not in self._by_hop and (live.is_leaving or keeps_all):
                self._by_hop[live] = _Replacement(
                    self._session, live, self._background, self.follow_hops
                )
            if live in self._by_hop:
                self._by_hop[live].look(self._left if live.is_leaving else self._left | used)

    def drop(self) -> None:
        """Give all of them up: what they have is not what the hops will have."""
        self._background.begin_closing(*self._by_hop.values())
        self._by_hop.clear()

    async def take_over(self, live: LiveHop, missing: MissingHops) -> LiveHop | None:
        """Return the standby of a lost hop, in its place; None: it has none that can.

        Raises BrokenSegmentError when a hop before or after is lost as well.
        """
        replacement = self._by_hop.pop(live, None)
        if replacement is None:
            return None
        new = None
        try:
            new = await replacement.take_over(missing)
        finally:
            if new is None:
                self._background.begin_closing(replacement)
        return new

    async def stop(self) -> None:
        """End all of them, for good."""
        self._is_stopped = True
        self.drop()
        await self._background.finish()


class _Replacement:
    """The standby of one hop: looked for, kept up, and looked for again when it is lost.

    It takes the hop's place once the peer of the hop leaves, which `note_moved` then hears of.
    """

    def __init__(
        self,
        session: SteppedSession,
        live: LiveHop,
        background: Background,
        note_moved: Callable[[], None],
    ) -> None:
        self._session = session
        self._live = live
        self._note_moved = note_moved
        self._is_moving = live.is_leaving  # was from the beginning
        self._avoided: set[PeerId] = set()
        self._tried: set[PeerId] = set()
        self._standby: Standby | None = None  # one that has, or nearly has, all
        self._is_taken = False
        self._following = asyncio.Lock()
        self._news = asyncio.Event()
        self._retry = Retry(_MOVE_AGAIN if live.is_leaving else _AGAIN, session.state.clock)
        self._task = background.start(self._run())

    @property
    def is_ready(self) -> bool:
        """Return whether it could take over now."""
        return self._standby is not None

    def fits(self, hops: Sequence[LiveHop]) -> bool:
        """Return whether it may go on, now that these are the hops."""
        if self._live not in hops:
            return False
        if self._standby is None:
            return self._is_moving or not self._live.is_leaving
        return self._standby.fits(hops)

    def look(self, avoided: set[PeerId]) -> None:
        """Go on with what has changed; a standby at the peers that are `avoided` is of no use."""
        self._avoided = avoided
        self._news.set()

    async def close(self) -> None:
        """Give it up, unless it was taken."""
        await cancel_all((self._task,))

    async def take_over(self, missing: MissingHops) -> LiveHop | None:
        """Return the new hop in its place; None where it cannot be had at once.

        Raises BrokenSegmentError when a hop before or after is lost as well.
        """
        standby = self._standby
        if standby is None or standby.before is not missing.before or len(missing.pending) != 1:
            return None
        if (standby.after is None) != (missing.after is None):
            return None
        try:
            async with SuspendAwareTimeout(_CATCH_UP_SECONDS), self._following:
                await standby.follow_all()
            if standby.is_lost or not await standby.take_place(
                missing.after, missing.pending[0], is_under_way=True
            ):
                return None
        except (TimeoutError, ShoalError, StartOverError) as error:
            _logger.info(
                "the standby of blocks %s failed to take over: %s", self._live.hop.span, error
            )
            return None
        self._is_taken = True
        try:
            await self.close()
        except asyncio.CancelledError:
            await self._session.exchange.hang_up(standby.new)
            raise
        return standby.new

    async def _run(self) -> None:
        while self._live in self._session.live_hops and self._live.link is not None:
            try:
                return await self._keep()
            except CannotMoveError as error:
                _logger.info("no standby for blocks %s: %s", self._live.hop.span, error)
                if self._is_moving:
                    return
                self._retry.wait_longest()  # it may have been for want of room
            except (ShoalError, BrokenSegmentError, StartOverError) as error:
                _logger.info("no standby for blocks %s yet: %s", self._live.hop.span, error)
                if isinstance(error, RouteError):
                    self._tried.clear()  # one of them may have room by now
            self._retry.note_failure()
            await self._retry.pause()

    async def _keep(self) -> None:
        """Bring a peer to the state of the hop and keep it there, until it has taken its place.

        Raises what goes wrong.
        """
        standby, clock = Standby(self._session, self._live), self._session.state.clock
        started_at = clock.now()
        try:
            await standby.prepare(self._avoided | self._tried)
            self._standby = standby
            self._retry.reset()
            if not self._live.is_leaving:
                await self._follow(standby)
                started_at = clock.now()
            await self._switch(standby, started_at)
        except (LostHopError, BrokenSegmentError):
            self._tried.add(standby.new.hop.peer.peer_id)
            raise
        finally:
            self._standby = None
            standby.end()
            if not self._is_taken:
                await self._session.exchange.hang_up(standby.new)

    async def _follow(self, standby: Standby) -> None:
        """Have the standby take every step that the hop has taken, until the hop has to move."""
        while True:
            async with self._following:
                await standby.follow_all()
            await standby.catch_up()
            if self._live.is_leaving:
                return
            if standby.new.is_leaving:
                raise LostHopError(standby.new.hop, "its peer will stop soon")
            self._news.clear()
            await self._news.wait()

    async def _switch(self, standby: Standby, started_at: float) -> None:
        """Put the new hop into the place of the one that leaves, between two steps."""
        session, clock, live = self._session, self._session.state.clock, self._live
        while True:
            await standby.catch_up()
            async with session.between_steps() as hops:
                held_up_at = clock.now()
                _, after = standby.find_neighbours(hops)
                if not standby.fits(hops):
                    raise UnavailableError("the hops around it have changed")
                if await standby.is_ready():
                    await self._put_in_place(standby, after)
                    hops[hops.index(live)] = standby.new
                    seconds, stall_seconds = clock.now() - started_at, clock.now() - held_up_at
                    replacement, position = standby.new.hop, session.position
                    handoff = Handoff(live.hop, replacement, position, seconds, stall_seconds)
                    session.note_handoff(handoff, started_at)  # a step may end this task from here
                    break
                newest = standby.newest_sequence
            await standby.wait_for(newest)
        await session.exchange.hang_up(live)
        self._note_moved()

    async def _put_in_place(self, standby: Standby, after: LiveHop | None) -> None:
        session = self._session
        if standby.is_lost:
            raise UnavailableError("the new hop was lost meanwhile")
        try:
            await standby.take_place(after, session.state.last_sequence + 1, is_under_way=False)
        except BaseException:
            # The pushing hops are no longer known: the next step begins with a failover.
            await session.exchange.hang_up(self._live)
            raise
        self._is_taken = True
