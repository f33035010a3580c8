"""Sees to it that peers keep published adapters: one task for each peer and adapter."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

from ...protocol.errors import RefusedError, RemoteProtocolError, UnavailableError
from ...protocol.ids import AdapterId, PeerId
from ...protocol.messages.adapters import KEEP_SECONDS
from ...protocol.net.clock import Clock
from ...protocol.net.retry import Backoff, Backoffs
from ...protocol.records.announcements import Announcement
from ..concurrency.tasks import Background, KeyedSemaphores
from .keeper_calls import KeeperCalls, knows_publications
from .publication import KeeperError, Publication
from .upload_places import UploadPlaces

_logger = logging.getLogger(__name__)

RENEWAL_SECONDS = KEEP_SECONDS / 3
"""Two renewals may fail."""

_RENEWALS_AT_ONCE = 32
"""How many peers hear at the same time that they keep what they have."""

_MAX_KEEPERS = 1000
"""So many peers are remembered for having kept something."""

_FAILING = Backoff(0.9 * RENEWAL_SECONDS, 3600.0)
"""Not tried again before the next renewal, then the one after the next, and so on."""

_BROUGHT = Backoff(10.0, 3600.0)
"""Who was brought one may be restarted at once, and need it again."""


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
        self._clock = clock
        self._background = background
        self._is_spreading = is_spreading
        self._places = {is_proven: UploadPlaces() for is_proven in (False, True)}
        self._renewing = asyncio.Semaphore(_RENEWALS_AT_ONCE)
        self._lanes = KeyedSemaphores[PeerId]()
        self._renewals: dict[PeerId, asyncio.Task[None]] = {}
        self._deliveries: dict[PeerId, asyncio.Task[None]] = {}
        self._owed: dict[PeerId, list[Publication]] = defaultdict(list)
        self._failing = Backoffs[PeerId](_FAILING, clock)
        # Who has kept something, and how fast it took that; who did so last is the last.
        self._keepers: dict[PeerId, float] = {}
        self._brought = Backoffs[tuple[PeerId, AdapterId]](_BROUGHT, clock)

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

    def renew(self, publications: Sequence[Publication], peers: Iterable[Announcement]) -> None:
        """Begin to tell all peers to keep what they have, and to bring them what they lack."""
        self._forget_expired()
        for peer in filter(knows_publications, peers):
            if peer.peer_id not in self._renewals:
                self._begin(self._renewals, peer.peer_id, self._renew(publications, peer))

    def deliver_owed(self, peers: Iterable[Announcement]) -> None:
        """Begin to bring peers what it was too soon for the last time."""
        owed, self._owed = self._owed, defaultdict(list)
        for peer in peers:
            self._begin_delivery(owed.get(peer.peer_id, []), peer)

    def cancel(self, publication: Publication) -> None:
        """Bring it to nobody any more."""
        for task in publication.tasks.values():
            task.cancel()

    def note_arrival(self, peer: Announcement) -> None:
        """Note that a peer has come, or come back: what it did before it left counts no more."""
        self._failing.note_success(peer.peer_id)

    def has_kept(self, peer: Announcement) -> bool:
        """Return whether a peer has ever kept something, as far as that is remembered."""
        return peer.peer_id in self._keepers

    def sort(self, peers: Sequence[Announcement]) -> list[Announcement]:
        """Return peers in the order in which they are brought an adapter.

        Strangers that have failed come last; those all of whose blocks have others before them
        come after those that do not, and after who has kept one before, the fastest first: that may
        have failed because it was restarted.
        """
        peers = sorted(peers, key=self._rate)
        num_before: Counter[int] = Counter()
        rank: dict[PeerId, tuple[int, int]] = {}
        for peer in peers:
            blocks = range(peer.span.start, peer.span.stop)
            num_strikes, *_ = self._rate(peer)
            rank[peer.peer_id] = num_strikes, min(num_before[block] for block in blocks)
            num_before.update(blocks)
        return sorted(peers, key=lambda peer: rank[peer.peer_id])

    def _rate(self, peer: Announcement) -> tuple[int, bool, int, float]:
        """Return what tells how likely a peer takes an adapter soon: less is better."""
        num_failures = self._failing.count_failures(peer.peer_id)
        bytes_per_second = self._keepers.get(peer.peer_id)
        is_stranger = bytes_per_second is None
        num_strikes = num_failures if is_stranger else 0
        return num_strikes, is_stranger, num_failures, -(bytes_per_second or 0.0)

    def _begin(
        self,
        tasks: dict[PeerId, asyncio.Task[None]],
        peer_id: PeerId,
        coroutine: Coroutine[Any, Any, None],
    ) -> None:
        task = tasks[peer_id] = self._background.start(coroutine)
        task.add_done_callback(lambda task: _drop(tasks, peer_id, task))

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
        self._begin_delivery(lacking, peer)

    def _begin_delivery(self, publications: Sequence[Publication], peer: Announcement) -> None:
        if publications and peer.peer_id not in self._deliveries:
            self._begin(self._deliveries, peer.peer_id, self._deliver(publications, peer))

    async def _deliver(self, publications: Iterable[Publication], peer: Announcement) -> None:
        """Bring one after the other to a peer, until one fails. Renewals go on meanwhile."""
        for publication in filter(self._is_spreading, publications):
            if not self._failing.may_try(peer.peer_id):
                return
            if self._brought.may_try((peer.peer_id, publication.name)):
                await asyncio.wait([self.begin(publication, peer)])
            else:
                self._owed[peer.peer_id].append(publication)

    async def _see_to(self, publication: Publication, peer: Announcement) -> KeeperError | None:
        """See that a peer keeps a publication; return why it does not.

        Who has it hears its head alone, and only who says nothing to that is brought the rest, on
        another stream: it was restarted, or does not answer that either.
        """
        peer_id = peer.peer_id
        try:
            if publication.is_kept_by(peer_id) and knows_publications(peer):
                async with self._renewing:
                    kept, _ = await self._calls.renew([publication], peer)
                if kept:
                    return None
            async with self._lanes.hold(peer_id), self._find_place(publication, peer):
                self._brought.note_failure((peer_id, publication.name))  # until it is renewed
                num_bytes, begun_at = publication.num_bytes, self._clock.now()
                await self._calls.bring(publication, peer)
        except (UnavailableError, RefusedError, RemoteProtocolError) as error:
            self._note_failure(peer, error)
            return error
        self._note_success(peer_id, num_bytes / max(1e-3, self._clock.now() - begun_at))
        return None

    def _find_place(
        self, publication: Publication, peer: Announcement
    ) -> AbstractAsyncContextManager[None]:
        """Wait for a place; strangers take none from who has kept something before."""
        return self._places[self.has_kept(peer)].hold(publication.num_bytes)

    def _note_success(self, peer_id: PeerId, bytes_per_second: float | None = None) -> None:
        self._failing.note_success(peer_id)
        before = self._keepers.pop(peer_id, 0.0)
        self._keepers[peer_id] = before if bytes_per_second is None else bytes_per_second
        if len(self._keepers) > _MAX_KEEPERS:
            del self._keepers[next(iter(self._keepers))]

    def _note_failure(self, peer: Announcement, error: KeeperError) -> None:
        _logger.info("peer …%s does not keep an adapter: %s", peer.peer_id[-6:], error)
        # Who declines one may have room for the next. What fails at once fails for one reason.
        if not isinstance(error, RefusedError) and self._failing.may_try(peer.peer_id):
            self._failing.note_failure(peer.peer_id)

    def _forget_expired(self) -> None:
        self._failing.forget_expired()
        self._brought.forget_expired()


def _drop(tasks: dict[PeerId, Any], peer_id: PeerId, task: object) -> None:
    """Forget a task that has ended, unless another one has taken its place."""
    if tasks.get(peer_id) is task:
        del tasks[peer_id]
