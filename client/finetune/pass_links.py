"""The streams for passes that a client has to its peers: a few to each, used again and again."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from ...protocol.announcements import Announcement
from ...protocol.ids import PeerId, make_client_token
from ...protocol.net.clock import Clock
from ...protocol.net.transport import Transport
from .pass_link import PassLink

MAX_IN_FLIGHT = 2
"""Passes under way at one peer: one is computed while the tensors of the other travel."""

_KEEP_SECONDS = 10.0
"""How long a stream that nobody uses is good for: peers end theirs after twice as long."""


class NotWantedError(Exception):
    """Whoever waited for a peer has to ask somebody else."""


class PassLinks:
    """Lends streams out. Owned by the client's loop; close it at the end."""

    def __init__(
        self, transport: Transport, clock: Clock, secret: bytes, timeout_seconds: float
    ) -> None:
        self._transport = transport
        self._clock = clock
        self._secret = secret
        self._timeout_seconds = timeout_seconds
        self._idle: dict[PeerId, list[PassLink]] = {}
        self._places: dict[PeerId, asyncio.Semaphore] = {}
        self._lent: set[PassLink] = set()
        self._closing: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"<PassLinks, {len(self._lent)} in use>"

    @asynccontextmanager
    async def lend(
        self, peer: Announcement, is_wanted: Callable[[], bool]
    ) -> AsyncIterator[PassLink]:
        """Give a stream to a peer, when one of its places is free; an error ends the stream.

        Raises what `PassLink.open` does, and NotWantedError where the peer is not wanted by then.
        """
        places = self._places.setdefault(peer.peer_id, asyncio.Semaphore(MAX_IN_FLIGHT))
        async with places:
            if not is_wanted():
                raise NotWantedError
            link = await self._take(peer)
            self._lent.add(link)
            try:
                yield link
            except BaseException:
                self._hang_up(link)
                raise
            finally:
                self._lent.discard(link)
            self._idle.setdefault(peer.peer_id, []).append(link)

    async def close(self) -> None:
        """Hang up on everybody."""
        links = [*self._lent, *(link for idle in self._idle.values() for link in idle)]
        self._idle.clear()
        for link in links:
            self._hang_up(link)
        if self._closing:
            await asyncio.wait(self._closing)

    async def _take(self, peer: Announcement) -> PassLink:
        idle = self._idle.get(peer.peer_id, [])
        while idle:
            link = idle.pop()
            is_same = link.peer.span == peer.span and link.peer.endpoints == peer.endpoints
            if is_same and self._clock.now() - link.used_at < _KEEP_SECONDS:
                return link
            self._hang_up(link)
        token = make_client_token(self._secret, peer.peer_id)
        return await PassLink.open(self._transport, self._clock, peer, token, self._timeout_seconds)

    def _hang_up(self, link: PassLink) -> None:
        """Close a link in a task of its own: whoever used it may be cancelled at any moment."""
        closing = asyncio.create_task(link.close())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
