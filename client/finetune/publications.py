"""The adapters that a client publishes: peers keep them for as long as it says so again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence

from ...protocol.announcements import Announcement
from ...protocol.errors import RefusedError, RemoteProtocolError, UnavailableError, UsageError
from ...protocol.ids import AdapterId, PeerId
from ...protocol.net.clock import Clock
from ...protocol.spans import Span
from .adapter_versions import AdapterVersion, cut_apart
from .pass_asking import PassAsker
from .publication import KEEP_SECONDS, Publication
from .publishing import Publisher, knows_publications
from .tasks import run_all

_logger = logging.getLogger(__name__)

_RENEWAL_SECONDS = KEEP_SECONDS / 3
"""Two renewals may fail. Peers that have come since get it, too."""


class Publications:
    """What a client has published and not taken back. Owned by the client's loop.

    It decides when who is told; what one peer is told, and how long that takes, concerns no other.
    """

    def __init__(self, asker: PassAsker, clock: Clock) -> None:
        self._asker = asker
        self._clock = clock
        self._publisher = Publisher(asker)
        self._published: dict[AdapterId, Publication] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def publish(self, adapter: AdapterVersion, span: Span, lineage: str) -> int:
        """Give an adapter to all who serve blocks, until it is withdrawn; return to how many.

        One of the same lineage from before is not renewed any more. Raises what the last peer did
        if nobody keeps it: the one from before stays then.
        """
        await cut_apart([adapter], span)
        cut = adapter.cut(span)
        assert cut is not None
        publication = self._published.pop(cut.name, None) or Publication(cut.name, adapter, span)
        self._published[cut.name] = publication  # the newest one is the last
        is_new = lineage not in publication.lineages
        publication.lineages.add(lineage)
        if not self._tasks:
            self._start(self._renew())
        try:
            num_keepers = await self._bring_to_all(publication)
        except BaseException:
            if is_new:  # whoever has it by now is told at the end
                publication.lineages.discard(lineage)
            raise
        for other in self._published.values():
            if other is not publication:
                other.lineages.discard(lineage)
        return num_keepers

    async def withdraw(self, name: AdapterId) -> int:
        """Have all peers that can be reached forget an adapter; return how many could not be told.

        They forget it by themselves. Raises UsageError for another's, and for one whose place a
        later one has taken so long ago that nobody has it.
        """
        self._forget_expired()
        publication = self._published.pop(name, None)
        if publication is None:
            raise UsageError(
                f"{name.hex():.12}… was not published here: who publishes an adapter takes it back"
            )
        num_untold = await self._take_back([publication])
        if num_untold:
            _logger.warning(
                "not all peers could be told that an adapter is withdrawn (%d could not): they "
                "forget it within %.0f minutes",
                num_untold,
                KEEP_SECONDS / 60,
            )
        return num_untold

    async def close(self) -> None:
        """Take everything back."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        published, self._published = list(self._published.values()), {}
        await self._take_back(published)

    async def _renew(self) -> None:
        """Begin again and again, and wait for nobody."""
        while True:
            await asyncio.sleep(_RENEWAL_SECONDS)
            self._start(self._begin_renewals())

    async def _begin_renewals(self) -> None:
        self._forget_expired()
        for peer in filter(knows_publications, await self._asker.list_peers()):
            for publication in self._published.values():
                if publication.lineages and peer.peer_id not in publication.under_way:
                    self._start(self._renew_at(peer, publication))

    async def _renew_at(self, peer: Announcement, publication: Publication) -> None:
        try:
            await self._bring(publication, peer)
        except (UnavailableError, RefusedError, RemoteProtocolError) as error:
            _logger.info("an adapter could not be published again: %s", error)

    async def _bring_to_all(self, publication: Publication) -> int:
        """Return how many peers keep an adapter; raises what the last one did if none does."""
        failures: list[Exception] = []

        async def try_one(peer: Announcement) -> None:
            try:
                await self._bring(publication, peer)
            except (UnavailableError, RefusedError, RemoteProtocolError) as error:
                failures.append(error)

        peers = await self._asker.list_peers()
        if peers:
            await run_all(map(try_one, peers))
        if len(failures) == len(peers):
            raise failures[-1] if failures else self._asker.make_route_error(publication.span)
        return len(peers) - len(failures)

    async def _bring(self, publication: Publication, peer: Announcement) -> None:
        publication.under_way.add(peer.peer_id)
        try:
            await self._publisher.bring(publication, peer)
        finally:
            publication.under_way.discard(peer.peer_id)
        publication.note_kept(peer, self._clock.now())
        if publication.name not in self._published:  # it was withdrawn meanwhile
            await self._publisher.take_back(peer, [publication.name])

    async def _take_back(self, taken: Sequence[Publication]) -> int:
        """Tell all who keep some adapters, the newest first; return how many could not be told."""
        peers: dict[PeerId, Announcement] = {}
        names: dict[PeerId, list[AdapterId]] = {}
        for publication in reversed(taken):
            for peer in publication.keepers:
                peers.setdefault(peer.peer_id, peer)
                names.setdefault(peer.peer_id, []).append(publication.name)
        if not peers:
            return 0
        tell = self._publisher.take_back
        told = await run_all(tell(peer, names[peer_id]) for peer_id, peer in peers.items())
        return told.count(False)

    def _forget_expired(self) -> None:
        """Forget who has forgotten what, and what nobody has any more that is not to be renewed."""
        for publication in list(self._published.values()):
            publication.forget_expired(self._clock.now())
            if not publication.lineages and not publication.keepers:
                del self._published[publication.name]

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._note_end)

    def _note_end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _logger.error("an adapter could not be published again", exc_info=error)
