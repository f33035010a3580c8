"""The monitor of one swarm: what it watches, what it remembers, and who is told of changes."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from ...protocol.ids import ModelId
from .alerts import HealthOf, find_alerts
from .canary import CanaryProcess, CanaryRun, keep_running, reduce_run
from .collector import READ_SECONDS, Collector, SwarmAccess
from .description import Description, describe, describe_canaries
from .history import History
from .state import Change, Event, EventKind, SwarmState

if TYPE_CHECKING:  # it imports an HTTP client, which few monitors need
    from .webhook import Webhook

Result = TypeVar("Result")

_NUM_EVENTS = 50
"""Events that are shown."""

_MAX_UNWRITTEN = 10_000
"""Events that wait for the disk."""

_TICK_SECONDS = 0.5
"""Between two looks at what has changed: replicas are counted once for all changes in between."""


class Monitor:
    """Watches a swarm while `run` does. Its owner closes the history.

    The disk has a thread of its own, since a disk may take seconds.
    """

    def __init__(
        self,
        access: SwarmAccess,
        history: History,
        read_seconds: float = READ_SECONDS,
        only: Iterable[ModelId] = (),
        canaries: Sequence[CanaryProcess] = (),
        webhook: Webhook | None = None,
    ) -> None:
        """Watch `only` some models; without them, all.

        Canaries run one after the other; alerts go to the webhook.
        """
        self.clock = access.clock
        self.revision = 0
        """Grows with every change."""
        self.history_revision = 0
        """Grows with every event that the history has."""
        self.num_events: Counter[EventKind] = Counter()
        """Events since the monitor began."""
        self._history = history
        self._disk = ThreadPoolExecutor(1, "history")
        self._collector = Collector(access, self._take, read_seconds, only)
        self._changed = asyncio.Event()
        self._events = deque(history.list_events(_NUM_EVENTS), maxlen=_NUM_EVENTS)
        self._unwritten = deque[Event](maxlen=_MAX_UNWRITTEN)
        self._canaries = canaries
        self.canaries = {one.name: history.load_canary(one.name) for one in canaries}
        """By the names of their models."""
        self._runs = list[tuple[str, CanaryRun]]()
        self._has_lost = asyncio.Event()
        """Whether a peer was lost since the canaries last began."""
        self._webhook = webhook
        self._told: HealthOf = {}

    @property
    def state(self) -> SwarmState:
        """What is known of the swarm."""
        return self._collector.state

    async def run(self, addresses: Sequence[str]) -> None:
        """Join the swarm and watch it until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._collector.run(addresses))
                tasks.create_task(self._keep())
                if self._canaries:
                    tasks.create_task(
                        keep_running(self._canaries, self._take_run, self._has_lost, self.clock)
                    )
                if self._webhook is not None:
                    tasks.create_task(self._webhook.run())
        finally:
            for canary in self._canaries:
                await canary.close()
            await self._collector.close()
            await asyncio.to_thread(self._disk.shutdown)
            self._history.take(self.state, list(self._unwritten), self.clock.wall(), self._runs)

    def describe(self) -> Description:
        """Return what people see now."""
        told = describe(self.state, self.clock.wall(), list(self._events))
        errors = self._history.error, "" if self._webhook is None else self._webhook.error
        canaries = describe_canaries(self.canaries.values(), told.taken_at)
        return replace(told, canaries=canaries, warnings=tuple(filter(None, errors)))

    async def wait_for_change(self, revision: int) -> None:
        """Return once there is something newer than a revision."""
        while self.revision == revision:
            await self._changed.wait()

    async def read(self, read: Callable[[History], Result]) -> Result:
        """Return what is read of the history, in the thread of the disk."""
        return await asyncio.get_running_loop().run_in_executor(self._disk, read, self._history)

    def _take_run(self, name: str, run: CanaryRun) -> None:
        model = self.state.models.get(run.model_id)
        num_blocks = 0 if model is None else model.num_blocks
        self.canaries[name], events = reduce_run(self.canaries[name], run, num_blocks)
        self._runs.append((name, run))
        self._note_events(events)

    async def _keep(self) -> None:
        """Keep what has changed and tell alerts, until cancelled."""
        loop, revision = asyncio.get_running_loop(), -1
        while True:
            await self.wait_for_change(revision)
            revision = self.revision
            events, runs = list(self._unwritten), self._runs
            self._unwritten.clear()
            self._runs = []
            error, now = self._history.error, self.clock.wall()
            if self._webhook is not None:
                self._told, alerts = find_alerts(self._told, self.state, events, now)
                self._webhook.put(alerts)
            await loop.run_in_executor(
                self._disk, self._history.take, self.state, events, now, runs
            )
            if events or runs or self._history.error != error:
                self.history_revision += 1
                revision += 1
                self._note_change()
            await asyncio.sleep(_TICK_SECONDS)

    def _take(self, change: Change) -> None:
        self._note_events(change[1])
        if any(event.kind is EventKind.LOST for event in change[1]):
            self._has_lost.set()

    def _note_events(self, events: Sequence[Event]) -> None:
        self.num_events.update(event.kind for event in events)
        self._events.extendleft(events)
        self._unwritten.extend(events)
        self._note_change()

    def _note_change(self) -> None:
        self.revision += 1
        self._changed.set()
        self._changed = asyncio.Event()
