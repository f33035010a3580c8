"""Hot standbys: for each hop of a session another peer that has all that the hop has, and takes its
place at once when it is lost.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from ...protocol.errors import RouteError, ShoalError, UnavailableError
from ...protocol.ids import PeerId
from ...protocol.net.clock import SuspendAwareTimeout
from ...protocol.net.retry import Backoff, Retry
from ..concurrency.tasks import Closer
from ..routing.route import LostHopError
from ..trace.trace import Observer
from .handoff import CannotMoveError, Mover, Standby, SteppedSession, read_failure
from .hop_link import BrokenSegmentError, LiveHop, MissingHops, StartOverError

_logger = logging.getLogger(__name__)

_AGAIN = Backoff(0.1, 10.0)
"""Between attempts to find a standby: there may be no replica with room."""

_CATCH_UP_SECONDS = 0.5
"""How long a step may wait for a standby that lacks some steps; a replay is the other way."""


def prepare_replacements(session: SteppedSession) -> Standbys | None:
    """Let a session move from peers that leave; return its standbys, if it is to have any."""
    state = session.state
    state.observers.append(Mover(session))
    if not state.config.standby:
        return None
    standbys = Standbys(session)
    state.observers.append(standbys)
    return standbys


class Standbys(Observer):
    """The standbys of one session, one for each of its hops where there is a replica.

    It begins and ends tasks as the hops change, after each step; `stop` ends all.
    """

    def __init__(self, session: SteppedSession) -> None:
        self._session = session
        self._keepers: dict[LiveHop, _StandbyKeeper] = {}
        self._closer = Closer()
        self._is_stopped = False

    @property
    def ready(self) -> list[LiveHop]:
        """The hops whose standby could take over now."""
        return [live for live, keeper in self._keepers.items() if keeper.is_ready]

    def follow_step(self) -> None:
        """Keep a standby for each of the hops that are in use now, and for no others."""
        if self._is_stopped:
            return
        hops = self._session.live_hops
        known = list(self._keepers.items())
        for live in [live for live, keeper in known if not keeper.fits(hops)]:
            self._closer.begin(self._keepers.pop(live))
        used = {live.hop.peer.peer_id for live in hops}
        for live in hops:
            if live not in self._keepers:
                self._keepers[live] = _StandbyKeeper(self._session, live)
            self._keepers[live].look(used)

    def drop(self) -> None:
        """Give all of them up: what they have is not what the hops will have."""
        self._closer.begin(*self._keepers.values())
        self._keepers.clear()

    async def take_over(self, live: LiveHop, missing: MissingHops) -> LiveHop | None:
        """Return the standby of a lost hop, in its place; None: it has none that can.

        Raises BrokenSegmentError when a hop before or after is lost as well.
        """
        keeper = self._keepers.pop(live, None)
        if keeper is None:
            return None
        new = None
        try:
            new = await keeper.take_over(missing)
        finally:
            if new is None:
                self._closer.begin(keeper)
        return new

    async def stop(self) -> None:
        """End all of them, for good."""
        self._is_stopped = True
        self.drop()
        await self._closer.finish()


class _StandbyKeeper:
    """The standby of one hop: looked for, kept up, and looked for again when it is lost."""

    def __init__(self, session: SteppedSession, live: LiveHop) -> None:
        self._session = session
        self._live = live
        self._used: set[PeerId] = set()
        self._tried: set[PeerId] = set()
        self._standby: Standby | None = None  # one that has, or nearly has, all
        self._is_taken = False
        self._following = asyncio.Lock()
        self._news = asyncio.Event()
        self._retry = Retry(_AGAIN, session.state.clock)
        self._task = asyncio.create_task(self._run(), name="keeping a standby")
        self._task.add_done_callback(read_failure)

    @property
    def is_ready(self) -> bool:
        """Return whether it could take over now."""
        return self._standby is not None

    def fits(self, hops: Sequence[LiveHop]) -> bool:
        """Return whether it may go on, now that these are the hops."""
        if self._live not in hops:
            return False
        return self._standby is None or self._standby.fits(hops)

    def look(self, used: set[PeerId]) -> None:
        """Go on with what a step has changed; `used` are the peers of all hops."""
        self._used = used
        self._news.set()

    async def close(self) -> None:
        """Give it up, unless it was taken."""
        self._task.cancel()
        await asyncio.wait((self._task,))

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
            if not await standby.take_over(missing.after, missing.pending[0]):
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
        while True:
            try:
                await self._keep()
            except CannotMoveError as error:
                # It may have been for want of room.
                _logger.info("no standby for blocks %s: %s", self._live.hop.span, error)
                self._retry.wait_longest()
            except (ShoalError, BrokenSegmentError, StartOverError) as error:
                _logger.info("no standby for blocks %s yet: %s", self._live.hop.span, error)
                if isinstance(error, RouteError):
                    self._tried.clear()  # one of them may have room by now
            self._retry.note_failure()
            await self._retry.pause()

    async def _keep(self) -> None:
        """Bring a peer to the state of the hop and keep it there; raises what ends that."""
        standby = Standby(self._session, self._live)
        try:
            self._check_stays()
            await standby.prepare(self._used | self._tried)
            self._standby = standby
            self._retry.reset()
            await self._follow(standby)
        except (LostHopError, BrokenSegmentError):
            self._tried.add(standby.new.hop.peer.peer_id)
            raise
        finally:
            self._standby = None
            standby.end()
            if not self._is_taken:
                await self._session.exchange.hang_up(standby.new)

    def _check_stays(self) -> None:
        """Raise UnavailableError where the hop moves: the one before pushes to one more at most."""
        if self._live.link is not None and self._live.link.is_leaving:
            raise UnavailableError("the hop will be moved")

    async def _follow(self, standby: Standby) -> None:
        """Have the standby take every step that the hop has taken, until something is wrong."""
        while True:
            async with self._following:
                await standby.follow_all()
            await standby.catch_up()
            standby.check_stays()
            self._check_stays()
            self._news.clear()
            await self._news.wait()
