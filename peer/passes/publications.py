"""Published adapters as a workload: this peer serves those that it holds, and fetches others."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from ...protocol.errors import ErrorCode, RefusedError, RemoteProtocolError
from ...protocol.ids import UploadId
from ...protocol.messages.adapters import (
    STALL_SECONDS,
    AdapterKept,
    Leaf,
    Manifest,
    PublicationFetch,
    cut_adapter,
)
from ...protocol.messages.fields import Message
from ...protocol.net.network import Presence
from ...protocol.records.announcements import MAX_ADAPTERS, Announcement, shorten_adapter
from ..engine.adapters.adapter_store import KeptAdapter
from ..streams.client_stream import ClientStream, Handler
from ..streams.service import Workload
from .fetches import Fetches, read_published
from .holders import Holders
from .pass_workload import AccountedStreamWork, PassWorkload

_ANNOUNCE_SECONDS = 5.0
"""Time between two announcements because of publications that clients upload or withdraw."""


class PublicationWorkload(Workload):
    """The published adapters that a peer holds for others, or has fetched."""

    def __init__(
        self, passes: PassWorkload, presence: Presence, announce: Callable[[], None]
    ) -> None:
        """`announce` has the peer renew its announcement."""
        self._passes = passes
        self._announce = announce
        self._held: tuple[str, ...] = ()
        self._announcing: asyncio.TimerHandle | None = None
        self._announced_at = float("-inf")
        resources, clock, span = passes.resources, passes.clock, passes.engine.span
        self._store = resources.adapter_store
        self._store.on_change = self._announce_soon
        holders = Holders(presence, resources.model_id, clock)
        read = partial(read_published, passes.engine, passes.compute)
        self._fetches = Fetches(holders, self._store, span, read, clock)

    def accept(self, stream: ClientStream) -> PublicationStreamWork:
        """See Workload.accept."""
        return PublicationStreamWork(self._passes, stream)

    def describe(self, announcement: Announcement) -> Announcement:
        """Add which publications are held here for others."""
        return replace(announcement, adapters=self._held)

    async def close(self) -> None:
        """Fetch and announce nothing any more."""
        if self._announcing is not None:
            self._announcing.cancel()
        await self._fetches.close()

    def _announce_soon(self) -> None:
        """Announce which publications are held: at once, but not again and again for strangers."""
        self._held = tuple(map(shorten_adapter, self._store.list_held()[-MAX_ADAPTERS:]))
        if self._announcing is None:
            now = self._passes.clock.now()
            seconds = max(0.0, self._announced_at + _ANNOUNCE_SECONDS - now)
            loop = asyncio.get_running_loop()
            self._announcing = loop.call_later(seconds, self._announce_now)

    def _announce_now(self) -> None:
        self._announcing, self._announced_at = None, self._passes.clock.now()
        self._announce()


class PublicationStreamWork(AccountedStreamWork):
    """Sends the leaves of one publication at a time."""

    def __init__(self, passes: PassWorkload, stream: ClientStream) -> None:
        super().__init__(passes, stream)
        self._sending: asyncio.Task[None] | None = None

    @property
    def handlers(self) -> Mapping[type[Message], Handler]:
        return {PublicationFetch: self._take_fetch}

    @property
    def is_busy(self) -> bool:
        """Whether leaves are sent."""
        return self._sending is not None

    def _take_fetch(self, asked: PublicationFetch) -> None:
        """Send leaves of a publication, and say how long it stays; or refuse that."""
        if self._sending is not None:
            raise RemoteProtocolError("a stream can fetch one adapter at a time")
        try:
            kept = self._store.find_held(asked.adapter, self._stream.tenant)
            assert kept.manifest is not None
            leaves = () if asked.span is None else kept.manifest.select(asked.span)
            if any(leaf.block not in kept.files for leaf in leaves):
                span = self._passes.engine.span
                detail = f"this peer holds the adapter for blocks {span} only"
                raise RefusedError(ErrorCode.WRONG_SPAN, detail)
        except RefusedError as error:
            self._refuse(asked.pass_id, error)
            return
        self._stream.touch()
        if asked.span is None:
            self._say_kept(asked, kept)
            return
        self._sending = self._stream.begin(self._send(asked, kept, kept.manifest, leaves))
        self._sending.add_done_callback(self._note_sent)

    async def _send(
        self, asked: PublicationFetch, kept: KeptAdapter, manifest: Manifest, leaves: Sequence[Leaf]
    ) -> None:
        """Send leaves as fast as they are read; a reader that stops reading gets no more."""
        upload_id, files = UploadId(asked.pass_id), [kept.files[leaf.block] for leaf in leaves]
        self._answers.say(manifest.make_head(upload_id, sum(map(len, files))))
        with contextlib.suppress(RefusedError):
            for piece in cut_adapter(upload_id, *files):
                await self._answers.wait_for_room(STALL_SECONDS)
                self._answers.say(piece)
            self._say_kept(asked, kept)

    def _say_kept(self, asked: PublicationFetch, kept: KeptAdapter) -> None:
        seconds = self._store.count_seconds(kept)
        self._answers.say(AdapterKept(UploadId(asked.pass_id), seconds))

    def _note_sent(self, task: asyncio.Task[None]) -> None:
        self._sending = None
        self._stream.touch()
