"""What the host of a peer hears of its swarm: blocks without a peer, the loss of all others, and
that the peer relays.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator, Sequence

from ...protocol.ids import PeerId
from ...protocol.records.announcements import Announcement, PeerState
from ...protocol.records.swarm_view import SwarmView
from ...protocol.spans import Span, find_gaps
from ..announcing.announcer import Announcer
from ..process.config import PeerEvent, Report

_LEAST_SECONDS = 10.0


class SwarmNews:
    """Tells from one view of a swarm to the next what a host may want to act on, each thing once.

    `gap` and `gap_closed`: blocks have no peer, nor one that is about to come, and all have one;
    whether there is somebody through whom a newcomer could join, and whether all others are lost,
    so that it is not certain.
    `lost` and `found`: there is no sign of others, though not all have said that they leave.
    `relaying`: the peer carries streams to others for the first time.
    """

    def __init__(self, own_id: PeerId) -> None:
        self._own_id = own_id
        self._missing: set[int] = set()  # that was told, and have no peer yet
        self._heard_of: set[PeerId] = set()
        self._is_lost = False
        self._has_relayed = False

    @property
    def is_bad(self) -> bool:
        """Whether anything that was told is missing still."""
        return self._is_lost or bool(self._missing)

    def look(self, view: SwarmView, revoked: Collection[PeerId] = ()) -> list[PeerEvent]:
        """Return what is new in a view; peers that were `revoked` have left."""
        others = [peer for peer in view.peers if peer.peer_id != self._own_id]
        self._heard_of.difference_update(revoked)
        return [*self._look_at_others(others), *self._look_at_blocks(view)]

    def _look_at_others(self, others: Sequence[Announcement]) -> Iterator[PeerEvent]:
        there = {peer.peer_id for peer in others if peer.state is not PeerState.OFFLINE}
        if there:
            self._heard_of = there
        else:
            self._heard_of -= {peer.peer_id for peer in others}
        if not there and self._heard_of and not self._is_lost:
            self._is_lost = True
            yield PeerEvent("lost", {"peers": len(self._heard_of)})
        elif there and self._is_lost:
            self._is_lost = False
            yield PeerEvent("found", {"peers": len(there)})
        relays = (peer.relays for peer in others if peer.peer_id in there)
        num_carried = sum(self._own_id in (relay.peer_id for relay in one) for one in relays)
        if num_carried and not self._has_relayed:
            self._has_relayed = True
            yield PeerEvent("relaying", {"peers": num_carried})

    def _look_at_blocks(self, view: SwarmView) -> Iterator[PeerEvent]:
        coming = [peer.span for peer in view.peers if peer.state is PeerState.JOINING]
        served = [peer.span for peer in view.online]
        gaps = find_gaps(view.num_blocks, [*served, *coming])
        missing, told = _list_blocks(gaps), self._missing
        self._missing = missing | (told & _list_blocks(view.gaps))
        if missing - told:
            there = (peer for peer in view.peers if peer.state is not PeerState.OFFLINE)
            can_join = any(peer.as_nodes for peer in there)
            facts = {"can_join": can_join, "is_lost": self._is_lost}
            yield PeerEvent("gap", {"missing": [str(gap) for gap in gaps], **facts})
        elif told and not self._missing:
            yield PeerEvent("gap_closed")


def _list_blocks(spans: Sequence[Span]) -> set[int]:
    return {block for span in spans for block in range(span.start, span.stop)}


async def tell_news(
    read: Callable[[], SwarmView],
    list_revoked: Callable[[], Collection[PeerId]],
    announcer: Announcer,
    report: Report,
) -> None:
    """Look again and again at what is known of a swarm, and report what is new.

    Only while the peer is ONLINE: before and behind that its own blocks may be missing.
    """
    news = SwarmNews(announcer.peer_id)
    while True:
        # Good news are not to wait.
        await asyncio.sleep(
            _LEAST_SECONDS if news.is_bad else max(announcer.period_seconds, _LEAST_SECONDS)
        )
        if announcer.state is PeerState.ONLINE:
            for event in news.look(read(), list_revoked()):
                report(event)
