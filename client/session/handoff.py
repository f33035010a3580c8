"""Moves hops of a session to other peers while those that are leaving still serve it.

A standby is another peer that is brought to the state of a hop in use, beside it, while tokens
go on. It gets what the hop got from the log of the hop before, which then pushes to both, or from
the client's log where the client sends to the hop itself. Between two steps it takes the place of
the hop. Hot standbys (`standby.py`) are kept ready in the same way, in case their hops are lost.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Protocol
from weakref import WeakSet

from ...protocol.errors import (
    RefusedError,
    RemoteProtocolError,
    RouteError,
    ShoalError,
    UnavailableError,
)
from ...protocol.ids import PeerId, SessionId
from ...protocol.messages.session import Mirror, NextHop, Status
from ...protocol.net.clock import SuspendAwareTimeout
from ...protocol.net.retry import Backoff, Retry
from ...protocol.versions import HANDOFF_VERSION
from ..routing.route import Ends, LostHopError
from ..trace.trace import Handoff, Observer
from .exchange import Exchange, merge_pieces
from .hop_link import (
    BrokenSegmentError,
    LiveHop,
    Mailbox,
    Question,
    StartOverError,
    UnaskedOutputsError,
)
from .hops import HopFinder
from .push_plan import PushPlan, make_next_hop
from .state import SessionContext

_logger = logging.getLogger(__name__)

_AGAIN = Backoff(0.1, 2.0)
"""Between attempts to move: there may be no replica with room, and peers must not be stormed."""

_LAST_STEP_SECONDS = 0.25
"""How long a step may be held up for a standby that lacks the newest one. The hop before pushed
that to both, so it is about to be done."""

_NEVER = 2**63
"""A sequence that no step reaches: a standby pushes nothing."""


class SteppedSession(Protocol):
    """A session, beside whose steps hops are asked and linked; see `RemoteSession`."""

    state: SessionContext
    exchange: Exchange
    plan: PushPlan
    mailbox: Mailbox

    @property
    def position(self) -> int: ...
    @property
    def live_hops(self) -> Sequence[LiveHop]: ...
    def between_steps(self) -> AbstractAsyncContextManager[list[LiveHop]]: ...
    def note_handoff(self, handoff: Handoff, started_at: float) -> None: ...


class CannotMoveError(UnavailableError):
    """Nobody can be brought to the state of a hop."""


class Standby:
    """A hop that is not in use yet, `new`, and the hop `live` whose place it is to take.

    `before` pushes to both, or None where the client sends to them itself; the live hop pushes to
    `after`. Made anew for each attempt; `end` has to be called, and a `new` that is not used is to
    be hung up on.
    """

    def __init__(self, session: SteppedSession, live: LiveHop) -> None:
        self.live = live
        self.new = LiveHop(live.hop, None, live.log, is_log_whole=live.is_log_whole)
        self.before: LiveHop | None = None
        self.after: LiveHop | None = None
        self.following: NextHop | None = None
        """How the hop before knows the new one."""
        self._session = session
        self._state = session.state  # of the session; that of the new hop is another one
        self._twin = self._state.make_twin()
        self._mailbox = Mailbox(lambda: session.state.last_sequence)
        self._finder = HopFinder(self._twin, self._mailbox)
        self._exchange = Exchange(self._twin, self._mailbox)
        self._tail: list[Question] = []  # what the live hop was sent and the new one was not
        self._mirrored_sequence = 0  # the hop before pushes to both what is behind this step
        self._num_replayed = 0

    def _survey(self, hops: Sequence[LiveHop]) -> None:
        """See who is around the hop and has what it was sent, between two steps.

        Raises CannotMoveError where nobody has, UnavailableError where hops are lost.
        """
        live = self.live
        self._mirrored_sequence = self._state.last_sequence
        self.before, self.after = self.find_neighbours(hops)
        if self.before is None:
            if not live.is_log_whole:
                raise CannotMoveError("no log holds the steps that it received")
        elif self.before.hop.peer.max_version < HANDOFF_VERSION:
            raise CannotMoveError("the hop before it can push to one peer only")
        live.tails.append(self._tail)
        self.new.log = live.log.copy()

    def find_neighbours(self, hops: Sequence[LiveHop]) -> tuple[LiveHop | None, LiveHop | None]:
        """Return the hop that pushes to this one, and its next hop. Raises UnavailableError."""
        if self.live not in hops:
            raise UnavailableError("the hop was replaced meanwhile")
        index = hops.index(self.live)
        before = hops[index - 1] if index > 0 and hops[index - 1].feeds else None
        after = hops[index + 1] if self.live.feeds else None
        if any(live is not None and live.link is None for live in (before, self.live, after)):
            raise UnavailableError("a hop was lost meanwhile")
        return before, after

    def fits(self, hops: Sequence[LiveHop]) -> bool:
        """Return whether who pushes where around the live hop is as it was surveyed.

        Another hop behind it makes no difference, none, or one for the first time, does.
        """
        try:
            before, after = self.find_neighbours(hops)
        except UnavailableError:
            return True  # a step will find replacements
        return before is self.before and (after is None) == (self.after is None)

    async def prepare(self, exclude: Collection[PeerId]) -> None:
        """Open a session at another peer and bring it to about the state of the live hop.

        Raises CannotMoveError where it never will work, RouteError where nobody else is there, and
        LostHopError or BrokenSegmentError where it did not work with that peer, `new.hop.peer`.
        """
        async with self._session.between_steps() as hops:
            self._survey(hops)
        self.new.hop = await self._finder.find_replica(self.live.hop, exclude, self._ends)
        self._plan()
        await self._finder.open_link(self.new, self._state.make_deadline())
        await self._rehearse()

    @property
    def _ends(self) -> Ends | None:
        """The neighbours of the hop in a chain; None in a star."""
        if not self.live.capability:
            return None
        before, after = (live and live.hop.peer for live in (self.before, self.after))
        return Ends(before, after)

    def end(self) -> None:
        """Take down nothing more of what the live hop is sent."""
        tails = self.live.tails
        self.live.tails = [tail for tail in tails if tail is not self._tail]

    def _plan(self) -> None:
        """Set up pushing between the hops. Raises LostHopError where they cannot connect."""
        new, before, after = self.new, self.before, self.after
        if not self.live.capability:
            return
        can_feed = self._session.plan.can_feed
        if (
            new.hop.peer.max_version < HANDOFF_VERSION
            or (before is not None and not can_feed(before.hop, new.hop))
            or (after is not None and not can_feed(new.hop, after.hop))
        ):
            raise LostHopError(new.hop, "the peer cannot connect to the hops before and after it")
        new.capability = self._twin.make_capability(new.hop.span)
        if after is not None:
            new.feeds, new.next = True, make_next_hop(self._twin, after, _NEVER)

    async def _rehearse(self) -> None:
        """Bring the new hop to about the state of the old one, while tokens go on."""
        if self.before is None:
            await self.replay()
            while self._has_much_to_follow:
                await self.follow()
            return
        self._mailbox.expect_replay(self.session_id)
        self.following = make_next_hop(self._twin, self.new)
        status = await self._mirror(self.before, self.following)
        if status.num_replayed == 0:
            raise CannotMoveError(
                "the hop before it no longer has its pushed steps in its sender log"
            )
        self._mirrored_sequence = max(self._mirrored_sequence, status.done_sequence)
        self._num_replayed = status.num_replayed
        await self.wait_for(self._num_replayed)

    @property
    def session_id(self) -> SessionId:
        """The id of the session at the new hop."""
        assert self.new.link is not None
        return self.new.link.session

    @property
    def _has_much_to_follow(self) -> bool:
        """Whether what the new hop lacks is more than one token, which it may be given when the
        next step is held up for it: a piece of a prompt takes long.
        """
        return sum(question.hidden_BTH.shape[1] for question in self._tail) > 1

    async def replay(self) -> None:
        pieces = self.new.log.plan_replay()
        for question in merge_pieces(pieces, self._state.max_piece_tokens):
            await self._exchange.ask([self.new], question, is_replay=True)

    async def _mirror(self, before: LiveHop, following: NextHop) -> Status:
        """Have the hop before push to the new one as well; it is not lost when that fails."""
        if before.link is None:
            raise UnavailableError("a hop was lost meanwhile")
        message = Mirror(before.link.session, self._state.epoch, following)
        return await self._session.exchange.ask_status(before, message)

    async def follow(self) -> None:
        """Have the new hop take the oldest step that only the live one has taken."""
        question = self._tail[0]
        await self._exchange.ask([self.new], replace(question, last_token_only=True, is_piece=True))
        hidden_BTH = question.hidden_BTH
        self.new.log.append(
            question.position,
            hidden_BTH.shape[1],
            hidden_BTH,
            question.row_map,
            question.is_decoded,
        )
        self._tail.pop(0)

    async def follow_all(self) -> None:
        """Have the new hop take every step that only the live one has taken."""
        while self._tail:
            await self.follow()

    async def wait_for(self, sequence: int) -> None:
        """Wait until the new hop has done a step that the hop before pushed to it.

        Raises LostHopError. Nobody is blamed where nothing comes: it may be any of the two, and the
        hop before is in use.
        """
        num_tokens = self._state.num_rows * self._session.position
        seconds = self._exchange.choose_timeout_seconds([self.new], num_tokens)
        pushing = [] if self.before is None else [self.before, self.new]
        try:
            with self._exchange.pushing(pushing, num_tokens) as pushing_seconds:
                seconds += pushing_seconds
                async with SuspendAwareTimeout(seconds):
                    await self._hear(sequence)
        except TimeoutError:
            detail = f"no replay arrived within {seconds:.1f} s"
            raise LostHopError(self.new.hop, detail) from None

    async def _hear(self, sequence: int) -> None:
        """Wait for the output of a step; raises LostHopError where something is wrong instead."""
        while self._mailbox.take_output(self.session_id, sequence) is None:
            await self._check_sound()
            await self._mailbox.wait()

    async def _check_sound(self) -> None:
        error = self._mailbox.trouble(self.session_id)
        if isinstance(error, UnaskedOutputsError) and self.before is not None:
            raise LostHopError(self.new.hop, str(error)) from error  # that may have pushed them
        if isinstance(error, UnavailableError | RemoteProtocolError | RefusedError):
            raise await self._exchange.lose(self.new, error) from error

    async def catch_up(self) -> None:
        """Wait until the new hop lacks no more than the step under way, while tokens go on."""
        if self.before is None:
            return
        while (last_done := self._state.last_sequence - 1) > self._mirrored_sequence:
            await self.wait_for(last_done)
            if last_done == self._state.last_sequence - 1:
                return

    @property
    def newest_sequence(self) -> int:
        """The number under which the new hop does the newest step, or the end of its replay."""
        newest = self._state.last_sequence
        return newest if newest > self._mirrored_sequence else self._num_replayed

    async def is_ready(self) -> bool:
        """Have the new hop do what is left; return whether it has all that the live one has.

        Call it between two steps.
        """
        if self.before is None:
            await self.follow_all()
            await self._check_sound()
            return True
        try:
            async with SuspendAwareTimeout(_LAST_STEP_SECONDS):
                await self._hear(self.newest_sequence)
        except TimeoutError:
            return False
        return True

    def check_stays(self) -> None:
        """Raise LostHopError where the peer of the new hop is about to stop."""
        assert self.new.link is not None
        if self.new.link.is_leaving:
            raise LostHopError(self.new.hop, "its peer will stop soon")

    async def take_over(self, after: LiveHop | None, sequence: int) -> bool:
        """Put the new hop into the place of a lost one, with a step under way.

        Returns False where it is lost itself, or the hop before has stopped pushing to it. Raises
        BrokenSegmentError when one of the others is lost. The link of the new hop is hung up then.
        """
        session, new = self._session, self.new
        if new.link is None or self._mailbox.trouble(self.session_id) is not None:
            return False
        new.link.listen(session.mailbox)
        if not new.capability:
            return True
        has_taken = False
        try:
            if after is None:
                session.mailbox.expect(self.session_id, sequence)
                # It may have answered already: to nobody, until now.
                newest = self._mailbox.take_output(self.session_id, sequence)
                if newest is not None:
                    session.mailbox.put(
                        self.session_id, new.link.name, newest.output, newest.num_bytes
                    )
            has_taken = await session.plan.put_in_place(
                new, self.before, self.following, after, sequence, is_under_way=True
            )
        finally:
            if not has_taken:
                await session.exchange.hang_up(new)
        return has_taken


def read_failure(task: asyncio.Task[None]) -> None:
    """Say what ended a task in the background that nobody expected."""
    if not task.cancelled() and (error := task.exception()) is not None:
        _logger.error("the task %s failed", task.get_name(), exc_info=error)


class Mover(Observer):
    """Moves the hops of one session whose peers are leaving, one at a time.

    It begins a task when the session says that a peer leaves: once it is heard, and after each
    step that such a peer still has a part in.
    """

    def __init__(self, session: SteppedSession) -> None:
        self._session = session
        self._moving: asyncio.Task[None] | None = None
        self._is_stopped = False
        # Weak: a hop that the session drops takes its log with it.
        self._rooted = WeakSet[LiveHop]()  # those that cannot be moved
        self._tried = WeakSet[LiveHop]()  # those that could not yet: others come before them
        self._left: set[PeerId] = set()  # who ever said that it leaves

    def note_leaving(self) -> None:
        """Begin to move the hops whose peers leave, unless that is under way."""
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
        retry = Retry(_AGAIN, self._session.state.clock)
        while (live := await self._choose()) is not None:
            span = live.hop.span
            try:
                await self._move(live, tried)
            except CannotMoveError as error:
                _logger.info("the hop of blocks %s cannot be moved: %s", span, error)
                self._rooted.add(live)
            except (ShoalError, BrokenSegmentError, StartOverError) as error:
                _logger.info("the handoff of blocks %s failed: %s", span, error)
                self._tried.add(live)
                if isinstance(error, RouteError):
                    tried.clear()  # one of them may have room by now
                retry.note_failure()
                await retry.pause()
            else:
                _logger.info("handed blocks %s to another peer", span)
                tried.clear()
                retry.reset()

    async def _choose(self) -> LiveHop | None:
        """Return the hop to move next, None where there is none."""
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
            return (fresh or movable)[0]

    async def _move(self, live: LiveHop, tried: set[PeerId]) -> None:
        """Put another hop into the place of this one.

        Adds to `tried` the other peer where it did not work with that one. Raises CannotMoveError
        where it never will, RouteError where nobody else is there, and else what went wrong.
        """
        session, clock = self._session, self._session.state.clock
        standby, started_at, has_moved = Standby(session, live), clock.now(), False
        try:
            await standby.prepare(self._left | tried)
            position, stall_seconds = await self._switch(standby)
            has_moved = True
            seconds = clock.now() - started_at
        except (LostHopError, BrokenSegmentError):
            tried.add(standby.new.hop.peer.peer_id)
            raise
        finally:
            standby.end()
            await session.exchange.hang_up(live if has_moved else standby.new)
        handoff = Handoff(live.hop, standby.new.hop, position, seconds, stall_seconds)
        session.note_handoff(handoff, started_at)

    async def _switch(self, standby: Standby) -> tuple[int, float]:
        """Put the new hop into place between two steps; return where, and how long that took."""
        session, clock = self._session, self._session.state.clock
        while True:
            await standby.catch_up()
            async with session.between_steps() as hops:
                began_at = clock.now()
                if standby.find_neighbours(hops) != (standby.before, standby.after):
                    raise UnavailableError("the hops around it have changed")
                if await standby.is_ready():
                    await self._take_place(standby)
                    hops[hops.index(standby.live)] = standby.new
                    return session.position, clock.now() - began_at
                newest = standby.newest_sequence
            await standby.wait_for(newest)

    async def _take_place(self, standby: Standby) -> None:
        session, new = self._session, standby.new
        assert new.link is not None
        new.link.listen(session.mailbox)
        if not new.capability:
            return
        before, following, after = standby.before, standby.following, standby.after
        sequence = session.state.last_sequence + 1
        try:
            await session.plan.put_in_place(
                new, before, following, after, sequence, is_under_way=False
            )
        except BaseException:
            # The pushing hops are no longer known: the next step begins with a failover.
            await session.exchange.hang_up(standby.live)
            raise


def _is_leaving(live: LiveHop) -> bool:
    return live.link is not None and live.link.is_leaving
