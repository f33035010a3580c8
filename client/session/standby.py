"""A peer that is brought to the state of a hop in use, beside it, while tokens go on, to take its
place: between two steps where the peer of the hop leaves, or at once when the hop is lost.

It gets what the hop got from the log of the hop before, which then pushes to both, or from the
client's log where the client sends to the hop itself.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Protocol

from ...protocol.errors import (
    RefusedError,
    RemoteProtocolError,
    UnavailableError,
)
from ...protocol.ids import PeerId, SessionId
from ...protocol.messages.session import Mirror, NextHop, Status
from ...protocol.net.clock import SuspendAwareTimeout
from ...protocol.versions import HANDOFF_VERSION
from ..routing.route import Ends, LostHopError
from ..trace.trace import Handoff
from .exchange import Exchange, merge_pieces
from .hop_link import (
    LiveHop,
    Mailbox,
    Question,
    UnaskedOutputsError,
)
from .hops import HopFinder
from .push_plan import PushPlan, make_next_hop
from .state import SessionContext

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
        self.new = LiveHop(live.hop, live.log, is_log_whole=live.is_log_whole)
        self.before: LiveHop | None = None
        self.after: LiveHop | None = None
        self.following: NextHop | None = None
        """How the hop before knows the new one."""
        self._session = session
        self._state = session.state  # of the session; that of the new hop is another one
        self._new_state = self._state.make_standby_context()
        self._mailbox = Mailbox(lambda: session.state.last_sequence)
        self._finder = HopFinder(self._new_state, self._mailbox)
        self._exchange = Exchange(self._new_state, self._mailbox)
        self._tail: list[Question] = []  # what the live hop was sent and the new one was not
        self._mirrored_sequence = 0  # the hop before pushes to both what is behind this step
        self._num_replayed = 0

    def _survey(self, hops: Sequence[LiveHop]) -> None:
        """Find the neighbours of the hop, and the log of what it was sent, between two steps.

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

    def _is_lost(self, live: LiveHop) -> bool:
        """Return whether a hop has hung up, or was lost in a step that failed."""
        return live.link is None or isinstance(
            self._session.mailbox.trouble(live.link.session), UnavailableError
        )

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
        """Return whether the same hops push to and from the live hop as when it was surveyed.

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
            if self.live.is_leaving and any(map(self._is_lost, hops)):
                # The next step begins with a failover. Until then a peer that moves to the blocks
                # that are missing would wait for this very session.
                await self._session.exchange.hang_up(self.live)
            self._survey(hops)
        self.new.hop = await self._finder.find_replica(self.live.hop, exclude, self._ends)
        self._plan()
        await self._finder.open_link(self.new, self._state.make_deadline())
        await self._bring_up()

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
        new.capability = self._new_state.make_capability(new.hop.span)
        if after is not None:
            new.feeds, new.next = True, make_next_hop(self._new_state, after, _NEVER)

    async def _bring_up(self) -> None:
        """Bring the new hop to about the state of the old one, while tokens go on."""
        if self.before is None:
            await self.replay()
            while self._has_much_to_follow:
                await self.follow()
            return
        self._mailbox.expect_replay(self.session_id)
        self.following = make_next_hop(self._new_state, self.new)
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
        return self.new.open_link.session

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
        """The number of the session's newest step at the new hop: that step's own where the hop
        before pushed it to both, or else that of the last one of the replay, which counts anew.
        """
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

    @property
    def is_lost(self) -> bool:
        """Whether the new hop can take no place any more."""
        return self.new.link is None or self._mailbox.trouble(self.session_id) is not None

    async def take_place(self, after: LiveHop | None, sequence: int, is_under_way: bool) -> bool:
        """Put the new hop into the place of the live one, from a step on, which may be under way.

        Returns False where the hop before has stopped pushing to it. Raises BrokenSegmentError when
        one of the hops is lost.
        """
        session, new = self._session, self.new
        new.open_link.listen(session.mailbox)
        if not new.capability:
            return True
        if is_under_way and after is None:
            session.mailbox.expect(self.session_id, sequence)
            # It may have answered already: to nobody, until now.
            newest = self._mailbox.take_output(self.session_id, sequence)
            if newest is not None:
                name, num_bytes = new.open_link.name, newest.num_bytes
                session.mailbox.put(self.session_id, name, newest.output, num_bytes)
        return await session.plan.put_in_place(
            new, self.before, self.following, after, sequence, is_under_way
        )
