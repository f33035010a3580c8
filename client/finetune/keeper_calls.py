"""Says to one peer that it keep published adapters, or forget them, and notes what it answers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from ...protocol.announcements import Announcement
from ...protocol.errors import RefusedError, RemoteProtocolError, SilentError, UnavailableError
from ...protocol.net.clock import Clock
from ...protocol.net.dialling import StaleAnnouncementError
from ...protocol.versions import OPTIMIZER_VERSION
from ..deadlines import WakefulTimeout
from ..router import Hop
from .pass_asking import PassAsker
from .publication import Publication

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
        self, publications: Sequence[Publication], peer: Announcement
    ) -> list[Publication]:
        """Have a peer that has adapters keep them on; return those that it does not say it keeps.

        It hears their heads alone, one after the other on one stream. That ends with the first one
        to which it says nothing: it waits for the rest of that one then, or does not answer at all.
        """
        rest, declined, is_reached = list(publications), list[Publication](), False
        try:
            async with self._asker.lend(Hop(peer, peer.span), takes_place=False) as (link, _):
                is_reached = True
                while rest:
                    if (version := rest[0].version) is not None:
                        try:
                            keep_seconds = await self._asker.courier.renew(
                                link, version, rest[0].span
                            )
                            rest[0].note_kept(peer.peer_id, keep_seconds, self._clock.now())
                        except RefusedError:
                            rest[0].note_silent(peer.peer_id)
                            declined.append(rest[0])
                    rest.pop(0)
        except SilentError:
            if not is_reached:
                raise
            rest[0].note_silent(peer.peer_id)
        return declined + rest

    def expect_carrying_seconds(self) -> float:
        """Return how long what is under way now may hold up withdrawals."""
        line = self._asker.line
        return min(line.expect_seconds(line.num_bytes), _MOST_CARRYING_SECONDS)

    async def withdraw(
        self, publications: Sequence[Publication], peer: Announcement, carrying_seconds: float
    ) -> bool:
        """Have a peer forget adapters, in this order; return whether it has none of them now.

        Of each that it has heard of it is noted. They may be so long on their way.
        """
        publication_of = {publication.name: publication for publication in publications}
        try:
            async with (
                self._withdrawing,
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
