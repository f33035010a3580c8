# hivemind's types are partial; what we say ourselves is checked.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
"""What a peer does for others that want to know whether they can be dialled: it tries.

The question travels over libp2p, on a connection that the one who asks has opened: its port and
TLS fingerprint. It is dialled at the address that it asks from, at no other, so that nobody can
have others dial a third party. The answer is a verdict, and that address.
"""

from __future__ import annotations

import asyncio
import logging
import struct
import warnings
from typing import Any

from ...endpoints import Endpoint
from ...errors import ShoalError
from ...fair_share import name_holder
from ..clock import Clock
from ..libp2p.shared_places import SharedPlaces, name_dialler
from ..p2pd.multiaddrs import split_multiaddr
from ..tcp.tls import fetch_pinned_certificate

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # about what hivemind itself uses
    from hivemind.p2p import P2P

log = logging.getLogger(__name__)

PROTOCOL = "/shoal/dial-back/1"

QUESTION = struct.Struct(">H32s")
REACHED, NOT_REACHED, BUSY = b"y", b"n", b"b"

_DIAL_SECONDS = 3.0
ANSWER_SECONDS = 6.0
"""How long who asks waits: a dial, and a slow way there and back."""

_MAX_QUESTIONS = 64
"""How many are listened to at once."""

_MAX_DIALS_AT_ONCE = 4
_MAX_HOSTS = 64
PAUSE_SECONDS = 10.0
"""How long a host waits for its next turn, and 64 others for theirs. Peers ask on start only."""


class DialBack:
    """Dials those who ask for it, and tells them whether they answered."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._dialled_at: dict[str, float] = {}
        self._num_dialling = 0
        self._places = SharedPlaces(_MAX_QUESTIONS, "questions")

    async def start(self, p2p: P2P) -> None:
        """Answer questions that reach a p2pd, until it ends."""
        await p2p.add_binary_stream_handler(PROTOCOL, self._serve)

    async def _serve(
        self, info: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Answer one question, or nothing to who holds too many streams already."""
        try:
            with self._places.hold(name_dialler(info)):
                async with asyncio.timeout(ANSWER_SECONDS):
                    port, fingerprint = QUESTION.unpack(await reader.readexactly(QUESTION.size))
                    writer.write(await self._answer(str(info.addr), port, fingerprint.hex()))
                    await writer.drain()
        except (ShoalError, OSError, EOFError, TimeoutError) as error:
            log.debug("a question from %s was not answered: %r", info.addr, error)
        finally:
            writer.close()

    async def _answer(self, address: str, port: int, fingerprint: str) -> bytes:
        host, _ = split_multiaddr(address)
        is_relayed = "/p2p-circuit" in address
        if not port or not host or is_relayed or not self.take_turn(host):
            return BUSY + host.encode()
        return await self._dial(Endpoint(host, port, fingerprint)) + host.encode()

    def take_turn(self, host: str) -> bool:
        """Return whether it is a host's turn, and note that it was."""
        holder = name_holder(host)
        now = self._clock.now()
        recent = {name: at for name, at in self._dialled_at.items() if now - at < PAUSE_SECONDS}
        self._dialled_at = recent
        is_full = len(recent) >= _MAX_HOSTS or self._num_dialling >= _MAX_DIALS_AT_ONCE
        if is_full or holder in recent:
            return False
        recent[holder] = now
        return True

    async def _dial(self, endpoint: Endpoint) -> bytes:
        self._num_dialling += 1
        try:
            async with asyncio.timeout(_DIAL_SECONDS):
                await fetch_pinned_certificate(endpoint)
        except (ShoalError, TimeoutError) as error:
            log.debug("%s cannot be dialled back: %s", endpoint, error)
            return NOT_REACHED
        finally:
            self._num_dialling -= 1
        return REACHED
