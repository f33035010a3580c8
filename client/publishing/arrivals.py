"""Which peers have come, or come back, since somebody looked last."""

from __future__ import annotations

from collections.abc import Sequence

from ...protocol.ids import PeerId
from ...protocol.records.announcements import Announcement

_MOST_ANNOUNCEMENTS = 1000
"""So many a peer makes hardly between two looks: a larger step of its sequence, which begins at
wall milliseconds, says that it was restarted."""


class Arrivals:
    """Remembers who was there."""

    def __init__(self) -> None:
        self._seen: dict[PeerId, Announcement] = {}

    def list_new(self, peers: Sequence[Announcement]) -> list[Announcement]:
        """Return who was not there the last time, was restarted since, or has other blocks now."""
        new = [peer for peer in peers if self._is_new(peer)]
        self._seen = {peer.peer_id: peer for peer in peers}
        return new

    def _is_new(self, peer: Announcement) -> bool:
        before = self._seen.get(peer.peer_id)
        return (
            before is None
            or before.span != peer.span
            or peer.sequence - before.sequence > _MOST_ANNOUNCEMENTS
        )
