"""What all streams of a peer share while it serves one span: its memory and its time."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from dataclasses import dataclass, field

from ...protocol import limits
from ...protocol.errors import ErrorCode
from ...protocol.fair_share import SharedBytes, Tenant
from ...protocol.ids import ModelId, PeerId
from ...protocol.messages.codec import CODECS, read_kind
from ...protocol.net.clock import Clock
from ...protocol.net.turns import Turns
from ...protocol.spans import Span
from ..pushing.parked_streams import ParkedStreams

_MICROSECONDS_FOR_FRAMES = 500_000
"""Of each second, the most that the event loop gives to the frames of all streams."""

_SHORTLY_SECONDS = 0.036
"""In which fades what somebody's frames took, half of it in 25 ms. So long nothing else may be
done."""


MAX_PENDING_BYTES = 32 * limits.MAX_FRAME_BYTES
"""Frames of all streams that arrive in pieces, steps that wait for the engine, and answers that
wait for their reader."""

PUSHES = "pushes"
"""The purpose of frames that are sent on streams to the next hops of sessions."""

_RUNS = "runs"

_PURPOSES_OF_MODULES = {
    "session": "sessions",
    "passes": "training",
    "adapters": "adapters",
    "records": "directory",
    "runs": _RUNS,
    "reverse_connections": "connections",
}
"""The purpose of the messages of each module, as metrics name it."""

PURPOSES = {
    kind: _PURPOSES_OF_MODULES[codec.message.__module__.rpartition(".")[2]]
    for kind, codec in CODECS.items()
}
"""What frames are for, by the kind of their message."""


@dataclass(eq=False)
class ServiceCounts:
    """What a peer has done for others since it began, at all of its spans."""

    received_bytes: Counter[str] = field(default_factory=Counter[str])
    """Bytes of frames by their purpose, on streams that others have opened, and of training runs
    on all streams."""
    sent_bytes: Counter[str] = field(default_factory=Counter[str])
    """The same of the answers, and what was pushed."""
    refusals: Counter[ErrorCode] = field(default_factory=Counter[ErrorCode])
    """Steps, sessions, requests and streams that were declined."""
    num_opened: int = 0
    """Sessions that were opened."""
    num_taken_over: int = 0
    """Those of them that began on another route: a peer had failed, was leaving, is mirrored here,
    or had refused the session."""

    def note_received(self, frame: bytes) -> None:
        """Count a frame that has come."""
        self.received_bytes[PURPOSES[read_kind(frame)]] += len(frame)

    def note_sent(self, frame: bytes) -> None:
        """Count a frame that has left."""
        self.sent_bytes[PURPOSES[read_kind(frame)]] += len(frame)

    def note_pushed(self, frame: bytes) -> None:
        """Count a frame that has left on a stream to the next hop of its session."""
        self.sent_bytes[PUSHES] += len(frame)

    def count_traffic(self) -> tuple[int, int]:
        """Return the bytes sent and received, without those of a training run: it goes on while the
        peer serves nothing.

        >>> counts = ServiceCounts(Counter(sessions=5, runs=700), Counter(sessions=7, pushes=2))
        >>> counts.count_traffic()
        (9, 5)
        """
        sent, received = self.sent_bytes, self.received_bytes
        return sent.total() - sent[_RUNS], received.total() - received[_RUNS]


@dataclass(frozen=True)
class Limits:
    """How much of its machine a peer gives; may change while it runs.

    Where more is in use than a new limit allows, nothing is taken away, and nothing new is admitted
    until it fits.
    """

    max_sessions: int
    """Most sessions at the same time."""

    kv_bytes: int
    """Memory for KV caches."""

    pass_bytes: int
    """Memory for fine-tuning passes; 0: accept none."""

    adapter_bytes: int
    """Memory for adapters; 0: accept none."""

    @property
    def num_bytes(self) -> int:
        """All memory that may be used."""
        return self.kv_bytes + self.pass_bytes + self.adapter_bytes


class PendingBytes(SharedBytes):
    """Memory for frames that arrive in pieces, steps that wait, and answers that do."""

    def __init__(self, budget_bytes: int) -> None:
        super().__init__(budget_bytes)
        self._freed = asyncio.Event()

    def count(self, tenant: Tenant, num_bytes: int) -> None:
        """See SharedBytes.count."""
        super().count(tenant, num_bytes)
        if num_bytes < 0:
            self._freed.set()

    async def wait_for_room(self, tenant: Tenant, num_bytes: int, seconds: float) -> None:
        """Wait until a tenant may have so many bytes more. Raises RefusedError after so long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not self.has_room_for(tenant, num_bytes):
                    self._freed.clear()
                    await self._freed.wait()
        self.check_room_for(tenant, num_bytes)


@dataclass(frozen=True)
class StreamHost:
    """Resources that all streams of a peer share while it serves one span."""

    peer_id: PeerId
    model_id: ModelId
    span: Span
    clock: Clock
    idle_seconds: float
    """A stream is closed on which nothing is done for so long."""
    pending: PendingBytes
    parked: ParkedStreams | None
    """Keeps the streams that are offered; None where none are taken."""
    knows_members: bool = False
    """Whether members of a training run prove here who they are."""
    counts: ServiceCounts = field(default_factory=ServiceCounts)
    turns: Turns = field(default_factory=lambda: Turns(_MICROSECONDS_FOR_FRAMES, _SHORTLY_SECONDS))
    """Whose frames are taken next."""
