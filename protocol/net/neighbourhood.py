# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
"""Who a node of the DHT knows there, and how it comes back to those it has lost.

hivemind forgets a neighbour that does not answer, and never looks for it again.
"""

from __future__ import annotations

import asyncio
import logging
import warnings
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, cast

from ..errors import DirectoryError
from .multiaddrs import PeerAddress, find_listening
from .p2p_daemon import PROBE_SECONDS

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # about what hivemind itself uses
    from hivemind.dht.node import DHTNode
    from hivemind.p2p import P2P, PeerID
    from hivemind.p2p.p2p_daemon_bindings.utils import ControlFailure
    from hivemind.utils.multiaddr import Multiaddr

_logger = logging.getLogger(__name__)

_ANSWER_SECONDS = 1.5


class Neighbourhood:
    """The neighbours of one node, and the initial peers, which it goes back to."""

    def __init__(self, node: DHTNode, p2p: P2P, initial_peers: Sequence[PeerAddress]) -> None:
        self._node = node
        self._p2p = p2p
        self.initial_peers = tuple(initial_peers)

    def __len__(self) -> int:
        return len(self._table.uid_to_peer_id)

    async def restore(self, relays: Sequence[PeerAddress]) -> None:
        """Go back to the initial peers, and to relays, after losing every neighbour."""
        if len(self):
            return
        self._node.blacklist.clear()
        await self._greet_listening([*self.initial_peers, *relays])
        await asyncio.sleep(0)  # the answers enter the routing table in tasks of their own

    async def look_for_lost(self) -> None:
        """Go back to the initial peers that are no neighbours.

        One that begins its swarm again after a restart knows nobody, and would stay alone while
        the others know each other.
        """
        lost = [peer for peer in self.initial_peers if not self._knows(peer)]
        if lost:
            await self._greet_listening(lost)

    @property
    def _table(self) -> Any:
        return self._node.protocol.routing_table

    def _knows(self, peer: PeerAddress) -> bool:
        return self._table.get(peer_id=PeerID.from_base58(peer.peer_id)) is not None

    async def _greet_listening(self, peers: Sequence[PeerAddress]) -> None:
        # After a failed dial, libp2p refuses that address for 5 s, and longer each time.
        with suppress(DirectoryError):
            listening = await find_listening(peers, PROBE_SECONDS)
            await asyncio.gather(*map(self._greet, listening))

    async def _greet(self, peer: PeerAddress) -> None:
        peer_id = PeerID.from_base58(peer.peer_id)
        transport_address = Multiaddr(peer.text.rpartition("/p2p/")[0])
        try:
            # A ping alone would need p2pd to remember an address, which it does for a while.
            async with asyncio.timeout(_ANSWER_SECONDS):
                await cast(Any, self._p2p)._client.connect(peer_id, [transport_address])
        except (ControlFailure, OSError, EOFError, TimeoutError) as error:
            _logger.debug("%s does not answer: %r", peer.text, error)
        else:
            await self._node.protocol.call_ping(peer_id)
