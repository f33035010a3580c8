"""The newest announcement of each peer that one process knows, bounded.

The one place that decides, for every directory, which of two announcements stands and who has to
go when there are too many.
"""

from __future__ import annotations

import hashlib
import secrets
from bisect import insort
from collections.abc import Callable
from functools import lru_cache

from .. import limits
from ..errors import RemoteProtocolError
from ..ids import PeerId
from .announcements import Announcement, check_is_current, verify_announcement

_SWEEP_SECONDS = 1.0
"""How often a full book looks for expired announcements: not for each one of a flood."""


class AnnouncementBook:
    """The newest announcement of each peer, in separate scopes (a model, or a model of a swarm).

    Remembers an announcement until it expires, so that a replay of an older one is recognised.

    A reserved scope, one that this process uses itself, has its room for certain. All others
    share theirs: when that is used up, the largest gives way to smaller ones. Where a place is
    fought for, who came long ago stays, and a lottery decides between the others; why, and what
    a flood still can do, is in docs/decisions/0008-who-stays-when-a-book-is-full.md.
    """

    def __init__(
        self,
        max_per_scope: int = limits.MAX_ANNOUNCEMENTS_PER_MODEL,
        max_shared: int = 2 * limits.MAX_ANNOUNCEMENTS_PER_MODEL,
        secret: bytes | None = None,
    ) -> None:
        """Make an empty book. `secret` decides the lottery; a fresh one by default."""
        self._max_per_scope = max_per_scope
        self._max_shared = max_shared
        self._secret = secret or secrets.token_bytes(16)
        self.on_displaced: Callable[[str, PeerId], None] = lambda scope, peer_id: None
        """Called with each peer that had to give way to another one."""
        self._scopes: dict[str, _Scope] = {}
        self._reserved: set[str] = set()
        self._own: set[PeerId] = set()
        self._num_shared = 0
        self._largest: str | None = None  # of the shared scopes; None when to be found anew
        self._swept_at = float("-inf")
        # Directories hand in the same record again and again, and a signature takes about 0.1 ms.
        self._verify = lru_cache(maxsize=max_per_scope + max_shared)(verify_announcement)

    def __len__(self) -> int:
        return sum(map(len, self._scopes.values()))

    def reserve(self, scope: str) -> None:
        """Keep the room of a scope for it from now on, whatever happens in others."""
        if scope not in self._reserved:
            self._change_size(scope, -len(self._scopes.get(scope, ())))
            self._reserved.add(scope)

    def read(self, record: bytes, now: float) -> Announcement:
        """Do what `read_announcement` does, faster when the record was seen before."""
        announcement = self._verify(record)
        check_is_current(announcement, now)
        return announcement

    def add_own(self, scope: str, record: bytes, now: float) -> Announcement:
        """Do what `add` does for a peer of this process: there is always room for it."""
        peer_id = self.read(record, now).peer_id
        self.reserve(scope)
        if peer_id not in self._own:
            self._own.add(peer_id)
            if scope in self._scopes:
                self._scopes[scope].draw_lots()  # it may be among them, with another lot
        return self.add(scope, record, now)

    def add(self, scope: str, record: bytes, now: float) -> Announcement:
        """Remember a record; one that is known already changes nothing.

        Raises RemoteProtocolError when the record is not valid at `now` (wall seconds), when
        another one of the same peer is newer, and when there is no room for it.
        """
        announcement = self.read(record, now)
        peers = self._scopes.get(scope) or _Scope(self._draw_lot)
        known = peers.find(announcement.peer_id)
        if known == announcement:
            return announcement
        if known is not None and known.expires_at > now and not _supersedes(announcement, known):
            raise RemoteProtocolError("a newer announcement of this peer is already known")
        if known is None:
            self._make_room(scope, announcement.peer_id, now)
            self._scopes[scope] = peers
            self._change_size(scope, 1)
        peers.put(announcement)
        return announcement

    def list_current(self, scope: str, now: float) -> list[Announcement]:
        """Return what holds at `now`, at most `limits.MAX_ANNOUNCEMENTS_PER_MODEL`."""
        self._drop_expired([scope], now)
        return self._scopes[scope].list_all() if scope in self._scopes else []

    def _make_room(self, scope: str, peer_id: PeerId, now: float) -> None:
        """Make a place in a scope for a peer that is new there, at the cost of another if need be.

        Raises RemoteProtocolError when the others go before.
        """
        if not self._is_full(scope):
            return
        if not 0 <= now - self._swept_at < _SWEEP_SECONDS:
            self._swept_at = now
            self._drop_expired(list(self._scopes), now)
            if not self._is_full(scope):
                return
        giving = self._choose_giving(scope)
        if giving == scope and not self._wins_place(scope, peer_id):
            raise RemoteProtocolError("there are too many announcements")
        displaced = self._scopes[giving].remove_weakest()
        self._change_size(giving, -1)
        self.on_displaced(giving, displaced)

    def _is_full(self, scope: str) -> bool:
        if len(self._scopes.get(scope, ())) >= self._max_per_scope:
            return True
        return scope not in self._reserved and self._num_shared >= self._max_shared

    def _choose_giving(self, scope: str) -> str:
        """Return which scope loses a place: the largest, unless ours is about as large."""
        num_peers = len(self._scopes.get(scope, ()))
        if num_peers >= self._max_per_scope:
            return scope
        if self._largest is None:
            shared = (name for name in self._scopes if name not in self._reserved)
            self._largest = max(shared, key=lambda name: len(self._scopes[name]))
        return self._largest if len(self._scopes[self._largest]) > num_peers + 1 else scope

    def _wins_place(self, scope: str, peer_id: PeerId) -> bool:
        if scope not in self._scopes:
            return False
        return self._draw_lot(peer_id) < self._draw_lot(self._scopes[scope].find_weakest())

    def _draw_lot(self, peer_id: PeerId) -> bytes:
        """Return a peer's lot; the least wins. Always the same, so that coming often is no use."""
        if peer_id in self._own:
            return b""
        return hashlib.blake2b(peer_id.encode(), key=self._secret, digest_size=8).digest()

    def _drop_expired(self, scopes: list[str], now: float) -> None:
        for scope in scopes:
            if scope in self._scopes:
                self._change_size(scope, -self._scopes[scope].drop_expired(now))
                if not self._scopes[scope]:
                    del self._scopes[scope]

    def _change_size(self, scope: str, num_more: int) -> None:
        if scope not in self._reserved:
            self._num_shared += num_more
            self._largest = None


class _Scope:
    """The announcements of one scope, in the order in which their peers were first seen."""

    def __init__(self, draw_lot: Callable[[PeerId], bytes]) -> None:
        self._draw_lot = draw_lot
        self._announcements: dict[PeerId, Announcement] = {}
        # Whoever is not of the older half, the next to go at the end; empty until there is need.
        self._contenders: list[PeerId] = []

    def __len__(self) -> int:
        return len(self._announcements)

    def find(self, peer_id: PeerId) -> Announcement | None:
        return self._announcements.get(peer_id)

    def list_all(self) -> list[Announcement]:
        return list(self._announcements.values())

    def put(self, announcement: Announcement) -> None:
        """Remember a peer's announcement; a renewal keeps the peer's place in the order."""
        if self._contenders and announcement.peer_id not in self._announcements:
            insort(self._contenders, announcement.peer_id, key=self._draw_lot)
        self._announcements[announcement.peer_id] = announcement

    def draw_lots(self) -> None:
        """Decide again which peers are the older half, and in which order the others go."""
        younger = list(self._announcements)[len(self._announcements) // 2 :]
        self._contenders = sorted(younger, key=self._draw_lot)

    def find_weakest(self) -> PeerId:
        """Return the next peer to go."""
        if not self._contenders:
            self.draw_lots()
        return self._contenders[-1]

    def remove_weakest(self) -> PeerId:
        """Remove the next peer to go, and return it."""
        peer_id = self.find_weakest()
        self._contenders.pop()
        del self._announcements[peer_id]
        return peer_id

    def drop_expired(self, now: float) -> int:
        """Forget what no longer holds; return how many that were."""
        current = {p: a for p, a in self._announcements.items() if a.expires_at > now}
        num_expired = len(self._announcements) - len(current)
        if num_expired:
            self._announcements, self._contenders = current, []
        return num_expired


def _supersedes(announcement: Announcement, known: Announcement) -> bool:
    """Both must grow: the sequence says what the peer meant, the expiry what a DHT goes by."""
    return announcement.sequence > known.sequence and announcement.expires_at >= known.expires_at
