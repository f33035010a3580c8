# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
"""Sees to it that a peer which carries for others carries whole texts.

p2pd sets up two relay services: one with the limits of its command line, half an hour and 4 GiB for
a connection, as soon as libp2p hears that it is reachable; and at the end of its start always one
with libp2p's default, two minutes and 128 KiB. The one whose handler is set last serves. They run
side by side, no option leaves out the second, and only who asks for a place learns which one it is.

Imported by the directory only: hivemind takes seconds to import.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from ...errors import ShoalError
from ..libp2p.libp2p_transport import P2P
from ..p2pd.multiaddrs import PeerAddress
from ..p2pd.p2p_daemon import child_of, start_reading_p2pd, stop_p2pd
from .circuit import RelayAnswer
from .relay_places import ask_for_place

log = logging.getLogger(__name__)

_MIN_SECONDS = 600
_MIN_BYTES = 1 << 28
"""Between the limits of both services, far from either."""

_MAX_STARTS = 10
"""Nearly always the first one is right; on a busy machine one in fifteen was not."""

_ASK_SECONDS = 8.0


async def start_until_it_carries(p2p: P2P, start: Callable[[], Awaitable[P2P]]) -> P2P:
    """Return a p2pd that carries whole texts: this one, or one that was started in its place.

    When that is interrupted, none is left running.
    """
    try:
        for _ in range(_MAX_STARTS):
            if await carries_texts(p2p):
                return p2p
            log.info("p2pd serves as a relay with the limits of libp2p: it is started anew")
            await stop_p2pd(p2p)
            p2p = await start()
    except BaseException:
        if child_of(p2p).returncode is None:
            await stop_p2pd(p2p)
        raise
    log.warning("this relay cuts connections after 128 KiB; restart the peer")
    return p2p


async def carries_texts(p2p: P2P) -> bool:
    """Return whether a p2pd carries whole texts as a relay, as far as can be found out."""
    try:
        answer = await _ask_as_another(p2p)
    except (ShoalError, OSError, EOFError, TimeoutError) as error:
        log.info("cannot find out how much we carry as a relay: %s", error)
        return True
    is_long = not 0 < answer.max_seconds < _MIN_SECONDS
    return is_long and not 0 < answer.max_bytes < _MIN_BYTES


async def _ask_as_another(p2p: P2P) -> RelayAnswer:
    """Ask for a place through a p2pd that was made for it, since none can dial itself.

    With it the place goes.
    """
    addresses = [PeerAddress.parse(str(address)) for address in await p2p.get_visible_maddrs()]
    async with asyncio.timeout(_ASK_SECONDS):
        asking = await start_reading_p2pd(addresses, None)
        try:
            return await ask_for_place(asking, addresses[0].peer_id)
        finally:
            await stop_p2pd(asking)
