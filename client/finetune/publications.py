"""The adapters that a client publishes: peers keep them for as long as it says so again."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field

from ...protocol.adapter_messages import AdapterWithdrawal
from ...protocol.announcements import Announcement
from ...protocol.errors import (
    RefusedError,
    RemoteProtocolError,
    ShoalError,
    UnavailableError,
    UsageError,
)
from ...protocol.ids import AdapterId, PassId, PeerId, SessionId
from ...protocol.spans import Span
from ...protocol.versions import OPTIMIZER_VERSION
from ..router import Hop
from .adapter_versions import AdapterVersion, cut_apart
from .pass_asking import PassAsker

_logger = logging.getLogger(__name__)

_RENEWAL_SECONDS = 100.0
"""A third of what peers keep one: two renewals may fail. Peers that have come since get it, too."""

_WITHDRAWAL_SECONDS = 3.0
"""How long all peers together may take: who does not hear of it forgets the adapter by itself."""

_PEERS_AT_ONCE = 8


@dataclass(eq=False)
class _Publication:
    """One adapter as it was published, and who keeps it; without a version it is not renewed."""

    version: AdapterVersion | None
    span: Span
    lineage: str
    keepers: dict[PeerId, Announcement] = field(default_factory=dict[PeerId, Announcement])


class Publications:
    """What a client has published and not taken back. Owned by the client's loop."""

    def __init__(self, asker: PassAsker) -> None:
        self._asker = asker
        self._published: dict[AdapterId, _Publication] = {}
        self._lock = asyncio.Lock()
        self._renewing: asyncio.Task[None] | None = None

    async def publish(self, adapter: AdapterVersion, span: Span, lineage: str) -> int:
        """Give an adapter to all who serve blocks, until it is withdrawn; return to how many.

        One of the same lineage from before is not renewed any more. Raises what the last peer did
        if nobody keeps it.
        """
        await cut_apart([adapter], span)
        cut = adapter.cut(span)
        assert cut is not None
        async with self._lock:
            known = self._published.get(cut.name)
            publication = known or _Publication(adapter, span, lineage)
            publication.version = adapter
            await self._bring(publication)
            for other in self._published.values():
                if other.lineage == lineage and other is not publication:
                    other.version = None
            self._published[cut.name] = publication
        if self._renewing is None:
            self._renewing = asyncio.create_task(self._renew())
        return len(publication.keepers)

    async def withdraw(self, name: AdapterId) -> None:
        """Have all peers that can be reached forget an adapter; raises UsageError for another's."""
        async with self._lock:
            publication = self._published.pop(name, None)
            if publication is None:
                raise UsageError(
                    f"{name.hex():.12}… was not published here: who publishes an adapter takes it "
                    "back"
                )
            await self._tell_keepers([(name, publication)])

    async def close(self) -> None:
        """Take everything back."""
        if self._renewing is not None:
            self._renewing.cancel()
            await asyncio.wait([self._renewing])
        published, self._published = self._published, {}
        await self._tell_keepers(published.items())

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(_RENEWAL_SECONDS)
            for publication in list(self._published.values()):
                async with self._lock:
                    if publication in self._published.values() and publication.version is not None:
                        try:
                            await self._bring(publication)
                        except ShoalError as error:
                            _logger.warning("an adapter could not be published again: %s", error)

    async def _bring(self, publication: _Publication) -> None:
        """Have all peers keep an adapter; raises what the last one did if none of them does."""
        asker, span = self._asker, publication.span
        version, failures = publication.version, list[ShoalError]()
        assert version is not None
        keepers: dict[PeerId, Announcement] = {}

        async def bring(peer: Announcement) -> None:
            async with asker.lend(Hop(peer, peer.span)) as (link, way):
                await asker.courier.publish(link, version, span, way)
            keepers[peer.peer_id] = peer

        await _do_for(await asker.list_peers(), bring, failures)
        if not keepers:  # those of before may have it still
            raise failures[-1] if failures else asker.make_route_error(span)
        publication.keepers = keepers

    async def _tell_keepers(self, taken: Iterable[tuple[AdapterId, _Publication]]) -> None:
        """Take adapters back, as far as that is possible in a short time."""

        async def tell(peer: Announcement, name: AdapterId) -> None:
            asked = AdapterWithdrawal(PassId(SessionId(secrets.token_bytes(16))), name)
            async with self._asker.lend(Hop(peer, peer.span)) as (link, _):
                await link.ask_about_adapter(asked, _WITHDRAWAL_SECONDS)

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_WITHDRAWAL_SECONDS):
                for name, publication in taken:
                    keepers = [
                        peer
                        for peer in publication.keepers.values()
                        if peer.max_version >= OPTIMIZER_VERSION
                    ]
                    await _do_for(keepers, lambda peer, name=name: tell(peer, name), [])


async def _do_for(
    peers: Iterable[Announcement],
    do: Callable[[Announcement], Awaitable[None]],
    failures: list[ShoalError],
) -> None:
    """Do something with each of some peers, a few at a time; their failures are noted."""
    places = asyncio.Semaphore(_PEERS_AT_ONCE)

    async def try_one(peer: Announcement) -> None:
        async with places:
            try:
                await do(peer)
            except (UnavailableError, RefusedError, RemoteProtocolError) as error:
                failures.append(error)

    async with asyncio.TaskGroup() as group:
        for peer in peers:
            group.create_task(try_one(peer))
