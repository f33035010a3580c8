"""Says to one peer that it keep published adapters, or forget them, and notes what it answers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from ...protocol.errors import (
    RefusedError,
    RemoteProtocolError,
    SilentError,
    StaleAnnouncementError,
    UnavailableError,
)
from ...protocol.net.clock import Clock, WakefulTimeout
from ...protocol.records.announcements import Announcement
from ...protocol.versions import OPTIMIZER_VERSION
from ..adapters.adapter_versions import AdapterVersion
from ..passes.pass_asking import PassAsker
from ..passes.pass_links import PassLink
from ..routing.route import Hop
from .publication import Publication

_RENEWAL_SECONDS = 10.0
"""How long one peer may keep others waiting for their renewals."""

_WITHDRAWAL_SECONDS = 3.0
"""How long one peer may take to hear of all withdrawals, beside what else is on its way: who does
not hear of them forgets the adapters by itself, and whoever closes a model waits for this."""

_MOST_CARRYING_SECONDS = 30.0
"""How much longer it may take behind what else is under way."""

_WITHDRAWALS_AT_ONCE = 32
"""How many peers hear of withdrawals at once. The others wait, and have as much time then."""


def knows_publications(peer: Announcement) -> bool:
    """Return whether a peer knows again what was published, by its head, and forgets it if asked.

    Others would be brought all of it each time, and hang up on who withdraws it.
    """
    return peer.max_version >= OPTIMIZER_VERSION


class KeeperCalls:
    """Speaks with the peers that keep published adapters; passes at them wait for none of it.

    What raises raises UnavailableError, RefusedError or RemoteProtocolError.
    """

    def __init__(self, asker: PassAsker, clock: Clock) -> None:
        self._asker = asker
        self._clock = clock
        self._withdrawing = asyncio.Semaphore(_WITHDRAWALS_AT_ONCE)

    async def bring(self, publication: Publication, peer: Announcement) -> None:
        """Bring a peer all of an adapter; raises if it does not keep it then."""
        assert publication.version is not None
        async with self._asker.lend(Hop(peer, peer.span), takes_place=False) as (link, _):
            try:
                keep_seconds = await self._asker.courier.publish(
                    link, publication.version, publication.span
                )
            except RefusedError:
                publication.note_gone(peer.peer_id)
                raise
            except BaseException:
                publication.note_sent(peer.peer_id, self._clock.now())
                raise
        publication.note_kept(peer.peer_id, keep_seconds, self._clock.now())

    async def renew(
        self, publications: Sequence[Publication], peer: Announcement, *, is_repeated: bool = False
    ) -> tuple[list[Publication], list[Publication]]:
        """Have a peer keep on what it has; return what it says it keeps, and what it does not say.

        It hears heads alone, one after the other on one stream, from the one on that it forgets
        first. That ends with the first one to which it says nothing: it waits for the rest of that
        one then, or does not answer at all. Of those that come too late at a slow peer nothing is
        returned: they come first the next time. A stream that breaks is replaced once: it may be
        one from before the peer was restarted.
        """
        peer_id, kept, missed = peer.peer_id, list[Publication](), list[Publication]()
        rest = sorted(publications, key=lambda one: one.expires_at(peer_id))
        is_reached = False
        try:
            async with self._asker.lend(Hop(peer, peer.span), takes_place=False) as (link, _):
                is_reached, until = True, self._clock.now() + _RENEWAL_SECONDS
                while rest and self._clock.now() < until:
                    if (version := rest[0].version) is not None:  # else nobody wants it any more
                        is_kept = await self._renew(rest[0], version, link)
                        (kept if is_kept else missed).append(rest[0])
                    rest.pop(0)
        except SilentError:
            if not is_reached:
                raise
            rest[0].note_silent(peer_id)
            missed += rest
        except UnavailableError:
            if not is_reached or is_repeated:
                raise
            return await self.renew(publications, peer, is_repeated=True)
        return kept, missed

    def expect_carrying_seconds(self) -> float:
        """Return how long what is under way now may hold up withdrawals."""
        line = self._asker.line
        return min(line.expect_seconds(line.num_bytes), _MOST_CARRYING_SECONDS)

    async def withdraw(
        self,
        publications: Sequence[Publication],
        peer: Announcement,
        carrying_seconds: float,
        until: float,
    ) -> bool:
        """Have a peer forget adapters, in this order; return whether it has none of them now.

        Of each that it has heard of it is noted. They may be so long on their way. Who would hear
        the first one later than `until` hears none.
        """
        publication_of = {publication.name: publication for publication in publications}
        try:
            async with self._withdrawing:
                if self._clock.now() > until:
                    return False
                async with (
                    WakefulTimeout(_WITHDRAWAL_SECONDS + carrying_seconds),
                    self._asker.lend(Hop(peer, peer.span), takes_place=False) as (link, _),
                ):
                    async for name in link.withdraw(list(publication_of), carrying_seconds):
                        publication_of[name].note_gone(peer.peer_id)
        except StaleAnnouncementError:  # who has other blocks, or is another one, has none of them
            for publication in publications:
                publication.note_gone(peer.peer_id)
        except (TimeoutError, UnavailableError, RefusedError, RemoteProtocolError):
            return False
        return True

    async def _renew(
        self, publication: Publication, version: AdapterVersion, link: PassLink
    ) -> bool:
        """Have a peer keep one on; return whether it does."""
        peer_id = link.peer.peer_id
        try:
            keep_seconds = await self._asker.courier.renew(link, version, publication.span)
        except RefusedError:
            publication.note_silent(peer_id)
            return False
        publication.note_kept(peer_id, keep_seconds, self._clock.now())
        return True
