"""Sees to it that peers keep published adapters: one task for each peer and adapter."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ...protocol.adapters import KEEP_SECONDS
from ...protocol.announcements import Announcement
from ...protocol.errors import RefusedError, RemoteProtocolError, UnavailableError
from ...protocol.ids import AdapterId, PeerId
from ...protocol.net.clock import Clock
from .backoffs import Backoffs
from .keeper_calls import KeeperCalls, knows_publications
from .lanes import Lanes
from .places import Places
from .publication import KeeperError, Publication
from .tasks import Background

_logger = logging.getLogger(__name__)

RENEWAL_SECONDS = KEEP_SECONDS / 3
"""Two renewals may fail. Peers that have come since get it, too."""

_UPLOADS_AT_ONCE = 8
"""How many peers are brought all of an adapter: they share the line of this client."""

_MOST_UPLOADS = 16
_UPLOAD_SECONDS = 60.0
"""An upload that takes longer keeps nobody else waiting, up to so many: on a line of two megabits a
second none of them is too slow yet for whom it goes to."""

_RENEWALS_AT_ONCE = 32
"""How many peers hear at the same time that they keep what they have."""

_MAX_KEEPERS = 1000
"""So many peers are remembered for having kept something."""

_FIRST_BACKOFF_SECONDS = 0.9 * RENEWAL_SECONDS
"""Not tried again before the next renewal, then the one after the next, and so on."""


class KeeperTasks:
    """Brings publications to peers and renews them there. Owned by the client's loop.

        Whoever wants a peer to keep a publication joins the one task that sees to it. Renewals have
    peers brought what they lack and `is_spreading`. A peer is brought one adapter after the other.
    One that fails is left alone for a while, longer each time; so is one that is brought the same
    again and again, because it says nothing when it is renewed.
    """

    def __init__(
        self,
        calls: KeeperCalls,
        clock: Clock,
        background: Background,
        is_spreading: Callable[[Publication], bool],
    ) -> None:
        self._calls = calls
        self._background = background
        self._is_spreading = is_spreading
        self._bringing = Places(_UPLOADS_AT_ONCE, _MOST_UPLOADS, _UPLOAD_SECONDS)
        self._renewing = asyncio.Semaphore(_RENEWALS_AT_ONCE)
        self._lanes = Lanes[PeerId]()
        self._renewals: dict[PeerId, asyncio.Task[None]] = {}
        self._failing = Backoffs[PeerId](clock, _FIRST_BACKOFF_SECONDS)
        self._keepers: dict[PeerId, None] = {}  # who has kept something; the last one is the last
        self._brought = Backoffs[tuple[PeerId, AdapterId]](clock, _FIRST_BACKOFF_SECONDS)

    def begin(
        self, publication: Publication, peer: Announcement
    ) -> asyncio.Task[KeeperError | None]:
        """Return the task after which a peer keeps a publication; it returns why not."""
        peer_id = peer.peer_id
        known = publication.tasks.get(peer_id)
        if known is not None and not known.done() and not known.cancelling():
            return known
        task = publication.tasks[peer_id] = self._background.start(self._see_to(publication, peer))
        task.add_done_callback(lambda task: _drop(publication.tasks, peer_id, task))
        return task

    def renew(
        self,
        publications: Sequence[Publication],
        peers: Iterable[Announcement],
    ) -> None:
        """Begin to tell all peers to keep what they have, and to bring them what they lack."""
        self._forget_expired()
        for peer in filter(knows_publications, peers):
            if peer.peer_id not in self._renewals:
                self._begin_renewal(publications, peer)

    def cancel(self, publication: Publication) -> None:
        """Bring it to nobody any more."""
        for task in publication.tasks.values():
            task.cancel()

    def count_failures(self, peer: Announcement) -> int:
        """Return how often a peer has failed in a row."""
        return self._failing.count_failures(peer.peer_id)

    def has_kept(self, peer: Announcement) -> bool:
        """Return whether a peer has ever kept something, as far as that is remembered."""
        return peer.peer_id in self._keepers

    def _begin_renewal(
        self,
        publications: Sequence[Publication],
        peer: Announcement,
    ) -> None:
        peer_id = peer.peer_id
        task = self._background.start(self._renew(publications, peer))
        self._renewals[peer_id] = task
        task.add_done_callback(lambda task: _drop(self._renewals, peer_id, task))

    async def _renew(
        self,
        publications: Sequence[Publication],
        peer: Announcement,
    ) -> None:
        """Renew what one peer keeps, and have it brought the rest if that is not too soon."""
        peer_id = peer.peer_id
        held = [one for one in publications if one.is_kept_by(peer_id)]
        lacking = [one for one in publications if one not in held]
        if held:
            try:
                async with self._renewing:
                    kept, missed = await self._calls.renew(held, peer)
            except (UnavailableError, RefusedError, RemoteProtocolError) as error:
                self._note_failure(peer, error)
                return
            for publication in kept:
                self._note_success(peer_id)
                self._brought.note_success((peer_id, publication.name))
            lacking += missed
        for publication in lacking:
            if (
                self._is_spreading(publication)
                and self._failing.may_try(peer_id)
                and self._brought.may_try((peer_id, publication.name))
            ):
                self.begin(publication, peer)

    async def _see_to(self, publication: Publication, peer: Announcement) -> KeeperError | None:
        """See that a peer keeps a publication; return why it does not.

        Who has it hears its head alone, and only who says nothing to that is brought the rest, on
        another stream: it was restarted, or does not answer that either.
        """
        peer_id = peer.peer_id
        try:
            if publication.is_kept_by(peer_id) and knows_publications(peer):
                async with self._renewing:
                    _, missed = await self._calls.renew([publication], peer)
                if not missed:
                    return None
            async with self._lanes.hold(peer_id), self._bringing.hold():
                self._brought.note_failure((peer_id, publication.name))  # until it is renewed
                await self._calls.bring(publication, peer)
        except (UnavailableError, RefusedError, RemoteProtocolError) as error:
            self._note_failure(peer, error)
            return error
        self._note_success(peer_id)
        return None

    def _note_success(self, peer_id: PeerId) -> None:
        self._failing.note_success(peer_id)
        self._keepers.pop(peer_id, None)
        self._keepers[peer_id] = None
        if len(self._keepers) > _MAX_KEEPERS:
            del self._keepers[next(iter(self._keepers))]

    def _note_failure(self, peer: Announcement, error: KeeperError) -> None:
        _logger.info("peer …%s does not keep an adapter: %s", peer.peer_id[-6:], error)
        if not isinstance(error, RefusedError):  # who declines one may have room for the next
            self._failing.note_failure(peer.peer_id)

    def _forget_expired(self) -> None:
        self._failing.forget_expired()
        self._brought.forget_expired()


def _drop(tasks: dict[PeerId, Any], peer_id: PeerId, task: object) -> None:
    """Forget a task that has ended, unless another one has taken its place."""
    if tasks.get(peer_id) is task:
        del tasks[peer_id]
