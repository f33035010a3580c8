"""What one process knows of the announcements of others: the newest of each peer, bounded.

The one place that decides which of two announcements stands, for every directory.
"""

from __future__ import annotations

from functools import lru_cache

from . import limits
from .announcements import Announcement, check_is_current, verify_announcement
from .errors import RemoteProtocolError
from .ids import PeerId


class AnnouncementBook:
    """The newest announcement of each peer, in separate scopes (a model, or a model of a swarm).

    Remembers an announcement until it expires, so that a replay of an older one is recognised.
    """

    def __init__(self, max_announcements: int = 2 * limits.MAX_ANNOUNCEMENTS_PER_MODEL) -> None:
        self._scopes: dict[str, dict[PeerId, Announcement]] = {}
        self._num_announcements = 0
        self._max_announcements = max_announcements
        # Directories hand in the same record again and again, and a signature takes about 0.1 ms.
        self._verify = lru_cache(maxsize=max_announcements)(verify_announcement)

    def __len__(self) -> int:
        return self._num_announcements

    def read(self, record: bytes, now: float) -> Announcement:
        """Do what `read_announcement` does, faster when the record was seen before."""
        announcement = self._verify(record)
        check_is_current(announcement, now)
        return announcement

    def add(self, scope: str, record: bytes, now: float) -> Announcement:
        """Remember a record; one that is known already changes nothing.

        Raises RemoteProtocolError when the record is not valid at `now` (wall seconds), when
        another one of the same peer is newer, and when the book is full of unexpired ones.
        """
        announcement = self.read(record, now)
        known = self._scopes.get(scope, {}).get(announcement.peer_id)
        if known is not None and known == announcement:
            return known
        if known is not None and known.expires_at > now and not _supersedes(announcement, known):
            raise RemoteProtocolError("a newer announcement of this peer is already known")
        if known is None and self._num_announcements >= self._max_announcements:
            self._drop_expired(list(self._scopes), now)
            if self._num_announcements >= self._max_announcements:
                raise RemoteProtocolError("there are too many announcements")
        self._scopes.setdefault(scope, {})[announcement.peer_id] = announcement
        self._num_announcements += known is None
        return announcement

    def list_current(self, scope: str, now: float) -> list[Announcement]:
        """Return what holds at `now`, at most `limits.MAX_ANNOUNCEMENTS_PER_MODEL`."""
        self._drop_expired([scope], now)
        announcements = self._scopes.get(scope, {}).values()
        return list(announcements)[: limits.MAX_ANNOUNCEMENTS_PER_MODEL]

    def _drop_expired(self, scopes: list[str], now: float) -> None:
        for scope in scopes:
            before = self._scopes.get(scope, {})
            after = {peer_id: a for peer_id, a in before.items() if a.expires_at > now}
            self._num_announcements -= len(before) - len(after)
            if after:
                self._scopes[scope] = after
            else:
                self._scopes.pop(scope, None)


def _supersedes(announcement: Announcement, known: Announcement) -> bool:
    """Both must grow: the sequence says what the peer meant, the expiry what a DHT goes by."""
    return announcement.sequence > known.sequence and announcement.expires_at >= known.expires_at
