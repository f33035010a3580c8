"""The service of a peer while it serves one span: one `Conversation` for each stream."""

import asyncio
import contextlib
from collections.abc import Mapping, Sequence

from ...protocol import limits
from ...protocol.errors import ErrorCode, RefusedError
from ...protocol.fair_share import BUSY_SECONDS, check_room_for
from ...protocol.messages.offers import Offer
from ...protocol.net.transport import Stream
from ...protocol.records.announcements import Announcement
from ..pushing.parked_streams import ParkedStreams
from .conversation import Conversation, StreamHost
from .workload import Workload

MAX_PENDING_BYTES = 32 * limits.MAX_FRAME_BYTES
"""Frames of all streams that arrive in pieces, steps that wait for the engine, and answers that
wait for their reader."""


class Service:
    """All streams of one peer, and its workloads."""

    def __init__(
        self,
        host: StreamHost,
        workloads: Sequence[Workload],
        max_streams: int,
        changed: asyncio.Event,
    ) -> None:
        """`changed` is set whenever something ends that `wait_until_empty` may wait for."""
        self.host = host
        self.workloads = workloads
        self.streams: set[Conversation] = set()
        self.has_hung_up = False
        self._max_streams = max_streams
        self._changed = changed

    def __repr__(self) -> str:
        return f"<Service of {self.host.span}: {len(self.streams)} streams, {self.count_work()}>"

    @property
    def parked(self) -> ParkedStreams | None:
        """The place where offered streams are parked; None where none are accepted."""
        return self.host.parked

    async def serve(self, stream: Stream) -> Offer | None:
        """Serve one stream until it ends; frees everything that the stream opened.

        Returns the offer where it did not end, but was offered: nobody serves it any more.
        """
        conversation = Conversation(self.host, stream, self.workloads, self._register)
        try:
            await conversation.run()
        finally:
            self.streams.discard(conversation)
            self._changed.set()
        return conversation.offer

    def _register(self, conversation: Conversation) -> None:
        """Let a stream be one of those that are served. Raises RefusedError where that is full."""
        if self.has_hung_up:
            raise RefusedError(ErrorCode.DRAINING, "the peer is leaving its blocks", BUSY_SECONDS)
        addresses = [stream.holder.address for stream in self.streams]
        check_room_for(conversation.holder.address, addresses, self._max_streams, "streams")
        self.streams.add(conversation)

    async def describe(self, announcement: Announcement) -> Announcement:
        """Return an announcement of the peer with the present load."""
        for workload in self.workloads:
            announcement = await workload.describe(announcement)
        return announcement

    def count_work(self) -> Mapping[str, object]:
        """Return how much of each kind of work is under way."""
        return {word: num for work in self.workloads for word, num in work.count().items()}

    def begin_draining(self) -> None:
        """Take nothing new; clients that wait for a session, or have one, hear that at once."""
        for workload in self.workloads:
            workload.begin_draining()

    async def hang_up(self) -> None:
        """End all streams, and what is left of sessions with them; nothing is served any more."""
        self.has_hung_up = True
        self.begin_draining()
        while self.streams:
            for conversation in list(self.streams):
                await conversation.hang_up()
            self._changed.clear()
            if self.streams:
                await self._changed.wait()
        for workload in self.workloads:
            workload.close()

    async def wait_until_empty(self, timeout_seconds: float) -> bool:
        """Wait until no work is under way; return whether that came in time.

        Sessions that wait for room count: unless it drains, they have their turn before the end.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_seconds):
                while not self.is_empty:
                    self._changed.clear()
                    await self._changed.wait()
        return self.is_empty

    @property
    def is_empty(self) -> bool:
        """Whether no workload has anything under way."""
        return all(workload.is_idle for workload in self.workloads)
