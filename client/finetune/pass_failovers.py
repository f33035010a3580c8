"""Peers that were lost in the middle of a pass, and who took over, for whoever watches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ...protocol.ids import PeerId
from ..blame import LostHopError
from ..router import Hop

_MOST_UNSEEN = 256
"""Nobody may be watching."""


@dataclass(frozen=True)
class PassFailover:
    """One peer that did not do its part of a pass, and who did it in its place.

    Without replacements nobody hosts all of these blocks any more: several peers share them.
    """

    lost: Hop
    reason: str
    what_happened: str
    """In a few words, behind the name of the lost peer; `reason` has all of them."""
    replacements: tuple[Hop, ...]


class PassFailovers:
    """What has happened since somebody looked, once for each lost peer: batches are many passes."""

    def __init__(self) -> None:
        self._unseen: dict[PeerId, PassFailover] = {}

    def note(self, lost: Iterable[LostHopError], replacements: Sequence[Hop]) -> None:
        """Note that others have done what some peers did not."""
        for error in lost:
            others = tuple(
                hop for hop in replacements if hop.peer.peer_id != error.hop.peer.peer_id
            )
            if replacements and not others:
                continue  # it did the same in the end
            failover = PassFailover(error.hop, str(error), error.what_happened, others)
            if len(self._unseen) < _MOST_UNSEEN:
                self._unseen.setdefault(error.hop.peer.peer_id, failover)

    def take(self) -> list[PassFailover]:
        """Return what is new."""
        failovers, self._unseen = list(self._unseen.values()), {}
        return failovers
