"""The service of a peer while it serves one span, and the handler that leads each stream to it.

A workload lasts as long as one span is served. For each stream it makes a `StreamWork`, to which
the stream hands the messages of its types. See docs/new-workload.md for how to add one.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

from ...protocol.errors import (
    ErrorCode,
    RefusedError,
    RemoteProtocolError,
    ShoalError,
    UnavailableError,
)
from ...protocol.fair_share import BUSY_SECONDS, check_share
from ...protocol.identity import Identity
from ...protocol.ids import ModelId
from ...protocol.messages.codec import decode_frame
from ...protocol.messages.reverse_connections import Offer
from ...protocol.messages.session import Hello
from ...protocol.net.clock import Clock
from ...protocol.net.network import Network, Presence, join_patiently
from ...protocol.net.transport import Stream, refuse_large_frames
from ...protocol.records.announcements import Announcement
from ..process.config import PeerEvent, Report
from .client_stream import ClientStream, StreamWork, encode_refusal
from .stream_host import Limits, ServiceCounts, StreamHost

STREAMS_PER_SESSION = 4
"""Streams that a peer serves for each session it may hold: a session uses two, and some streams
have none yet. By default far fewer than the listener takes, so that a refusal can be told."""

_RETRY_SECONDS = 10.0


class Workload(Protocol):
    """One kind of work, while one span is served. Derive from it for what is not written out."""

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way that a peer waits for before it leaves.

        When that becomes true, the workload calls the `note_change` that it was made with.
        """
        return True

    def accept(self, stream: ClientStream) -> StreamWork:
        """Return the object that handles this workload's messages on a new stream."""
        ...

    def begin_draining(self) -> None:
        """Refuse new work from now on, and tell clients whose work is under way."""

    def count(self) -> Mapping[str, int]:
        """Return the counts of work under way, by names for people."""
        return {}

    def apply_limits(self, limits: Limits) -> None:
        """Admit new work by these limits from now on."""

    def describe(self, announcement: Announcement) -> Announcement:
        """Return the peer's announcement with the present load of this workload."""
        return announcement

    def measure(self) -> Mapping[str, float]:
        """Return numbers of the moment for the owner of the machine, by name.

        Each has a line in the tables of peer/operating/metrics.py.
        """
        return {}

    async def close(self) -> None:
        """Free all memory for the next span: all streams have ended."""


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
        self.streams: set[ClientStream] = set()
        self.has_hung_up = False
        self._max_streams = max_streams
        self._changed = changed

    async def serve(self, stream: Stream, first_frame: bytes | None = None) -> Offer | None:
        """Serve one stream until it ends; frees everything that the stream opened.

        `first_frame` has come already. Returns the offer where it did not end, but was offered:
        nobody serves it any more.
        """
        accept = [workload.accept for workload in self.workloads]
        served = ClientStream(self.host, stream, accept, self._register, first_frame)
        try:
            await served.run()
        finally:
            self.streams.discard(served)
            self._changed.set()
        return served.offer

    def _register(self, served: ClientStream) -> None:
        """Let a stream be one of those that are served. Raises RefusedError where that is full."""
        if self.has_hung_up:
            raise RefusedError(ErrorCode.DRAINING, "the peer is leaving its blocks", BUSY_SECONDS)
        addresses = [stream.tenant.address for stream in self.streams]
        check_share(served.tenant.address, addresses, self._max_streams, "streams")
        self.streams.add(served)

    def count_work(self) -> Mapping[str, object]:
        """Return how much of each kind of work is under way."""
        return {word: num for work in self.workloads for word, num in work.count().items()}

    def measure(self) -> Mapping[str, float]:
        """Return numbers of the moment, of the streams and of all workloads."""
        measured = {name: n for work in self.workloads for name, n in work.measure().items()}
        return {
            "streams": len(self.streams),
            "pending_bytes": self.host.pending.used_bytes,
            **measured,
        }

    def apply_limits(self, limits: Limits) -> None:
        """Admit new work by these limits from now on; nothing that is here ends."""
        self._max_streams = STREAMS_PER_SESSION * limits.max_sessions
        for workload in self.workloads:
            workload.apply_limits(limits)

    def begin_draining(self) -> None:
        """Take nothing new; clients that wait for a session, or have one, hear that at once."""
        for workload in self.workloads:
            workload.begin_draining()

    async def hang_up(self) -> None:
        """End all streams, and what is left of sessions with them; nothing is served any more."""
        self.has_hung_up = True
        self.begin_draining()
        while self.streams:
            for stream in list(self.streams):
                await stream.hang_up()
            self._changed.clear()
            if self.streams:
                await self._changed.wait()
        for workload in self.workloads:
            await workload.close()

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


class StreamHandler:
    """Leads each stream to the service of the moment; while there is none, refuses it.

    Few dial then: the peer is announced as JOINING, and nobody is routed to it yet.
    """

    def __init__(self) -> None:
        self.service: Service | None = None
        """Gets the streams that come; while it is None, they are refused."""
        self.others: dict[ModelId, Service] = {}
        """Get the streams whose Hello names their model, in place of `service`."""
        self.counts = ServiceCounts()
        """Counts over all services of the peer, which follow one another."""

    async def serve(self, stream: Stream) -> None:
        """Serve one stream until it ends, or tell it that there is nothing to be served yet.

        One that is offered outlives the service of the moment, on which nothing may hold then.
        """
        try:
            await self._serve_or_park(stream)
        except RefusedError as refusal:
            with contextlib.suppress(UnavailableError, TimeoutError):  # gone meanwhile
                async with asyncio.timeout(_RETRY_SECONDS):
                    await stream.send(encode_refusal(None, 0, refusal, self.counts))

    async def _serve_or_park(self, stream: Stream) -> None:
        service, hello = self.service, None
        if service is None or self.others:
            stream.set_gate(refuse_large_frames)
            with contextlib.suppress(ShoalError, TimeoutError):
                async with asyncio.timeout(_RETRY_SECONDS):
                    hello = await stream.receive()  # unread, it would take the answer with it
            service = self._find_service(hello)
        if service is None:
            raise RefusedError(
                ErrorCode.BUSY, "the peer serves no blocks at present", _RETRY_SECONDS
            )
        offer = await service.serve(stream, hello)
        if offer is None:
            return
        parked = service.host.parked
        del service
        assert parked is not None  # or it would not have been taken
        await parked.keep(offer, stream)

    def _find_service(self, hello: bytes | None) -> Service | None:
        """Return what a stream is for that begins so; what is no Hello gets its answer there."""
        with contextlib.suppress(RemoteProtocolError):
            message = None if hello is None else decode_frame(hello)
            if isinstance(message, Hello):
                return self.others.get(message.model_id, self.service)
        return self.service


@dataclass(frozen=True)
class JoinedPeer:
    """A peer that has joined its swarm, whatever it does there: serve a model, or train."""

    presence: Presence
    handler: StreamHandler

    @classmethod
    @contextlib.asynccontextmanager
    async def join(
        cls, network: Network, identity: Identity, clock: Clock, report: Report
    ) -> AsyncGenerator[Self]:
        """Listen and join the directory; leave both at the end.

        Reports `waiting` while nobody answers, and `directory`. Raises what `Network.serve` does.
        """
        handler = StreamHandler()

        def note_waiting(why: str) -> None:
            report(PeerEvent("waiting", {"why": why}))

        presence = await join_patiently(network, identity, handler.serve, clock, note_waiting)
        try:
            report(PeerEvent("directory", dict(presence.addresses.facts)))
            yield cls(presence, handler)
        finally:
            await presence.close()
