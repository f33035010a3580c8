"""Says one thing about a published adapter to one peer: that it is there, or that it is not."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterable

from ...protocol.adapter_messages import AdapterWithdrawal
from ...protocol.announcements import Announcement
from ...protocol.errors import RefusedError, RemoteProtocolError, SilentError, UnavailableError
from ...protocol.ids import AdapterId, PassId, SessionId
from ...protocol.versions import OPTIMIZER_VERSION
from ..router import Hop
from .pass_asking import PassAsker
from .publication import Publication

_WITHDRAWAL_SECONDS = 3.0
"""How long one peer may take: who does not hear of it forgets the adapter by itself."""

_PEERS_AT_ONCE = 8
"""Who are brought all of an adapter: they share the line of this client."""


def knows_publications(peer: Announcement) -> bool:
    """Return whether a peer knows again what was published, by its head, and forgets it if asked.

    Others would be brought all of it each time, and hang up on who takes it back.
    """
    return peer.max_version >= OPTIMIZER_VERSION


class Publisher:
    """Brings published adapters to peers, and takes them back. No peer waits for a silent one."""

    def __init__(self, asker: PassAsker) -> None:
        self._asker = asker
        self._places = asyncio.Semaphore(_PEERS_AT_ONCE)

    async def bring(self, publication: Publication, peer: Announcement) -> None:
        """See that a peer keeps an adapter, from now on for as long as peers do.

        Who has it hears the head alone, beside all passes, and only who says nothing to that is
        brought the rest, on a stream of its own: it was restarted, or does not answer that either.
        Raises UnavailableError, RefusedError or RemoteProtocolError.
        """
        asker, hop = self._asker, Hop(peer, peer.span)
        version, span = publication.version, publication.span
        if publication.is_kept_by(peer.peer_id) and knows_publications(peer):
            try:
                async with asker.lend(hop, takes_place=False) as (link, _):
                    await asker.courier.renew(link, version, span)
                return
            except SilentError:
                pass
        async with self._places, asker.lend(hop) as (link, _):
            await asker.courier.publish(link, version, span)

    async def take_back(self, peer: Announcement, names: Iterable[AdapterId]) -> bool:
        """Have a peer forget adapters, in this order; return whether it has heard of all.

        Passes do not keep that waiting.
        """
        if not knows_publications(peer):
            return False
        try:
            async with asyncio.timeout(_WITHDRAWAL_SECONDS):
                async with self._asker.lend(Hop(peer, peer.span), takes_place=False) as (link, _):
                    for name in names:
                        asked = AdapterWithdrawal(PassId(SessionId(secrets.token_bytes(16))), name)
                        await link.ask_about_adapter(asked, _WITHDRAWAL_SECONDS)
        except (TimeoutError, UnavailableError, RefusedError, RemoteProtocolError):
            return False
        return True
