"""The push plan of one session, and its changes when hops are lost or unreachable."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Protocol

from ...protocol.ids import NO_CAPABILITY
from ...protocol.messages.session import Admit, NextHop, Redirect, Status
from ...protocol.session.recovery_log import RecoveryLog
from ...protocol.versions import CHAIN_VERSION
from ..routing.route import Hop, LostHopError
from ..routing.router import can_push
from .hop_link import BrokenSegmentError, LiveHop, Mailbox, MissingHops, StartOverError
from .state import SessionContext


class ToldHops(Protocol):
    """The interface for telling hops their next hops; see `Exchange`."""

    def check_links(self, segment: Sequence[LiveHop]) -> None: ...
    async def tell(self, live: LiveHop, message: Admit | Redirect) -> Status: ...
    async def hang_up(self, *lives: LiveHop) -> None: ...


class PushPlan:
    """Decides which hops push to each other, and tells them."""

    def __init__(self, state: SessionContext, hops: ToldHops, mailbox: Mailbox) -> None:
        self._state = state
        self._hops = hops
        self._mailbox = mailbox

    def note_broken_link(self, before: LiveHop, after: LiveHop) -> None:
        """Remember for a while that a peer cannot push to another one."""
        self._state.book.links.note_broken(before.hop.peer.peer_id, after.hop.peer.peer_id)

    def plan(self, hops: Sequence[LiveHop], missing: MissingHops) -> None:
        """Decide which hop pushes to which, among hops that are about to be opened.

        Raises StartOverError when the hop before cannot push to them all.
        """
        for live, following in zip(hops, (*hops[1:], missing.after), strict=True):
            live.feeds = following is not None and self.can_feed(live.hop, following.hop)
        self.connect(hops, missing.after, missing.pending[0] if missing.pending else 0)
        if missing.before is not None and not (
            self.can_feed(missing.before.hop, hops[0].hop) and all(live.feeds for live in hops[:-1])
        ):
            raise StartOverError
        if missing.after is not None and not hops[-1].feeds:
            _begin_segment(missing.after, missing.position)

    def connect(
        self,
        hops: Sequence[LiveHop],
        after: LiveHop | None = None,
        first_sequence: int = 0,
    ) -> None:
        """Name the next hop of each that has one, and what lets it in there."""
        for live, following in zip(hops, (*hops[1:], after), strict=True):
            if self._is_in_chain(live.hop):
                live.capability = self._state.make_capability(live.hop.span)
            if live.feeds and following is not None:
                live.next = make_next_hop(
                    self._state, following, first_sequence if following is after else 0
                )

    async def admit(self, missing: MissingHops) -> None:
        """Have the hop after take steps from the new hops, and from nobody else any more."""
        if missing.after is not None:
            await self._admit(missing.after, missing.newest_sequence)

    async def redirect_to(self, hops: Sequence[LiveHop], missing: MissingHops) -> int:
        """Have the hop before push to new ones what it has pushed to the lost ones.

        Returns how many steps the last of them will do before those that are under way.
        """
        assert missing.before is not None
        for sequence in missing.pending:
            self._mailbox.expect(hops[-1].open_link.session, sequence)
        status = await self._redirect(
            missing.before, make_next_hop(self._state, hops[0], 0), missing.pending
        )
        missing.before.feeds = True
        return status.num_replayed

    async def bridge(
        self,
        before: LiveHop,
        after: LiveHop,
        pending: Sequence[int],
        position: int,
        newest_sequence: int,
    ) -> None:
        """Have a hop answer us with what it pushed to the next one, to which we send that instead.

        They do not reach each other. Steps with the sequences `pending` are under way, the first at
        `position`; the next hop has nothing newer than `newest_sequence`.
        """
        self.note_broken_link(before, after)
        self._state.epoch += 1
        await self._admit(after, newest_sequence)
        for sequence in pending:
            self._mailbox.expect(before.open_link.session, sequence)
        await self._redirect(before, None, pending)
        before.feeds, before.next = False, None
        _begin_segment(after, position)

    async def put_in_place(
        self,
        new: LiveHop,
        before: LiveHop | None,
        following: NextHop | None,
        after: LiveHop | None,
        sequence: int,
        is_under_way: bool,
    ) -> bool:
        """Put a hop that has all of the prefix between two others, from a step on.

        The hop before pushes to it as `following`, it pushes to the hop behind, and that takes
        steps of nobody else. Where the step `is_under_way`, the new hop pushes what came of it, and
        the hop before goes on with the next one; returns False where that has ceased to push to
        the new hop. Raises BrokenSegmentError when one of them is lost.
        """
        self._state.epoch += 1
        telling: list[Coroutine[None, None, Status | None]] = []
        if after is not None:
            admitting = self._admit(after, sequence - 1 + is_under_way)
            if is_under_way:  # before the new hop pushes
                await admitting
            else:
                telling.append(admitting)
            own = make_next_hop(self._state, after, sequence)
            telling.append(self._redirect(new, own, (sequence,)))
        if before is not None:
            telling.append(self._redirect(before, following, (sequence + is_under_way,)))
        statuses = await asyncio.gather(*telling, return_exceptions=True)
        num_replayed = 0
        for status in statuses:
            if isinstance(status, BaseException):
                raise status
            num_replayed += 0 if status is None else status.num_replayed
        return num_replayed == 0

    def can_feed(self, hop: Hop, following: Hop) -> bool:
        """Return whether a hop may push to another one, as far as is known."""
        return (
            self._state.config.delivery == "chain"
            and can_push(hop.peer, following.peer)
            and not self._state.book.links.is_broken(hop.peer.peer_id, following.peer.peer_id)
        )

    def _is_in_chain(self, hop: Hop) -> bool:
        return self._state.config.delivery == "chain" and hop.peer.max_version >= CHAIN_VERSION

    async def _admit(self, live: LiveHop, newest_sequence: int) -> None:
        self._hops.check_links([live])
        if live.capability == NO_CAPABILITY:
            return
        capability = self._state.make_capability(live.hop.span)
        admit = Admit(live.open_link.session, self._state.epoch, capability)
        status = await self._hops.tell(live, admit)
        if status.sequence > newest_sequence:
            # A hop before it made a number up, so it drops all steps to come. That is not its
            # fault: it is lost to this session only.
            await self._hops.hang_up(live)
            raise BrokenSegmentError(
                [LostHopError(live.hop, "it received a pushed step that was never sent")]
            )
        live.capability = live.open_link.capability = capability

    async def _redirect(
        self, live: LiveHop, following: NextHop | None, pending: Sequence[int]
    ) -> Status:
        self._hops.check_links([live])
        message = Redirect(live.open_link.session, self._state.epoch, pending[0], following)
        return await self._hops.tell(live, message)


def make_next_hop(state: SessionContext, following: LiveHop, first_sequence: int = 0) -> NextHop:
    """Return how a hop is told about its next hop, to which it pushes from a step on."""
    peer, span, link = following.hop.peer, following.hop.span, following.link
    return NextHop(
        peer.peer_id,
        peer.endpoints,
        state.name_session(span) if link is None else link.session,
        state.epoch,
        state.make_capability(span),
        first_sequence,
    )


def _begin_segment(live: LiveHop, position: int) -> None:
    """Let a hop that was pushed to be sent to; what it got before `position` is not in its log."""
    live.log, live.is_log_whole = RecoveryLog(), position == 0
