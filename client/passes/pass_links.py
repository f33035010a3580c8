"""The streams for passes that a client has to its peers: a few to each, used again and again."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field

from ...protocol.ids import PeerId, make_client_token
from ...protocol.net.clock import Clock
from ...protocol.net.transport import Transport
from ...protocol.records.announcements import Announcement
from ..concurrency.tasks import Closer
from .pass_link import PassLink

MAX_IN_FLIGHT = 2
"""Passes under way at one peer: one is computed while the tensors of the other travel."""

_KEEP_SECONDS = 10.0
"""How long a stream that nobody uses is good for: peers end theirs after twice as long."""


class NotWantedError(Exception):
    """A pass that waited for a peer has to go to another one."""


@dataclass
class _Places:
    """The streams to one peer for passes, as long as a pass uses or wants one."""

    free: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_IN_FLIGHT))
    num_users: int = 0


class PassLinks:
    """Lends streams out. Owned by the client's loop; close it at the end.

    Of a peer that is not used any more nothing is left after a while.
    """

    def __init__(
        self, transport: Transport, clock: Clock, secret: bytes, timeout_seconds: float
    ) -> None:
        self._transport = transport
        self._clock = clock
        self._secret = secret
        self._timeout_seconds = timeout_seconds
        self._idle: dict[PeerId, list[PassLink]] = {}
        self._places: dict[PeerId, _Places] = {}
        self._lent: set[PassLink] = set()
        self._sweep: asyncio.TimerHandle | None = None
        self._closer = Closer()

    def __repr__(self) -> str:
        num_idle = sum(map(len, self._idle.values()))
        num_wanted = len(self._places)
        return f"<PassLinks, {len(self._lent)} in use, {num_idle} idle, {num_wanted} peers wanted>"

    @asynccontextmanager
    async def lend(
        self, peer: Announcement, is_wanted: Callable[[], bool], takes_place: bool = True
    ) -> AsyncIterator[PassLink]:
        """Give a stream to a peer, when one of its places is free; an error ends the stream.

        What is said in a word takes no place, and waits for none.

        Raises what `PassLink.open` does, and NotWantedError where the peer is not wanted by then.
        """
        async with self._take_place(peer.peer_id) if takes_place else nullcontext():
            if not is_wanted():
                raise NotWantedError
            link = await self._take(peer)
            self._lent.add(link)
            try:
                yield link
            except BaseException:
                self._closer.begin(link)
                raise
            finally:
                self._lent.discard(link)
            self._idle.setdefault(peer.peer_id, []).append(link)
            self._sweep_later()

    async def close(self) -> None:
        """Hang up on everybody."""
        if self._sweep is not None:
            self._sweep.cancel()
        links = [*self._lent, *(link for idle in self._idle.values() for link in idle)]
        self._idle.clear()
        self._closer.begin(*links)
        await self._closer.finish()

    @asynccontextmanager
    async def _take_place(self, peer_id: PeerId) -> AsyncIterator[None]:
        places = self._places.setdefault(peer_id, _Places())
        places.num_users += 1
        try:
            async with places.free:
                yield
        finally:
            places.num_users -= 1
            if places.num_users == 0:
                del self._places[peer_id]

    def _sweep_later(self) -> None:
        """Hang up, in a while, on those whom nobody has used for a while."""
        if self._sweep is None:
            self._sweep = asyncio.get_running_loop().call_later(_KEEP_SECONDS, self._sweep_now)

    def _sweep_now(self) -> None:
        self._sweep = None
        for peer_id, idle in list(self._idle.items()):
            for link in [link for link in idle if not self._is_fresh(link)]:
                idle.remove(link)
                self._closer.begin(link)
            if not idle:
                del self._idle[peer_id]
        if self._idle:
            self._sweep_later()

    def _is_fresh(self, link: PassLink) -> bool:
        return self._clock.now() - link.used_at < _KEEP_SECONDS

    async def _take(self, peer: Announcement) -> PassLink:
        idle = self._idle.get(peer.peer_id, [])
        while idle:
            link = idle.pop()
            is_same = link.peer.span == peer.span and link.peer.endpoints == peer.endpoints
            if is_same and self._is_fresh(link):
                return link
            self._closer.begin(link)
        token = make_client_token(self._secret, peer.peer_id)
        return await PassLink.open(self._transport, self._clock, peer, token, self._timeout_seconds)
