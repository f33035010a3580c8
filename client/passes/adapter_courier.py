"""Uploads adapters to the peers that are about to need them, and remembers which peer has which."""

from __future__ import annotations

import asyncio
import secrets
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Generator, Iterable
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

from ...protocol.errors import SilentError
from ...protocol.ids import NO_ADAPTER, AdapterId, PeerId, SessionId, UploadId
from ...protocol.messages.adapters import (
    PIECE_BYTES,
    SLOWEST_BYTES_PER_SECOND,
    STALL_SECONDS,
    AdapterHead,
    UploadPace,
    allow_upload_seconds,
)
from ...protocol.net.clock import Clock
from ...protocol.spans import Span
from ..adapters.adapter_versions import AdapterVersion, SentAdapter
from ..concurrency.tasks import KeyedSemaphores
from ..routing.peer_book import Bandwidth
from .pass_links import PassLink

_PIECES_UNDER_WAY = 32
"""How many of the newest pieces of one for everybody may not have arrived yet: a mebibyte and a
half, as much as was seen in the buffers of a connection that shares a slow line."""

_HEAD_SECONDS = 30.0
"""How long, at most, a few hundred bytes may take behind what else is under way."""


Send = Callable[[AdapterHead, bytes], Awaitable[float]]
"""Uploads an adapter; returns how long the peer keeps it unused."""


@dataclass
class _Kept:
    """An adapter that a peer has, until this client has not used it for so long."""

    keep_seconds: float
    used_at: float


class AdapterCourier:
    """Uploads adapters to peers, and records which peer has which. Owned by the client's loop.

    A peer that has forgotten an adapter says so when it is asked for it (`forget`).
    """

    def __init__(self, clock: Clock, bandwidth: Bandwidth) -> None:
        self._clock = clock
        self._bandwidth = bandwidth
        self._kept: dict[PeerId, dict[AdapterId, _Kept]] = defaultdict(dict)
        self._newest: dict[tuple[PeerId, str, Span], tuple[int, AdapterId]] = {}
        self._semaphores = KeyedSemaphores[PeerId]()

    async def bring(
        self,
        peer_id: PeerId,
        adapters: Iterable[SentAdapter],
        span: Span,
        is_trained: bool,
        send: Send,
    ) -> None:
        """See that a peer has all of some adapters for some blocks; raises what `send` does.

        One without memory to train them, if that is what they are for, says so before they are on
        their way.
        """
        for adapter in adapters:
            if isinstance(adapter, AdapterVersion):
                async with self._semaphores.hold(peer_id):
                    await self._bring(peer_id, adapter, span, is_trained, send)

    async def publish(self, link: PassLink, adapter: AdapterVersion, span: Span) -> float:
        """Give a peer an adapter for everybody; return how long it is kept unused.

        It may take as long as peers allow, whatever else is under way: passes do not wait for it,
        and whether it arrives tells of the peer, not of the line of this client.
        """
        head, tensors = _make_head(adapter, span, is_published=True)
        expected_seconds = self._bandwidth.expect_seconds(self._bandwidth.num_bytes + len(tensors))
        num_held_back = min(len(tensors), _PIECES_UNDER_WAY * PIECE_BYTES)
        carrying_seconds = max(
            min(expected_seconds, STALL_SECONDS), num_held_back / SLOWEST_BYTES_PER_SECOND
        )
        patience_seconds = allow_upload_seconds(len(tensors))
        with self._carry_newest() as carry:
            return await link.bring(head, tensors, carrying_seconds, patience_seconds, carry)

    @contextmanager
    def _carry_newest(self) -> Generator[Callable[[int], None]]:
        """Give what counts pieces as under way that a peer has taken, of the newest ones alone.

        What went before them has arrived, or waits at the peer; what is not taken is not under way:
        none of it delays anybody else. Raises SilentError if pieces are taken more slowly than they
        may come.
        """
        newest: deque[ExitStack] = deque()
        pace, loop = UploadPace(self._clock.now()), asyncio.get_running_loop()

        def carry(num_bytes: int) -> None:
            if (now := self._clock.now()) > pace.deadline:
                raise SilentError("the peer takes the adapter too slowly")
            pace.note_piece(num_bytes, now)
            piece = ExitStack()
            piece.enter_context(self._bandwidth.carry(num_bytes))
            newest.append(piece)
            loop.call_later(self._bandwidth.expect_seconds(self._bandwidth.num_bytes), piece.close)
            if len(newest) > _PIECES_UNDER_WAY:
                newest.popleft().close()

        try:
            yield carry
        finally:
            for piece in newest:
                piece.close()

    async def renew(self, link: PassLink, adapter: AdapterVersion, span: Span) -> float:
        """Tell a peer that has an adapter for everybody to keep it; return how long it does.

        Raises what `PassLink.bring_head` does.
        """
        head, _ = _make_head(adapter, span, is_published=True)
        with self._bandwidth.carry(len(head.config)) as carrying_seconds:
            return await link.bring_head(head, min(carrying_seconds, _HEAD_SECONDS))

    def forget(self, peer_id: PeerId) -> None:
        """Note that a peer does not have what it was brought."""
        self._kept.pop(peer_id, None)

    def _forget_expired(self) -> None:
        """Forget adapters that peers have forgotten: a long-lived client meets many peers."""
        now = self._clock.now()
        for peer_id, adapters in list(self._kept.items()):
            for name, kept in list(adapters.items()):
                if now >= kept.used_at + kept.keep_seconds:
                    del adapters[name]
            if not adapters:
                del self._kept[peer_id]
        self._newest = {
            place: newest
            for place, newest in self._newest.items()
            if newest[1] in self._kept.get(place[0], {})
        }

    async def _bring(
        self, peer_id: PeerId, adapter: AdapterVersion, span: Span, is_trained: bool, send: Send
    ) -> None:
        cut = adapter.cut(span)
        if cut is None:
            return
        self._forget_expired()
        kept, now = self._kept[peer_id], self._clock.now()
        known = kept.get(cut.name)
        if known is not None and now < known.used_at + known.keep_seconds / 2:
            known.used_at = now
            return
        place = peer_id, adapter.lineage, span
        number, name = self._newest.get(place, (adapter.number, NO_ADAPTER))
        # An older version may be gone back through still: it takes nothing away.
        replaces = name if number < adapter.number else NO_ADAPTER
        head, tensors = _make_head(adapter, span, replaces=replaces)
        if is_trained:
            head = replace(head, num_trained=cut.num_numbers)
        keep_seconds = await send(head, tensors)
        kept.pop(replaces, None)
        kept[cut.name] = _Kept(keep_seconds, self._clock.now())
        if number <= adapter.number:
            self._newest[place] = adapter.number, cut.name


def _make_head(
    adapter: AdapterVersion,
    span: Span,
    *,
    replaces: AdapterId = NO_ADAPTER,
    is_published: bool = False,
) -> tuple[AdapterHead, bytes]:
    cut = adapter.cut(span)
    assert cut is not None
    upload_id = UploadId(SessionId(secrets.token_bytes(16)))
    head = AdapterHead(upload_id, cut.name, cut.config, len(cut.tensors), is_published, replaces)
    return head, cut.tensors
