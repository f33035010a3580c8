"""A directory inside one process, for tests, examples and simulations of whole swarms."""

from __future__ import annotations

from collections.abc import Sequence

from ...errors import DirectoryError, RemoteProtocolError
from ...ids import ModelId
from ...membership.membership import NO_MEMBERSHIP, Membership
from ...records.announcements import Announcement
from ...records.swarm_records import SwarmRecords
from ..clock import Clock


class MemoryDirectoryStore:
    """The records that all directories of one swarm share, its members if it is private.

    Set `is_reachable` to False to cut all of them off.
    """

    def __init__(self, membership: Membership = NO_MEMBERSHIP) -> None:
        self.is_reachable = True
        self.records = SwarmRecords(membership)


class MemoryDirectory:
    """One participant's access to a shared store. Implements Directory."""

    def __init__(self, store: MemoryDirectoryStore, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self.records = SwarmRecords(store.records.membership)
        self._is_closed = False

    @property
    def addresses(self) -> Sequence[str]:
        """Empty: other processes cannot join."""
        return ()

    async def announce(self, record: bytes) -> None:
        now = self._clock.wall()
        own = self.records.add_own(record, now)
        self.check_is_reachable()
        try:
            self._store.records.take(own.announcement.model_id, own.value, now)
        except RemoteProtocolError as error:
            raise DirectoryError(f"the directory refused our announcement: {error}") from error

    async def lookup(self, model_id: ModelId, max_age_seconds: float = 0.0) -> list[Announcement]:
        self.check_is_reachable()
        now = self._clock.wall()
        self.records.reserve(model_id)
        found = self._store.records.list_records(model_id, now)
        self.records.take_all(model_id, [known.value for known in found], now)
        return self.records.list_current(model_id, now)

    async def list_models(self) -> list[ModelId]:
        self.check_is_reachable()
        return self._store.records.list_models(self._clock.wall())

    async def close(self) -> None:
        self._is_closed = True

    def check_is_reachable(self) -> None:
        """Raise DirectoryError unless members can look and announce now."""
        if self._is_closed:
            raise DirectoryError("the directory was closed")
        if not self._store.is_reachable:
            raise DirectoryError("the directory cannot be reached")
