# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
"""Asks relays for places: without one they do not carry streams to us.

p2pd asks, too, but only the relays that it was told of when it was started.

Imported by the directory only: hivemind takes seconds to import.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from ...endpoints import Relay
from ...errors import RemoteProtocolError, ShoalError, UnavailableError
from ...ids import PeerId
from ..clock import Clock
from ..libp2p.libp2p_transport import P2P
from ..libp2p.p2p_streams import connect, list_peers, open_byte_stream
from .circuit import HOP_PROTOCOL, OK, RESERVE, RelayAnswer, read_answer
from .relay_keeper import RelayKeeper

_MAX_ANSWER_BYTES = 4096
_ANSWER_SECONDS = 4.0


def make_keeper(p2p: P2P, clock: Clock, relays: Sequence[Relay]) -> RelayKeeper:
    """Return who keeps places for the peer of a p2pd, first of all at these relays."""
    return RelayKeeper(P2pdRelayPlaces(p2p), PeerId(str(p2p.peer_id)), clock, relays)


class P2pdRelayPlaces:
    """Places at relays for the peer id of a p2pd."""

    def __init__(self, p2p: P2P) -> None:
        self._p2p = p2p

    async def list_connected(self) -> set[PeerId]:
        """See RelayPlaces; empty when p2pd has ended, which whoever uses it next says, or does not
        answer: the places are asked for again then.
        """
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                found = await list_peers(self._p2p)
        except (ShoalError, TimeoutError):
            return set()
        return {PeerId(peer_id) for peer_id, address in found if "/p2p-circuit" not in address}

    async def reserve(self, relay: Relay) -> None:
        """See RelayPlaces."""
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                address = str(relay).removesuffix(f"/p2p/{relay.peer_id}")
                await connect(self._p2p, relay.peer_id, address)
                answer = await ask_for_place(self._p2p, relay.peer_id)
        except (OSError, EOFError, TimeoutError) as error:
            raise UnavailableError(f"the relay {relay} does not answer") from error
        if answer.status != OK:
            raise UnavailableError(f"the relay {relay} has no place: status {answer.status}")


async def ask_for_place(p2p: P2P, peer_id: PeerId) -> RelayAnswer:
    """Ask a relay that p2pd is connected to; raises ShoalError, OSError or EOFError."""
    reader, writer = await open_byte_stream(p2p, peer_id, HOP_PROTOCOL)
    try:
        writer.write(RESERVE)
        num_bytes = 0
        for shift in range(0, 14, 7):
            (byte,) = await reader.readexactly(1)
            num_bytes |= (byte & 0x7F) << shift
            if byte < 0x80:
                break
        if num_bytes > _MAX_ANSWER_BYTES:
            raise RemoteProtocolError("the answer of the relay is too long")
        return read_answer(await reader.readexactly(num_bytes))
    finally:
        writer.transport.abort()
