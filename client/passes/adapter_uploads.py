"""The adapters that a client has uploaded to each peer, and what to upload next."""

from __future__ import annotations

import secrets
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, replace

from ...protocol.ids import NO_ADAPTER, AdapterId, PeerId, SessionId, UploadId
from ...protocol.messages.adapters import AdapterHead
from ...protocol.net.clock import Clock
from ...protocol.spans import Span
from ..adapters.adapter_versions import AdapterVersion, SentAdapter
from ..concurrency.tasks import KeyedSemaphores

Send = Callable[[AdapterHead, bytes], Awaitable[float]]
"""Uploads an adapter; returns how long the peer keeps it unused."""


@dataclass
class _UploadedAdapter:
    """An adapter that a peer has, until this client has not used it for so long."""

    keep_seconds: float
    used_at: float


class AdapterUploads:
    """Knows which peer has which adapter, and uploads missing ones. Owned by the client's loop.

    A peer that has forgotten an adapter says so when it is asked for it (`forget`).
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._kept: dict[PeerId, dict[AdapterId, _UploadedAdapter]] = defaultdict(dict)
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
            key: newest
            for key, newest in self._newest.items()
            if newest[1] in self._kept.get(key[0], {})
        }

    async def _bring(
        self, peer_id: PeerId, adapter: AdapterVersion, span: Span, is_trained: bool, send: Send
    ) -> None:
        part = adapter.cut(span)
        if part is None:
            return
        self._forget_expired()
        kept, now = self._kept[peer_id], self._clock.now()
        known = kept.get(part.name)
        if known is not None and now < known.used_at + known.keep_seconds / 2:
            known.used_at = now
            return
        key = peer_id, adapter.lineage, span
        number, name = self._newest.get(key, (adapter.number, NO_ADAPTER))
        # An older version may be gone back through still: it takes nothing away.
        replaces = name if number < adapter.number else NO_ADAPTER
        upload_id = UploadId(SessionId(secrets.token_bytes(16)))
        head = AdapterHead(upload_id, part.name, part.config, len(part.tensors), replaces=replaces)
        if is_trained:
            head = replace(head, num_trained=part.num_numbers)
        keep_seconds = await send(head, part.tensors)
        kept.pop(replaces, None)
        kept[part.name] = _UploadedAdapter(keep_seconds, self._clock.now())
        if number <= adapter.number:
            self._newest[key] = adapter.number, part.name
