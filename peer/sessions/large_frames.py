"""The large frames of one stream while they arrive: room is kept for them, and the stream waits."""

from __future__ import annotations

import contextlib
import math
from collections.abc import AsyncGenerator

from ...protocol.fair_share import Holder
from ...protocol.net.clock import Clock
from ..accounts.shared_bytes import SharedBytes

_ROOM_SECONDS = 30.0
"""How long a large frame that has begun to arrive may wait for room: its sender waits as well."""

_LOOK_AGAIN_SECONDS = 1.0
"""How soon to ask again whether a stream is idle on which a large frame is on its way."""


class LargeFrames:
    """Knows until when a stream is not idle for a frame that arrives."""

    def __init__(self, pending: SharedBytes, clock: Clock) -> None:
        self._pending = pending
        self._clock = clock
        self._arrives_until = 0.0

    def find_deadline(self) -> float:
        """Return until when the stream is not idle, however long nothing was said on it."""
        return min(self._arrives_until, self._clock.now() + _LOOK_AGAIN_SECONDS)

    def note_received(self) -> None:
        """Note that a frame is here."""
        self._arrives_until = 0.0

    @contextlib.asynccontextmanager
    async def let_in(self, holder: Holder, num_bytes: int) -> AsyncGenerator[None]:
        """Keep room for a large frame while it arrives; its time is bounded by the transport."""
        self._arrives_until = math.inf
        try:
            await self._pending.wait_for_room(holder, num_bytes, _ROOM_SECONDS)
            self._pending.count(holder, num_bytes)
            try:
                yield
            finally:
                self._pending.count(holder, -num_bytes)
        finally:
            self._arrives_until = self._clock.now() + _LOOK_AGAIN_SECONDS
