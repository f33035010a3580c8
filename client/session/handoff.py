"""Moves hops of a session to other peers while those that are leaving still serve it.

An understudy is brought to the state of the hop in the background, and takes its place between two
steps.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakSet

from ...protocol.errors import RouteError, ShoalError, UnavailableError
from ...protocol.ids import PeerId
from ..routing.peer_book import LostHopError
from ..routing.route import Hop
from ..trace.trace import Move
from .asking import BrokenSegmentError
from .live_hops import LiveHops
from .route_opening import LiveHop
from .understudy import CannotMoveError, Understudy, read_failure
from .wiring import StartOverError

if TYPE_CHECKING:
    from .session import RemoteSession

_logger = logging.getLogger(__name__)

_FIRST_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 2.0
"""Between attempts to move: there may be no replica with room, and peers must not be stormed."""


@dataclass(frozen=True)
class Handoff:
    """One planned change of hop, for whoever watches.

    `seconds` runs from the beginning of the move to its end; for `stall_seconds` of them the
    session could take no step.
    """

    left: Hop
    replacement: Hop
    position: int
    seconds: float
    stall_seconds: float


class Mover:
    """Moves the hops of one session whose peers are leaving, one at a time.

    Owned by the session: `look` begins a task where there is something to do, `stop` ends it.
    """

    def __init__(self, driver: LiveHops, session: RemoteSession) -> None:
        self._driver = driver
        self._session = session
        self._moving: asyncio.Task[None] | None = None
        self._is_stopped = False
        # Weak: a hop that the session drops takes its log with it.
        self._rooted = WeakSet[LiveHop]()  # those that cannot be moved
        self._tried = WeakSet[LiveHop]()  # those that could not yet: others come before them
        self._left: set[PeerId] = set()  # who ever said that it leaves
        self.handoffs: list[Handoff] = []
        driver.notify(self._begin)

    def look(self, hops: Sequence[LiveHop]) -> None:
        """Begin to move those of the hops that have to leave, unless that is under way."""
        if any(_is_leaving(live) for live in hops):
            self._begin()

    def _begin(self) -> None:
        if not self._is_stopped and (self._moving is None or self._moving.done()):
            self._moving = asyncio.create_task(self._move_all(), name="moving hops")
            self._moving.add_done_callback(read_failure)

    async def stop(self) -> None:
        """End what is under way, for good."""
        self._is_stopped = True
        if self._moving is not None:
            self._moving.cancel()
            await asyncio.wait((self._moving,))

    async def _move_all(self) -> None:
        tried: set[PeerId] = set()
        pause_seconds = _FIRST_PAUSE_SECONDS
        while (move := await self._plan_move()) is not None:
            span = move.live.hop.span
            try:
                self.handoffs.append(await move.run(tried))
            except CannotMoveError as error:
                _logger.info("blocks %s stay where they are: %s", span, error)
                self._rooted.add(move.live)
            except (ShoalError, BrokenSegmentError, StartOverError) as error:
                _logger.info("blocks %s were not moved: %s", span, error)
                self._tried.add(move.live)
                if isinstance(error, RouteError):
                    tried.clear()  # one of them may have room by now
                await asyncio.sleep(pause_seconds)
                pause_seconds = min(2 * pause_seconds, _LONGEST_PAUSE_SECONDS)
            else:
                _logger.info("moved blocks %s", span)
                tried.clear()
                pause_seconds = _FIRST_PAUSE_SECONDS

    async def _plan_move(self) -> _Move | None:
        """Return the move of the first hop that has to leave and can."""
        async with self._session.between_steps() as hops:
            leaving = [live for live in hops if _is_leaving(live)]
            movable = [live for live in leaving if live not in self._rooted]
            if not movable:
                return None
            # Who says so in every session that it is given would else get it back, and again.
            self._left |= {live.hop.peer.peer_id for live in leaving}
            fresh = [live for live in movable if live not in self._tried]
            if not fresh:
                self._tried.clear()
            return _Move(self._driver, self._session, (fresh or movable)[0], self._left)


class _Move:
    """One attempt to move one hop."""

    def __init__(
        self, driver: LiveHops, session: RemoteSession, live: LiveHop, leaving: set[PeerId]
    ) -> None:
        self.live = live
        self._driver = driver
        self._session = session
        self._leaving = leaving
        self._understudy = Understudy(driver, session, live)

    async def run(self, tried: set[PeerId]) -> Handoff:
        """Put another hop into the place of this one.

        Adds to `tried` the other peer where it did not work with that one. Raises CannotMoveError
        where it never will, RouteError where nobody else is there, and else what went wrong.
        """
        clock, live, understudy = self._driver.clock, self.live, self._understudy
        started_at = clock.now()
        has_moved = False
        try:
            async with self._session.between_steps() as hops:
                understudy.survey(hops)
            await understudy.prepare(self._leaving | tried)
            position, stall_seconds = await self._switch()
            has_moved = True
            ended_at = clock.now()
        except (LostHopError, BrokenSegmentError):
            tried.add(understudy.new.hop.peer.peer_id)
            raise
        finally:
            understudy.end()
            await self._driver.hang_up(live if has_moved else understudy.new)
        new = understudy.new.hop
        if (recorder := self._driver.recorder) is not None:
            step = recorder.step
            recorder.add(Move(step, started_at, ended_at, new, live.hop, position, stall_seconds))
        return Handoff(live.hop, new, position, ended_at - started_at, stall_seconds)

    async def _switch(self) -> tuple[int, float]:
        """Put the new hop into place between two steps; return where, and how long that took."""
        clock, session, understudy = self._driver.clock, self._session, self._understudy
        while True:
            await understudy.catch_up()
            async with session.between_steps() as hops:
                began_at = clock.now()
                if understudy.find_neighbours(hops) != (understudy.before, understudy.after):
                    raise UnavailableError("the hops around it have changed")
                if await understudy.is_ready():
                    await self._take_place()
                    hops[hops.index(self.live)] = understudy.new
                    return session.position, clock.now() - began_at
                newest = understudy.newest_sequence
            await understudy.wait_for(newest)

    async def _take_place(self) -> None:
        driver, understudy = self._driver, self._understudy
        new = understudy.new
        assert new.link is not None
        if not new.capability:
            return
        new.link.listen(driver.mailbox)
        try:
            await driver.wiring.hand_over(
                new,
                understudy.before,
                understudy.following,
                understudy.after,
                driver.last_sequence + 1,
            )
        except BaseException:
            # Who pushes where is not known any more: the next step begins with a failover.
            await driver.hang_up(self.live)
            raise


def _is_leaving(live: LiveHop) -> bool:
    return live.link is not None and live.link.is_leaving
