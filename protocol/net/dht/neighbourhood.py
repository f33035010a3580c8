# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
"""Who a node of the DHT knows there, and how it comes back to those it has lost.

hivemind forgets a neighbour that does not answer, and never looks for it again.
"""

from __future__ import annotations

import asyncio
import logging
import random
import warnings
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, cast

from ...errors import DirectoryError
from ...records.announcements import Announcement
from ..p2pd.multiaddrs import PeerAddress, find_listening
from ..p2pd.p2p_daemon import PROBE_SECONDS
from .lost_neighbours import LostNeighbours

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # about what hivemind itself uses
    from hivemind.dht.node import DHTNode
    from hivemind.p2p import P2P, PeerID
    from hivemind.p2p.p2p_daemon_bindings.utils import ControlFailure
    from hivemind.utils.multiaddr import Multiaddr

_logger = logging.getLogger(__name__)

_ANSWER_SECONDS = 1.5
_LOST_AT_ONCE = 2
"""Most of the neighbours that are lost are gone for good."""


class Neighbourhood:
    """The neighbours of one node, and the initial peers, which it goes back to."""

    def __init__(self, node: DHTNode, p2p: P2P, initial_peers: Sequence[PeerAddress]) -> None:
        self._node = node
        self._p2p = p2p
        self.initial_peers = tuple(initial_peers)
        self._lost = LostNeighbours(random.Random())

    def __len__(self) -> int:
        return len(self._table.uid_to_peer_id)

    async def restore(self, relays: Sequence[PeerAddress]) -> None:
        """Go back to the initial peers, and to relays, after losing every neighbour."""
        if len(self):
            return
        self._node.blacklist.clear()
        await self._greet_listening([*self.initial_peers, *relays])
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
            _logger.debug("%s does not answer: %r", peer.text, error)
        else:
            await self._node.protocol.call_ping(peer_id)
