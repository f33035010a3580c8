"""Who pushes to whom in one session, and what changes when hops are lost or out of reach."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING

from ...protocol.errors import ErrorCode, RefusedError, RemoteProtocolError, UnavailableError
from ...protocol.ids import NO_CAPABILITY
from ...protocol.messages.session import Admit, Mirror, NextHop, Redirect, Status
from ...protocol.session.recovery_log import RecoveryLog
from ...protocol.versions import CHAIN_VERSION
from ..routing.distances import can_push
from ..routing.peer_book import LostHopError
from ..routing.route import Hop
from ..routing.swarm import Swarm
from ..settings.config import ClientConfig
from .asking import Asking, BrokenSegmentError
from .chain import ask_status, choose_probe_seconds
from .hop_link import HopLink
from .route_opening import LiveHop, RouteOpener

if TYPE_CHECKING:
    from .live_hops import Place
    from .pipeline import Stretch


class StartOverError(Exception):
    """Nobody has kept what lost hops had got: everything is sent through all hops again."""


def cut_segments(hops: Sequence[LiveHop]) -> list[list[LiveHop]]:
    """Return the hops of a route in runs, of which each pushes to the next."""
    segments: list[list[LiveHop]] = [[]]
    for live in hops:
        segments[-1].append(live)
        if not live.feeds:
            segments.append([])
    return [segment for segment in segments if segment]


class Wiring:
    """Decides which hops push to each other, and tells them."""

    def __init__(
        self, opener: RouteOpener, asking: Asking, swarm: Swarm, config: ClientConfig
    ) -> None:
        self._opener = opener
        self._asking = asking
        self._swarm = swarm
        self._config = config

    def note_cut(self, before: LiveHop, after: LiveHop) -> None:
        """Remember for a while that a peer cannot push to another one."""
        self._swarm.book.links.note_cut(before.hop.peer.peer_id, after.hop.peer.peer_id)

    def plan(self, hops: Sequence[LiveHop], place: Place) -> None:
        """Settle who pushes to whom among hops that are about to be opened at a place.

        Raises StartOverError when the hop before cannot push to them all.
        """
        for live, following in zip(hops, (*hops[1:], place.after), strict=True):
            live.feeds = following is not None and self.can_feed(live.hop, following.hop)
        self.connect(hops, place.after, place.pending[0] if place.pending else 0)
        if place.before is not None and not (
            self.can_feed(place.before.hop, hops[0].hop) and all(live.feeds for live in hops[:-1])
        ):
            raise StartOverError
        if place.after is not None and not hops[-1].feeds:
            _begin_segment(place.after, place)

    def connect(
        self,
        hops: Sequence[LiveHop],
        after: LiveHop | None = None,
        first_sequence: int = 0,
    ) -> None:
        """Name the next hop of each that has one, and what lets it in there."""
        for live, following in zip(hops, (*hops[1:], after), strict=True):
            if self._is_in_chain(live.hop):
                live.capability = self._opener.make_capability(live.hop.span)
            if live.feeds and following is not None:
                live.next = self._name(following, first_sequence if following is after else 0)

    async def admit(self, place: Place) -> None:
        """Have the hop after take steps from the new hops, and from nobody else any more."""
        if place.after is not None:
            await self._admit(place.after, place.newest_sequence)

    async def have_replayed(self, place: Place, hops: Sequence[LiveHop], num_tokens: int) -> None:
        """Have the hop before push to the new ones what it has pushed to the lost ones."""
        assert place.before is not None
        mailbox, last = self._opener.mailbox, hops[-1].link
        assert last is not None  # they have just been opened
        mailbox.expect_replay(last.session)
        for sequence in place.pending:
            mailbox.expect(last.session, sequence)
        status = await self._redirect(place.before, self._name(hops[0], 0), place.pending)
        place.before.feeds = True
        if status.num_replayed:
            segment = [place.before, *hops]
            try:
                await self._asking.wait_for_replay(segment, status.num_replayed, num_tokens)
            except BrokenSegmentError as broken:
                if broken.cut is not None:
                    self.note_cut(segment[broken.cut], segment[broken.cut + 1])
                raise
        mailbox.end_replay(last.session)

    async def bridge(self, before: LiveHop, after: LiveHop, stretch: Stretch) -> None:
        """Have a hop answer us with what it pushed to the next one, which hears it from us."""
        pending = stretch.pending
        self.note_cut(before, after)
        self._opener.epoch += 1
        await self._admit(after, stretch.newest_sequence)
        assert before.link is not None
        for sequence in pending:
            self._opener.mailbox.expect(before.link.session, sequence)
        await self._redirect(before, None, pending)
        before.feeds, before.next = False, None
        after.log, after.is_log_whole = RecoveryLog(), stretch.position == 0

    async def mirror(self, before: LiveHop, following: NextHop) -> Status:
        """Have a hop push to a new one as well; it is not lost when that fails.

        Raises SilentError, or what is wrong with the hop.
        """
        if before.link is None:
            raise UnavailableError("a hop was lost meanwhile")
        message = Mirror(before.link.session, self._opener.epoch, following)
        seconds = self._choose_probe_seconds(before)
        return await ask_status(before.link, self._opener.mailbox, message, seconds)

    async def hand_over(
        self,
        new: LiveHop,
        before: LiveHop | None,
        following: NextHop | None,
        after: LiveHop | None,
        sequence: int,
    ) -> None:
        """Put a hop that has all of the prefix between two others, from a step on.

        The hop before pushes to it as `following`, it pushes to the hop behind, and that takes
        steps of nobody else. Raises BrokenSegmentError when one of them is lost.
        """
        self._opener.epoch += 1
        telling: list[Coroutine[None, None, object]] = []
        if before is not None:
            telling.append(self._redirect(before, following, (sequence,)))
        if after is not None:
            telling.append(self._redirect(new, self._name(after, sequence), (sequence,)))
            telling.append(self._admit(after, sequence - 1))
        for failure in await asyncio.gather(*telling, return_exceptions=True):
            if isinstance(failure, BaseException):
                raise failure

    async def promote(
        self,
        new: LiveHop,
        before: LiveHop | None,
        following: NextHop | None,
        after: LiveHop | None,
        sequence: int,
    ) -> bool:
        """Put a hop that has all of the prefix into the place of a lost one, with a step under way.

        The hop before, which pushes to it as `following`, goes on so; returns False where it has
        ceased to. Raises BrokenSegmentError when one of them is lost.
        """
        self._opener.epoch += 1
        if after is not None:
            await self._admit(after, sequence)
        telling: list[Coroutine[None, None, Status]] = []
        if after is not None:
            telling.append(self._redirect(new, self._name(after, sequence), (sequence,)))
        if before is not None:
            telling.append(self._redirect(before, following, (sequence + 1,)))
        statuses = await asyncio.gather(*telling, return_exceptions=True)
        num_replayed = 0
        for status in statuses:
            if isinstance(status, BaseException):
                raise status
            num_replayed += status.num_replayed
        return num_replayed == 0

    def can_feed(self, hop: Hop, following: Hop) -> bool:
        """Return whether a hop may push to another one, as far as is known."""
        return (
            self._config.delivery == "chain"
            and can_push(hop.peer, following.peer)
            and not self._swarm.book.links.is_cut(hop.peer.peer_id, following.peer.peer_id)
        )

    def _is_in_chain(self, hop: Hop) -> bool:
        return self._config.delivery == "chain" and hop.peer.max_version >= CHAIN_VERSION

    def _name(self, following: LiveHop, first_sequence: int) -> NextHop:
        peer, span, link = following.hop.peer, following.hop.span, following.link
        return NextHop(
            peer.peer_id,
            peer.endpoints,
            self._opener.name_session(span) if link is None else link.session,
            self._opener.epoch,
            self._opener.make_capability(span),
            first_sequence,
        )

    async def _admit(self, live: LiveHop, newest_sequence: int) -> None:
        self._asking.check_links([live])
        assert live.link is not None
        capability = self._opener.make_capability(live.hop.span)
        if live.capability == NO_CAPABILITY:
            return
        admit = Admit(live.link.session, self._opener.epoch, capability)
        status = await self._tell(live, admit)
        if status.sequence > newest_sequence:
            # A hop before it made a number up, so it drops all steps to come. That is not its
            # fault: it is lost to this session only.
            await self._asking.hang_up(live)
            raise BrokenSegmentError(
                [LostHopError(live.hop, "it was pushed a step that was never sent")]
            )
        live.capability = live.link.capability = capability

    async def _redirect(
        self, live: LiveHop, following: NextHop | None, pending: Sequence[int]
    ) -> Status:
        self._asking.check_links([live])
        assert live.link is not None
        message = Redirect(live.link.session, self._opener.epoch, pending[0], following)
        return await self._tell(live, message)

    async def _tell(self, live: LiveHop, message: Admit | Redirect) -> Status:
        """Raises BrokenSegmentError when the hop is lost."""
        link: HopLink | None = live.link
        assert link is not None
        seconds = self._choose_probe_seconds(live)
        try:
            return await ask_status(link, self._opener.mailbox, message, seconds)
        except RefusedError as error:
            if error.code is ErrorCode.LOG_INCOMPLETE:
                raise StartOverError from error
            raise BrokenSegmentError([await self._asking.lose(live, error)]) from error
        except (UnavailableError, RemoteProtocolError) as error:
            raise BrokenSegmentError([await self._asking.lose(live, error)]) from error

    def _choose_probe_seconds(self, live: LiveHop) -> float:
        return choose_probe_seconds(self._swarm.book.rtt_seconds(live.hop.peer.peer_id) or 0.0)


def _begin_segment(live: LiveHop, place: Place) -> None:
    """Let a hop that was pushed to be sent to; what it got before is not in its log."""
    live.log, live.is_log_whole = RecoveryLog(), place.position == 0
