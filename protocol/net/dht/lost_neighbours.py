"""Who was a neighbour in the DHT, is none any more, and may come back. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from random import Random

from ...ids import PeerId
from ...records.announcements import Announcement, PeerState
from ..p2pd.multiaddrs import PeerAddress, find_relay_address

MAX_LOST = 128
LOST_SECONDS = 24 * 3600.0
"""How long a neighbour is remembered that fell silent."""


class LostNeighbours:
    """Remembers where those can be dialled who were neighbours: the newest ones, for a day.

    Who says goodbye is forgotten. Only who has answered as itself becomes a neighbour, so an
    announcement alone has nobody dialled.
    """

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._met: dict[PeerId, PeerAddress] = {}
        self._lost: dict[PeerId, tuple[PeerAddress, float]] = {}  # and since when, newest last

    def note(self, known: Collection[str], announced: Iterable[Announcement], now: float) -> None:
        """Take down who is a neighbour at this wall second, and where it says that it is."""
        for peer_id in [peer_id for peer_id in self._met if peer_id not in known]:
            self._lost[peer_id] = self._met.pop(peer_id), now
        for peer in announced:
            if peer.state is PeerState.OFFLINE:
                self._met.pop(peer.peer_id, None)
                self._lost.pop(peer.peer_id, None)
            elif peer.peer_id in known and (address := find_relay_address(peer)) is not None:
                self._met[peer.peer_id] = address
        for peer_id, (_, since) in list(self._lost.items()):
            is_too_old = now - since > LOST_SECONDS or len(self._lost) > MAX_LOST
            if is_too_old or peer_id in known:
                del self._lost[peer_id]

    def draw(self, num_most: int) -> list[PeerAddress]:
        """Return some of those that are lost, by lot."""
        lost = [address for address, _ in self._lost.values()]
        return self._rng.sample(lost, min(num_most, len(lost)))
