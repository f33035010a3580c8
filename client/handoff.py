"""Moves hops of a session to other peers while those that are leaving still serve it.

An understudy is brought to the state of the hop in the background: from the log of the hop before,
which then pushes to both, or from the client's. Between two steps it takes the hop's place.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..protocol.errors import (
    RefusedError,
    RemoteProtocolError,
    RouteError,
    ShoalError,
    UnavailableError,
)
from ..protocol.ids import PeerId
from ..protocol.messages import NextHop
from ..protocol.versions import HANDOFF_VERSION
from .asking import BrokenSegmentError, Question
from .blame import LostHopError
from .deadlines import WakefulTimeout
from .live_hops import LiveHops
from .replay import merge_pieces
from .route_opening import LiveHop
from .router import Hop
from .wiring import StartOverError

if TYPE_CHECKING:
    from .session import RemoteSession

_logger = logging.getLogger(__name__)

_FIRST_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 2.0
"""Between attempts to move: there may be no replica with room, and peers must not be stormed."""

_LAST_STEP_SECONDS = 0.25
"""How long the next step may be held up for an understudy that lacks the newest one. The hop before
pushed that to both, so it is about to be done; if not, tokens go on and it is tried again."""

_NEVER = 2**63
"""A sequence that no step reaches: an understudy pushes nothing."""


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


class CannotMoveError(UnavailableError):
    """A hop has to stay until its peer leaves."""


class Mover:
    """Moves the hops of one session whose peers are leaving, one at a time.

    Owned by the session: `look` begins a task where there is something to do, `stop` ends it.
    """

    def __init__(self, driver: LiveHops, session: RemoteSession) -> None:
        self._driver = driver
        self._session = session
        self._moving: asyncio.Task[None] | None = None
        self._is_stopped = False
        self._rooted: set[LiveHop] = set()  # those that cannot be moved
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
            self._moving.add_done_callback(_read_failure)

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
            self._rooted.intersection_update(hops)
            leaving = [live for live in hops if _is_leaving(live)]
            movable = [live for live in leaving if live not in self._rooted]
            if not movable:
                return None
            # Who says so in every session that it is given would else get it back, and again.
            self._left |= {live.hop.peer.peer_id for live in leaving}
            return _Move(self._driver, self._session, movable[0], self._left)


class _Move:
    """One attempt to move one hop."""

    def __init__(
        self, driver: LiveHops, session: RemoteSession, live: LiveHop, leaving: set[PeerId]
    ) -> None:
        self.live = live
        self._driver = driver
        self._session = session
        self._leaving = leaving
        self._opener, self._asking = driver.make_understudy()
        self._mailbox = self._opener.mailbox
        self._before: LiveHop | None = None
        self._after: LiveHop | None = None
        self._following: NextHop | None = None  # how the hop before knows the new one
        self._mirrored_sequence = 0  # the hop before pushes to both what is behind this step
        self._num_replayed = 0

    async def run(self, tried: set[PeerId]) -> Handoff:
        """Put another hop into the place of this one.

        Adds to `tried` the other peer where it did not work with that one. Raises CannotMoveError
        where it never will, RouteError where nobody else is there, and else what went wrong.
        """
        clock, live = self._driver.clock, self.live
        started_at = clock.now()
        async with self._session.between_steps() as hops:
            self._survey(hops)
            live.tail = []
            log = live.log.copy()
        new = LiveHop(live.hop, None, log, is_log_whole=live.is_log_whole)
        has_moved = False
        try:
            new.hop = await self._driver.find_replica(live.hop, self._leaving | tried)
            self._plan(new)
            await self._opener.open_link(new, self._driver.num_rows, self._driver.make_deadline())
            await self._rehearse(new)
            position, stall_seconds = await self._switch(new)
            has_moved = True
        except (LostHopError, BrokenSegmentError):
            tried.add(new.hop.peer.peer_id)
            raise
        finally:
            live.tail = None
            await self._driver.hang_up(live if has_moved else new)
        seconds = clock.now() - started_at
        return Handoff(live.hop, new.hop, position, seconds, stall_seconds)

    def _survey(self, hops: Sequence[LiveHop]) -> None:
        """See who is around the hop and has what it was sent. Raises CannotMoveError if nobody."""
        self._mirrored_sequence = self._driver.last_sequence
        self._before, self._after = self._find_neighbours(hops)
        if self._before is None:
            if not self.live.is_log_whole:
                raise CannotMoveError("what it was sent is in no log")
        elif self._before.hop.peer.max_version < HANDOFF_VERSION:
            raise CannotMoveError("the peer before it pushes to one other only")

    def _find_neighbours(self, hops: Sequence[LiveHop]) -> tuple[LiveHop | None, LiveHop | None]:
        """Return who pushes to the hop, and to whom it pushes. Raises UnavailableError."""
        if self.live not in hops:
            raise UnavailableError("the hop was replaced meanwhile")
        index = hops.index(self.live)
        before = hops[index - 1] if index > 0 and hops[index - 1].feeds else None
        after = hops[index + 1] if self.live.feeds else None
        if any(live is not None and live.link is None for live in (before, self.live, after)):
            raise UnavailableError("a hop was lost meanwhile")
        return before, after

    def _plan(self, new: LiveHop) -> None:
        """Settle who is to push to whom. Raises LostHopError where they cannot."""
        before, after = self._before, self._after
        if not self.live.capability:
            return
        can_feed = self._driver.wiring.can_feed
        if (
            new.hop.peer.max_version < HANDOFF_VERSION
            or (before is not None and not can_feed(before.hop, new.hop))
            or (after is not None and not can_feed(new.hop, after.hop))
        ):
            raise LostHopError(new.hop, "the peer cannot stand between the hops around")
        new.capability = self._opener.make_capability(new.hop.span)
        if after is not None:
            new.feeds, new.next = True, self._name(after, _NEVER)

    def _name(self, live: LiveHop, first_sequence: int = 0) -> NextHop:
        assert live.link is not None
        peer, capability = live.hop.peer, self._opener.make_capability(live.hop.span)
        return NextHop(
            peer.peer_id,
            peer.endpoints,
            live.link.session,
            self._opener.epoch,
            capability,
            first_sequence,
        )

    async def _rehearse(self, new: LiveHop) -> None:
        """Bring the new hop to about the state of the old one, while tokens go on."""
        if self._before is None:
            await self._replay(new)
            while len(self._tail) > 1:
                await self._follow(new)
            return
        assert new.link is not None
        self._mailbox.expect_replay(new.link.session)
        self._following = self._name(new)
        status = await self._driver.wiring.mirror(self._before, self._following)
        if status.num_replayed == 0:
            raise CannotMoveError("the peer before it has not kept what it pushed")
        self._mirrored_sequence = max(self._mirrored_sequence, status.done_sequence)
        self._num_replayed = status.num_replayed
        await self._wait_for(new, self._num_replayed)

    @property
    def _tail(self) -> list[Question]:
        tail = self.live.tail
        assert tail is not None  # nobody else moves this hop
        return tail

    async def _replay(self, new: LiveHop) -> None:
        max_tokens = self._driver.max_piece_tokens(self._driver.num_rows)
        for sequence, piece in enumerate(merge_pieces(new.log.plan_replay(), max_tokens), 1):
            question = Question(
                piece.hidden_BTH,
                piece.position,
                is_decoded=piece.is_decoded,
                last_token_only=True,
                is_piece=True,
                sequence=sequence,
            )
            await self._asking.ask([new], question, is_replay=True)

    async def _follow(self, new: LiveHop) -> None:
        """Have the new hop take the oldest step that only the other one has taken."""
        question = self._tail[0]
        await self._asking.ask([new], replace(question, last_token_only=True, is_piece=True))
        hidden_BTH = question.hidden_BTH
        new.log.append(
            question.position,
            hidden_BTH.shape[1],
            hidden_BTH,
            question.row_map,
            question.is_decoded,
        )
        self._tail.pop(0)

    async def _wait_for(self, new: LiveHop, sequence: int) -> None:
        """Wait until the new hop has done a step that the hop before pushed to it.

        Raises LostHopError. Nobody is blamed where nothing comes: it may be any of the two, and the
        hop before is in use.
        """
        num_tokens = self._driver.num_rows * self._session.position
        seconds = self._asking.choose_timeout_seconds([new], num_tokens)
        try:
            async with WakefulTimeout(seconds):
                await self._hear(new, sequence)
        except TimeoutError:
            detail = f"no replay arrived within {seconds:.1f} s"
            raise LostHopError(new.hop, detail) from None

    async def _hear(self, new: LiveHop, sequence: int) -> None:
        assert new.link is not None
        session = new.link.session
        while self._mailbox.take_output(session, sequence) is None:
            error = self._mailbox.trouble(session)
            if isinstance(error, UnavailableError | RemoteProtocolError | RefusedError):
                raise await self._asking.lose(new, error) from error
            await self._mailbox.wait()

    async def _switch(self, new: LiveHop) -> tuple[int, float]:
        """Put the new hop into place between two steps; return where, and how long that took."""
        clock, session = self._driver.clock, self._session
        while True:
            await self._catch_up(new)
            async with session.between_steps() as hops:
                began_at = clock.now()
                if self._find_neighbours(hops) != (self._before, self._after):
                    raise UnavailableError("the hops around it have changed")
                if await self._is_ready(new):
                    await self._take_place(new)
                    hops[hops.index(self.live)] = new
                    return session.position, clock.now() - began_at
                newest = self._newest_sequence
            await self._wait_for(new, newest)

    async def _catch_up(self, new: LiveHop) -> None:
        """Wait until the new hop lacks no more than the step under way, while tokens go on."""
        if self._before is None:
            return
        while (last_done := self._driver.last_sequence - 1) > self._mirrored_sequence:
            await self._wait_for(new, last_done)
            if last_done == self._driver.last_sequence - 1:
                return

    @property
    def _newest_sequence(self) -> int:
        """The number under which the new hop does the newest step, or the end of its replay."""
        newest = self._driver.last_sequence
        return newest if newest > self._mirrored_sequence else self._num_replayed

    async def _is_ready(self, new: LiveHop) -> bool:
        """Have the new hop do what is left; return whether it has all that the old one has."""
        if self._before is None:
            while self._tail:
                await self._follow(new)
            return True
        try:
            async with WakefulTimeout(_LAST_STEP_SECONDS):
                await self._hear(new, self._newest_sequence)
        except TimeoutError:
            return False
        return True

    async def _take_place(self, new: LiveHop) -> None:
        driver = self._driver
        assert new.link is not None
        if not new.capability:
            return
        new.link.listen(driver.mailbox)
        try:
            await driver.wiring.hand_over(
                new, self._before, self._following, self._after, driver.last_sequence + 1
            )
        except BaseException:
            # Who pushes where is not known any more: the next step begins with a failover.
            await driver.hang_up(self.live)
            raise


def _read_failure(moving: asyncio.Task[None]) -> None:
    if not moving.cancelled() and (error := moving.exception()) is not None:
        _logger.error("hops of a session are not moved any more", exc_info=error)


def _is_leaving(live: LiveHop) -> bool:
    return live.link is not None and live.link.is_leaving
