# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
"""The neighbours of a DHT node, and how it reconnects to those it has lost.

hivemind forgets a neighbour that does not answer, and never looks for it again.
"""

from __future__ import annotations

import asyncio
import logging
import warnings
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from itertools import islice
from random import Random
from typing import Any, cast

from ...errors import DirectoryError, UsageError
from ...ids import PeerId
from ...records.announcements import Announcement, PeerState
from ..p2pd.multiaddrs import PeerAddress, find_listening
from ..p2pd.p2p_daemon import PROBE_SECONDS

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # about what hivemind itself uses
    from hivemind.dht.node import DHTNode
    from hivemind.p2p import P2P, PeerID
    from hivemind.p2p.p2p_daemon_bindings.utils import ControlFailure
    from hivemind.utils.multiaddr import Multiaddr

_logger = logging.getLogger(__name__)

_ANSWER_SECONDS = 1.5
MAX_LOST = 128
LOST_SECONDS = 24 * 3600.0
"""How long a neighbour is remembered that fell silent."""

_LOST_AT_ONCE = 2
"""Most of the neighbours that are lost are gone for good."""

_MAX_RELAYS = 16
"""Relays that are dialled at once when all neighbours are gone."""


class Neighbourhood:
    """The neighbours of one node, and the initial peers, which it goes back to."""

    def __init__(self, node: DHTNode, p2p: P2P, initial_peers: Sequence[PeerAddress]) -> None:
        self._node = node
        self._p2p = p2p
        self.initial_peers = tuple(initial_peers)
        self._lost = LostNeighbours(Random())
        self._relays: Sequence[PeerAddress] = ()

    def __len__(self) -> int:
        return len(self._table.uid_to_peer_id)

    def note_relays(self, announced: Iterable[Announcement]) -> None:
        """Remember where those can be joined that say that they are relays, if there are any."""
        self._relays = list_relay_addresses(announced) or self._relays

    async def restore(self) -> None:
        """Go back to the initial peers, and to relays, after losing every neighbour."""
        if len(self):
            return
        self._node.blacklist.clear()
        await self._greet_listening([*self.initial_peers, *self._relays])
        await asyncio.sleep(0)  # the answers enter the routing table in tasks of their own

    async def look_for_lost(self, announced: Iterable[Announcement], now: float) -> None:
        """Go back to the initial peers that are no neighbours, and to some others that were.

        An initial peer that begins its swarm again after a restart knows nobody, and would stay
        alone while the others know each other. So would the two parts of a network that was split,
        once the peers are gone through which they had joined. Those who are announced tell where
        they can be dialled; `now` is the wall second.
        """
        known = {peer_id.to_base58() for peer_id in self._table.uid_to_peer_id.values()}
        self._lost.note(known, announced, now)
        lost = [peer for peer in self.initial_peers if peer.peer_id not in known]
        if lost := [*lost, *self._lost.draw(_LOST_AT_ONCE)]:
            await self._greet_listening(lost)

    @property
    def _table(self) -> Any:
        return self._node.protocol.routing_table

    async def _greet_listening(self, peers: Sequence[PeerAddress]) -> None:
        # After a failed dial, libp2p refuses that address for 5 s, and longer each time.
        with suppress(DirectoryError):
            listening = await find_listening(peers, PROBE_SECONDS)
            await asyncio.gather(*map(self._greet, listening))

    async def _greet(self, peer: PeerAddress) -> None:
        peer_id = PeerID.from_base58(peer.peer_id)
        try:
            transport_address = Multiaddr(peer.text.rpartition("/p2p/")[0])
            # A ping alone would need p2pd to remember an address, which it does for a while.
            async with asyncio.timeout(_ANSWER_SECONDS):
                await cast(Any, self._p2p)._client.connect(peer_id, [transport_address])
        except (ControlFailure, OSError, EOFError, TimeoutError, ValueError) as error:
            _logger.debug("the neighbour %s does not answer: %r", peer.text, error)
        else:
            await self._node.protocol.call_ping(peer_id)


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


def find_relay_address(peer: Announcement) -> PeerAddress | None:
    """Return where a peer can be joined that says that it is a relay for others.

    None also where it says what is no address, such as 300.1.1.1: strangers name their hosts.
    """
    if (relay := peer.as_relay) is None:
        return None
    try:
        return PeerAddress.parse(str(relay))
    except UsageError:
        return None


def list_relay_addresses(announcements: Iterable[Announcement]) -> list[PeerAddress]:
    """Return where some of those peers can be joined who say that they are relays for others."""
    found = (address for peer in announcements if (address := find_relay_address(peer)))
    return list(islice(found, _MAX_RELAYS))
