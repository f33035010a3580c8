"""A directory inside one process, for tests, examples and simulations of whole swarms."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from ...errors import DirectoryError, LocalProtocolError, RemoteProtocolError
from ...ids import ModelId
from ...records.announcement_book import AnnouncementBook
from ...records.announcements import Announcement, KnownRecord
from ..clock import Clock


class MemoryDirectoryStore:
    """The records that all directories of one swarm share.

    Set `is_reachable` to False to cut all of them off.
    """

    def __init__(self) -> None:
        self.is_reachable = True
        self.book = AnnouncementBook()


class MemoryDirectory:
    """One participant's access to a shared store. Implements Directory."""

    def __init__(self, store: MemoryDirectoryStore, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._book = AnnouncementBook()
        self._is_closed = False

    @property
    def addresses(self) -> Sequence[str]:
        """Empty: other processes cannot join."""
        return ()

    async def announce(self, record: bytes) -> None:
        now = self._clock.wall()
        try:
            model_id = self._book.read(record, now).model_id
        except RemoteProtocolError as error:
            raise LocalProtocolError(f"our own announcement is not valid: {error}") from error
        try:
            self._book.add_own(model_id, record, now)
            self._check_is_reachable()
            self._store.book.add(model_id, record, now)
        except RemoteProtocolError as error:
            raise DirectoryError(f"the directory refused our announcement: {error}") from error

    async def lookup(self, model_id: ModelId) -> list[Announcement]:
        self._check_is_reachable()
        now = self._clock.wall()
        self._book.reserve(model_id)
        for known in self._store.book.list_records(model_id, now):
            with suppress(RemoteProtocolError):  # a newer one is known
                self._book.add(model_id, known.value, now)
        return self._book.list_current(model_id, now)

    def list_records(self, model_id: ModelId) -> list[KnownRecord]:
        return self._book.list_records(model_id, self._clock.wall())

    def list_hints(self, model_id: ModelId) -> list[Announcement]:
        return self._book.list_hints(model_id, self._clock.wall())

    def take_record(self, model_id: ModelId, value: bytes) -> Announcement:
        now = self._clock.wall()
        if self._book.read(value, now).model_id != model_id:
            raise RemoteProtocolError("the record is of another model")
        return self._book.add(model_id, value, now)

    async def close(self) -> None:
        self._is_closed = True

    def _check_is_reachable(self) -> None:
        if self._is_closed:
            raise DirectoryError("the directory was closed")
        if not self._store.is_reachable:
            raise DirectoryError("the directory cannot be reached")
