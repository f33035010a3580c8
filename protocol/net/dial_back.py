# hivemind's types are partial; what we say ourselves is checked.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
"""How a peer learns whether others can dial it: it asks some of them to try.

The question travels over libp2p, on a connection that the one who asks has opened: its port and
TLS fingerprint. It is dialled at the address that it asks from, at no other, so that nobody can
have others dial a third party. The answer is a verdict, and that address.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import struct
import warnings
from collections.abc import Sequence
from typing import Any, cast

from ..endpoints import Endpoint, Relay
from ..errors import ShoalError
from ..identity import Identity
from .clock import Clock
from .multiaddrs import PeerAddress, split_multiaddr
from .p2p_daemon import choose_relays, start_serving_p2pd, stop_p2pd
from .p2p_streams import open_byte_stream
from .tls import fetch_pinned_certificate

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # about what hivemind itself uses
    from hivemind.p2p import P2P

log = logging.getLogger(__name__)

PROTOCOL = "/shoal/dial-back/1"

_QUESTION = struct.Struct(">H32s")
_REACHED, _NOT_REACHED, _BUSY = b"y", b"n", b"b"

_MAX_ANSWER_BYTES = 64
"""The verdict, and an address."""

_DIAL_SECONDS = 3.0
_ANSWER_SECONDS = 6.0
"""How long who asks waits: a dial, and a slow way there and back."""

_MAX_ASKED = 4
"""How many peers are asked; more than half of those with an opinion decide."""

_MAX_DIALS_AT_ONCE = 4
_MAX_HOSTS = 64
_PAUSE_SECONDS = 10.0
"""How long a host waits for its next turn, and 64 others for theirs. Peers ask once, on start."""


class DialBack:
    """Dials those who ask for it, and tells them whether they answered."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._dialled_at: dict[str, float] = {}
        self._num_dialling = 0

    async def start(self, p2p: P2P) -> None:
        """Answer questions that reach a p2pd, until it ends."""
        await p2p.add_binary_stream_handler(PROTOCOL, self._serve)

    async def _serve(
        self, info: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Answer one question."""
        host, _ = split_multiaddr(str(info.addr))
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                port, fingerprint = _QUESTION.unpack(await reader.readexactly(_QUESTION.size))
                is_relayed = "/p2p-circuit" in str(info.addr)
                if not port or not host or is_relayed or not self._may_dial(host):
                    answer = _BUSY
                else:
                    answer = await self._dial(Endpoint(host, port, fingerprint.hex()))
                writer.write(answer + host.encode())
                await writer.drain()
        except (OSError, EOFError, TimeoutError) as error:
            log.debug("a question to dial %s back was not answered: %r", host, error)
        finally:
            writer.close()

    def _may_dial(self, host: str) -> bool:
        """Return whether it is a host's turn, and note that it was."""
        now = self._clock.now()
        recent = {name: at for name, at in self._dialled_at.items() if now - at < _PAUSE_SECONDS}
        self._dialled_at = recent
        if host in recent or len(recent) >= _MAX_HOSTS or self._num_dialling >= _MAX_DIALS_AT_ONCE:
            return False
        recent[host] = now
        return True

    async def _dial(self, endpoint: Endpoint) -> bytes:
        self._num_dialling += 1
        try:
            async with asyncio.timeout(_DIAL_SECONDS):
                await fetch_pinned_certificate(endpoint)
        except (ShoalError, TimeoutError) as error:
            log.debug("%s cannot be dialled back: %s", endpoint, error)
            return _NOT_REACHED
        finally:
            self._num_dialling -= 1
        return _REACHED


async def make_reachable(
    p2p: P2P,
    initial_peers: Sequence[PeerAddress],
    identity: Identity | None,
    host: str,
    port: int,
    endpoint: Endpoint,
) -> tuple[P2P, Sequence[Relay]]:
    """Return p2pd as it is, or a new one behind relays when others cannot dial the endpoint."""
    relays = choose_relays(initial_peers)
    if not relays or await can_be_dialled(p2p, endpoint):
        return p2p, ()
    await stop_p2pd(p2p)
    return await start_serving_p2pd(initial_peers, identity, host, port, relays), relays


async def can_be_dialled(p2p: P2P, endpoint: Endpoint) -> bool:
    """Ask some of those that p2pd is connected to whether they can dial our endpoint.

    Without a majority against it the answer is yes: so it is for the first peer of a swarm.
    """
    try:
        neighbours: Any = await cast(Any, p2p)._client.list_peers()
    except (OSError, EOFError):
        return True  # p2pd has ended; whoever uses it next says so
    peer_ids = [neighbour.peer_id.to_base58() for neighbour in neighbours]
    asked = peer_ids[:_MAX_ASKED]
    answers: Sequence[bytes] = await asyncio.gather(
        *(_ask(p2p, peer_id, endpoint) for peer_id in asked)
    )
    log.info("of %d peers, %d can dial us", len(answers), answers.count(_REACHED))
    return answers.count(_NOT_REACHED) <= answers.count(_REACHED)


async def _ask(p2p: P2P, peer_id: str, endpoint: Endpoint) -> bytes:
    """Return what one peer answers; nothing when it does not."""
    try:
        async with asyncio.timeout(_ANSWER_SECONDS):
            reader, writer = await open_byte_stream(p2p, peer_id, PROTOCOL)
            try:
                writer.write(_QUESTION.pack(endpoint.port, bytes.fromhex(endpoint.fingerprint)))
                return _judge(await _read_answer(reader), endpoint)
            finally:
                writer.close()
    except (ShoalError, OSError, EOFError, TimeoutError) as error:
        log.debug("peer …%s does not say whether it can dial us: %s", peer_id[-6:], error)
        return b""


async def _read_answer(reader: asyncio.StreamReader) -> bytes:
    """Return everything up to the end of an answer, which is short."""
    answer = b""
    while len(answer) < _MAX_ANSWER_BYTES and (more := await reader.read(_MAX_ANSWER_BYTES)):
        answer += more
    return answer


def _judge(answer: bytes, endpoint: Endpoint) -> bytes:
    """Return the verdict, as far as it is about the host that we announce.

    Reached at another one, we are behind a NAT that lets the port through, and would announce an
    address that means nothing outside. A public one the other may know from within, by its own.
    """
    verdict, host = answer[:1], answer[1:]
    if verdict == _REACHED and host != endpoint.host.encode():
        return _BUSY if _is_for_everybody(endpoint.host) else _NOT_REACHED
    return verdict


def _is_for_everybody(host: str) -> bool:
    """Return whether a host means the same everywhere: a name, or a public address."""
    try:
        return ipaddress.ip_address(host).is_global
    except ValueError:
        return True
