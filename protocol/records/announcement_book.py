"""The newest announcement of each peer that one process knows, bounded.

The one place that decides, for every directory, which of two announcements stands and which one
has to go when there are too many.
"""

from __future__ import annotations

import hashlib
from heapq import nsmallest
from itertools import chain, islice

from .. import limits
from ..errors import RemoteProtocolError
from ..ids import PeerId
from ..messages.records import DIGEST_BYTES
from .announcements import Announcement, KnownRecord, PeerState

HINT_SECONDS = 24 * 3600.0
"""How long after its expiry an announcement tells whom to dial."""

_DISPLACED_PARTS = 100
"""One of so many announcements of a full scope give way at once."""


def digest_record(value: bytes) -> bytes:
    """Return the short name of a record."""
    return hashlib.sha256(value).digest()[:DIGEST_BYTES]


class AnnouncementBook:
    """The newest announcement of each peer, in separate scopes (a model, or a model of a swarm).

    Remembers an announcement until it expires, so that a replay of an older one is recognised; and
    for a day more as a hint whom to dial, unless the room is needed or the peer said goodbye.

    A reserved scope, one that this process uses itself, has its room for certain; in a full one the
    peers that came first stay. All others share theirs, and the announcement gives way that was
    renewed longest ago. Why, and what a flood still can do, is in
    docs/decisions/0008-who-stays-when-a-book-is-full.md.
    """

    def __init__(
        self,
        max_per_scope: int = limits.MAX_ANNOUNCEMENTS_PER_MODEL,
        max_shared: int = limits.MAX_ANNOUNCEMENTS_PER_MODEL,
    ) -> None:
        self._max_per_scope = max_per_scope
        self._max_shared = max_shared
        # In each scope in the order in which peers came; a renewal keeps the place.
        self._scopes: dict[str, dict[PeerId, KnownRecord]] = {}
        # Of scopes that are not reserved, in the order of renewals, the longest ago first.
        self._shared: dict[tuple[str, PeerId], None] = {}
        self._reserved: set[str] = set()
        self._own: set[PeerId] = set()
        self._by_value: dict[bytes, KnownRecord] = {}

    def __len__(self) -> int:
        return sum(map(len, self._scopes.values()))

    def count(self, scope: str) -> int:
        """Return how many announcements of a scope are known, hints included."""
        return len(self._scopes.get(scope, ()))

    def list_scopes(self) -> list[str]:
        """Return the scopes of which anything is known."""
        return list(self._scopes)

    def reserve(self, scope: str) -> None:
        """Keep the room of a scope for it from now on, whatever happens in others."""
        self._reserved.add(scope)
        for peer_id in self._scopes.get(scope, ()):
            self._shared.pop((scope, peer_id), None)

    def is_own(self, peer_id: PeerId) -> bool:
        """Return whether a peer is one of this process."""
        return peer_id in self._own

    def find(self, value: bytes) -> Announcement | None:
        """Return the announcement in a value that is known, without a look at its signature."""
        known = self._by_value.get(value)
        return None if known is None else known.announcement

    def add_own(
        self, scope: str, announcement: Announcement, value: bytes, now: float
    ) -> KnownRecord:
        """Do what `add` does for a peer of this process: it never gives way in this scope."""
        self._own.add(announcement.peer_id)
        self.reserve(scope)
        return self.add(scope, announcement, value, now)

    def add(self, scope: str, announcement: Announcement, value: bytes, now: float) -> KnownRecord:
        """Remember an announcement that holds at `now` (wall seconds), and how it travels.

        One that is known already changes nothing. Raises RemoteProtocolError when another one of
        the same peer is newer.
        """
        peer_id = announcement.peer_id
        entry = self._scopes.get(scope, {}).get(peer_id)
        known = None if entry is None else entry.announcement
        if entry is not None and known == announcement:
            return entry
        if known is not None and known.expires_at > now and not _supersedes(announcement, known):
            raise RemoteProtocolError("a newer announcement of this peer is already known")
        if entry is None:
            self._make_room(scope, now)
        else:
            del self._by_value[entry.value]
        entry = KnownRecord(announcement, value, digest_record(value))
        self._by_value[value] = self._scopes.setdefault(scope, {})[peer_id] = entry
        if scope not in self._reserved:
            self._shared.pop((scope, peer_id), None)
            self._shared[scope, peer_id] = None
        return entry

    def list_current(self, scope: str, now: float) -> list[Announcement]:
        """Return what holds at `now`, at most `limits.MAX_ANNOUNCEMENTS_PER_MODEL`."""
        return [known.announcement for known in self.list_records(scope, now)]

    def list_records(self, scope: str, now: float) -> list[KnownRecord]:
        """Return what holds at `now`, with the bytes in which it travels."""
        peers = self._scopes.get(scope, {}).values()
        return [known for known in peers if known.announcement.expires_at > now]

    def list_own(self, scope: str, now: float) -> list[KnownRecord]:
        """Return those that hold of peers of this process."""
        peers = self._scopes.get(scope, {})
        own = [peers[peer_id] for peer_id in self._own if peer_id in peers]
        return [known for known in own if known.announcement.expires_at > now]

    def list_hints(self, scope: str, now: float) -> list[Announcement]:
        """Return what has expired, the newest first: whom to dial to see who is still there."""
        self._forget_old(scope, now)
        peers = (known.announcement for known in self._scopes.get(scope, {}).values())
        expired = (peer for peer in peers if peer.expires_at <= now)
        return sorted(expired, key=lambda peer: peer.expires_at, reverse=True)

    def _forget_old(self, scope: str, now: float) -> None:
        for peer_id, (announcement, *_) in list(self._scopes.get(scope, {}).items()):
            is_hint = announcement.state is not PeerState.OFFLINE
            if announcement.expires_at + (HINT_SECONDS if is_hint else 0.0) <= now:
                self._forget(scope, peer_id)

    def _make_room(self, scope: str, now: float) -> None:
        """Make a place for one more peer in a scope, at the cost of others if need be."""
        if self.count(scope) >= self._max_per_scope:
            peers = self._scopes[scope]
            # Several, since finding what has expired takes a millisecond, and more will come.
            num_displaced = max(1, self._max_per_scope // _DISPLACED_PARTS)
            past = (known.announcement for known in peers.values() if known[0].expires_at <= now)
            first = nsmallest(num_displaced, past, key=lambda peer: peer.expires_at)
            # What expired first; else, of the half that came last, those that came first: a flood
            # moves on in this half.
            expired = [peer.peer_id for peer in first]
            givers = chain(expired, islice(peers, len(peers) // 2, None), peers)
            able = (peer_id for peer_id in givers if peer_id not in self._own)
            for peer_id in dict.fromkeys(islice(able, num_displaced)):
                self._forget(scope, peer_id)
        elif scope not in self._reserved:
            self._forget_shared(now)

    def _forget_shared(self, now: float) -> None:
        """Make a place among those that nobody here uses, and forget what has expired there."""
        while self._shared:
            scope, peer_id = next(iter(self._shared))
            is_expired = self._scopes[scope][peer_id].announcement.expires_at <= now
            if not is_expired and len(self._shared) < self._max_shared:
                break
            self._forget(scope, peer_id)

    def _forget(self, scope: str, peer_id: PeerId) -> None:
        self._shared.pop((scope, peer_id), None)
        peers = self._scopes.get(scope, {})
        if (known := peers.pop(peer_id, None)) is not None:
            del self._by_value[known.value]
        if not peers:
            self._scopes.pop(scope, None)


def _supersedes(announcement: Announcement, known: Announcement) -> bool:
    """Both must grow: the sequence says what the peer meant, the expiry what a DHT goes by."""
    return announcement.sequence > known.sequence and announcement.expires_at >= known.expires_at
