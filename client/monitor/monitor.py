"""The monitor of one swarm: what it watches, what it remembers, and who is told of changes."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Iterable, Sequence

from ...protocol.ids import ModelId
from .collector import READ_SECONDS, Collector, SwarmAccess
from .description import Description, describe
from .history import History
from .state import Change, EventKind, SwarmState

_NUM_EVENTS = 50
"""Events that are shown."""


class Monitor:
    """Watches a swarm while `run` does. Its owner closes the history."""

    def __init__(
        self,
        access: SwarmAccess,
        history: History,
        read_seconds: float = READ_SECONDS,
        only: Iterable[ModelId] = (),
    ) -> None:
        """Watch `only` some models; without them, all."""
        self.clock = access.clock
        self.history = history
        self.revision = 0
        """Grows with every change."""
        self.history_revision = 0
        """Grows with every event."""
        self.num_events: Counter[EventKind] = Counter()
        """Events since the monitor began."""
        self._collector = Collector(access, self._take, read_seconds, only)
        self._changed = asyncio.Event()
        self._events = deque(history.list_events(_NUM_EVENTS), maxlen=_NUM_EVENTS)

    @property
    def state(self) -> SwarmState:
        """What is known of the swarm."""
        return self._collector.state

    async def run(self, addresses: Sequence[str]) -> None:
        """Join the swarm and watch it until cancelled."""
        try:
            await self._collector.run(addresses)
        finally:
            await self._collector.close()

    def describe(self) -> Description:
        """Return what people see now."""
        return describe(self.state, self.clock.wall(), list(self._events))

    async def wait_for_change(self, revision: int) -> None:
        """Return once there is something newer than a revision."""
        while self.revision == revision:
            await self._changed.wait()

    def _take(self, change: Change) -> None:
        state, events = change
        self.history.take(state, events, self.clock.wall())
        if events:
            self.num_events.update(event.kind for event in events)
            self._events.extendleft(events)
            self.history_revision += 1
        self.revision += 1
        self._changed.set()
        self._changed = asyncio.Event()
