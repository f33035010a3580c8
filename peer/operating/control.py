"""What the owner of a peer sees of it and changes while it runs. Knows of no gRPC."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from ...protocol.errors import UsageError
from ...protocol.net.clock import Clock
from ...protocol.records.announcements import Announcement
from ..announcing.announcer import Announcer
from ..announcing.self_description import SelfDescription
from ..hosting.hosted_model import HostedModel
from ..process.config import PeerConfig, PeerEvent
from ..process.pauses import ServingPauses
from ..streams.service import JoinedPeer, Limits, Service
from .operator_addresses import is_socket_name
from .schedule import Hours, Schedule, ScheduleFollower

LIMIT_NAMES = {
    "sessions": "max_sessions",
    "kv_memory": "kv_bytes",
    "training_memory": "pass_bytes",
    "adapter_memory": "adapter_bytes",
}
"""Limits of work by the names that owners use, those of the options, and those of `Limits`. The
others are in the schedule.
"""

_MOST_EVENTS = 100
"""For a watcher that is slow; it misses the oldest."""

_OWNER = "owner"

_ID_CHARACTERS = 6

_MEASURED = {
    "max_sessions": "sessions",
    "kv_bytes": "kv_used_bytes",
    "pass_bytes": "training_used_bytes",
    "adapter_bytes": "adapter_used_bytes",
}
"""What is in use of each of `Limits`, by its name among what workloads measure."""


class ControlledPeer(Protocol):
    """The parts of a peer that its owner may change."""

    @property
    def config(self) -> PeerConfig: ...

    @property
    def announcer(self) -> Announcer: ...

    @property
    def joined(self) -> JoinedPeer: ...

    @property
    def loop(self) -> ControlledLoop: ...


class ControlledLoop(Protocol):
    """The parts of `ServingLoop` that the owner may change."""

    @property
    def loader(self) -> ModelHolder: ...

    @property
    def description(self) -> SelfDescription: ...

    @property
    def pauses(self) -> ServingPauses: ...


class ModelHolder(Protocol):
    """The part of `SpanLoader` that holds the limits."""

    model: HostedModel


class EventFeed:
    """Passes the events of a peer on to all who watch it."""

    def __init__(self) -> None:
        self._watchers: list[deque[tuple[float, PeerEvent]]] = []

    def note(self, event: PeerEvent, wall_seconds: float) -> None:
        """Keep an event for each watcher, with its time."""
        for watcher in self._watchers:
            watcher.append((wall_seconds, event))

    @contextmanager
    def watch(self) -> Iterator[deque[tuple[float, PeerEvent]]]:
        """Hand out a queue that gets all events from now on."""
        events: deque[tuple[float, PeerEvent]] = deque(maxlen=_MOST_EVENTS)
        self._watchers.append(events)
        try:
            yield events
        finally:
            self._watchers = [one for one in self._watchers if one is not events]


@dataclass(frozen=True)
class PeerControl:
    """Describes one peer and carries out what its owner asks for."""

    peer: ControlledPeer
    clock: Clock
    events: EventFeed
    follower: ScheduleFollower

    @property
    def name(self) -> str:
        """What commands call the peer: its own name, where a file can have it, or its id's end."""
        name = self.peer.config.name
        return name if is_socket_name(name) else self.peer.announcer.peer_id[-_ID_CHARACTERS:]

    @property
    def is_serving(self) -> bool:
        """Whether sessions may come."""
        return self.peer.loop.pauses.serving.is_set()

    def describe(self) -> dict[str, Any]:
        """Return the fields of a `PeerDescription` in operator.proto."""
        announced, used = self._announced, self._count_used()
        measured = {} if self._service is None else self._service.measure()
        return {
            "name": self.name,
            "peer_id": announced.peer_id,
            "software": announced.software,
            "model": announced.model_name,
            "model_id": announced.model_id,
            "span": str(announced.span),
            "num_blocks": announced.num_blocks,
            "state": announced.state.value,
            "paused_because": self.peer.loop.pauses.reasons,
            "sessions": used["max_sessions"],
            "passes": int(measured.get("passes", 0)),
            "free_kv_tokens": announced.free_kv_tokens or 0,
            "limits": {
                **_name_limits(vars(self.peer.loop.loader.model.limits)),
                **_name_schedule(self.follower.schedule),
            },
            "used": {
                **_name_limits(used),
                "upload": round(self.follower.upload.per_second),
                "download": round(self.follower.download.per_second),
            },
            "resident_bytes": _read_resident_bytes(),
            "decode_steps_per_second": announced.decode_steps_per_second or 0.0,
            "queue_seconds": announced.queue_seconds or 0.0,
        }

    async def drain(self) -> None:
        """Pause the peer; return once it serves nothing."""
        self.peer.loop.pauses.note(_OWNER, "drained by its owner")
        await self.peer.loop.pauses.resting.wait()

    async def resume(self) -> None:
        """End the pause of `drain`; return once the peer serves, unless it pauses all the same."""
        self.peer.loop.pauses.note(_OWNER, None)
        if not self.peer.loop.pauses.reasons:
            await self.peer.loop.pauses.serving.wait()

    def set_limits(self, changes: Mapping[str, Any]) -> list[str]:
        """Change limits, by their names in operator.proto; return where more is in use than they
        allow.

        Raises UsageError, and changes nothing, for what this peer cannot give.
        """
        loader, service = self.peer.loop.loader, self._service
        before = loader.model.limits
        schedule = _change_schedule(self.follower.schedule, changes)
        ours = {ours: changes[name] for name, ours in LIMIT_NAMES.items() if name in changes}
        limits = replace(before, **ours)
        model = loader.model.limit(limits, self._announced.span)
        used = self._count_used()
        if limits.num_bytes > before.num_bytes:
            _check_free(limits, used, model.read_free_bytes())
        loader.model = model
        if service is not None:
            service.apply_limits(limits)
        self.follower.schedule = schedule
        self.follower.look()
        return _list_excess(limits, used)

    @property
    def _announced(self) -> Announcement:
        description, state = self.peer.loop.description, self.peer.announcer.state
        return description.describe(state, 0, self.clock.wall())

    @property
    def _service(self) -> Service | None:
        return self.peer.joined.handler.service

    def _count_used(self) -> dict[str, int]:
        """Return what is in use of each limit, by the names of `Limits`."""
        measured = {} if self._service is None else self._service.measure()
        return {name: int(measured.get(key, 0)) for name, key in _MEASURED.items()}


def _name_limits(values: Mapping[str, int]) -> dict[str, int]:
    return {name: values[ours] for name, ours in LIMIT_NAMES.items()}


def _name_schedule(schedule: Schedule) -> dict[str, Any]:
    hours = ",".join(map(str, schedule.hours))
    return {"upload": schedule.upload, "download": schedule.download, "hours": hours}


def _change_schedule(schedule: Schedule, changes: Mapping[str, Any]) -> Schedule:
    """Return a schedule with changes, by their names in operator.proto; raises UsageError."""
    facts = _name_schedule(schedule)
    facts |= {name: changes[name] for name in facts if name in changes}
    words = filter(None, facts.pop("hours").split(","))
    return replace(schedule, hours=tuple(map(Hours.parse, words)), **facts)


def _list_excess(limits: Limits, used: Mapping[str, int]) -> list[str]:
    """Return what people are told where more is in use than the limits allow.

    >>> _list_excess(Limits(2, 500, 0, 0), {"max_sessions": 1, "kv_bytes": 1000})
    ['kv memory: 1,000 bytes are in use, more than 500; nothing new is admitted until it fits']
    """
    return [
        f"{name.replace('_', ' ')}: {used[ours]:,}{' bytes' * ours.endswith('_bytes')} are in use, "
        f"more than {getattr(limits, ours):,}; nothing new is admitted until it fits"
        for name, ours in LIMIT_NAMES.items()
        if used.get(ours, 0) > getattr(limits, ours)
    ]


def _check_free(limits: Limits, used: Mapping[str, int], free_bytes: int) -> None:
    """Raise UsageError where limits allow more than is free: the system would end the peer."""
    used_bytes = sum(num for name, num in used.items() if name.endswith("_bytes"))
    needed_bytes = limits.num_bytes - used_bytes
    if needed_bytes > free_bytes:
        raise UsageError(
            f"the peer might need {needed_bytes // 2**20:,} MiB more than it uses now, and "
            f"{free_bytes // 2**20:,} are free: raise limits by less"
        )


def _read_resident_bytes() -> int:
    """Return the memory of this process; 0 where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
