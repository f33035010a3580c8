"""The peers that run passes, lost ones and their replacements, for progress reports."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ...protocol.ids import PeerId
from ..routing.route import Hop, LostHopError

_MOST_UNSEEN = 256
"""Nobody may be watching."""

_MOST_KNOWN = 4096
"""A crowd of names may come and go; who is forgotten is not told of, or once more."""


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
    """The events since the last look: peers that answered, and peers that were lost.

    Batches are many passes: a peer is told of once when it is lost, and again only if it has
    answered one since. Who could not be reached to begin with took no part, and nobody misses it.
    """

    def __init__(self) -> None:
        self._unseen: dict[PeerId, PassFailover] = {}
        self._recent_hops: dict[PeerId, Hop] = {}
        self._is_lost: dict[PeerId, bool] = {}
        """Of each peer that took part, the newest at the end."""

    def note_reached(self, peer_id: PeerId) -> None:
        """Note that a peer takes part: a stream leads there."""
        self._is_lost[peer_id] = self._is_lost.pop(peer_id, False)
        if len(self._is_lost) > _MOST_KNOWN:
            del self._is_lost[next(iter(self._is_lost))]

    def note_answer(self, hop: Hop) -> None:
        """Note that a peer has done its part of a pass."""
        self._is_lost[hop.peer.peer_id] = False
        self._recent_hops[hop.peer.peer_id] = hop

    def note(self, lost: Iterable[LostHopError], replacements: Sequence[Hop]) -> None:
        """Note that others have done what some peers did not."""
        for error in lost:
            peer_id = error.hop.peer.peer_id
            others = tuple(hop for hop in replacements if hop.peer.peer_id != peer_id)
            if replacements and not others:
                continue  # it did the same in the end
            if self._is_lost.get(peer_id, True):
                continue
            self._is_lost[peer_id] = True
            failover = PassFailover(error.hop, str(error), error.what_happened, others)
            if len(self._unseen) < _MOST_UNSEEN:
                self._unseen.setdefault(peer_id, failover)

    def take(self) -> list[PassFailover]:
        """Return the failovers that are new."""
        failovers, self._unseen = list(self._unseen.values()), {}
        return failovers

    def take_recent_hops(self) -> list[Hop]:
        """Return who answered since this was called last, in the order of blocks."""
        hops, self._recent_hops = self._recent_hops.values(), {}
        return sorted(hops, key=lambda hop: (hop.span.start, hop.span.stop, hop.peer.peer_id))
