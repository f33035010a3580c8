# hivemind's types are partial; what we say ourselves is checked.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
"""Dial-back: how a peer learns whether others can dial it. It asks some of them to try.

The question travels over libp2p, on a connection that the asking peer has opened: its port and TLS
fingerprint. It is dialled at the address that it asks from, at no other, so that nobody can have
others dial a third party. The answer is a verdict, and that address.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import Sequence
from typing import Any

from ...endpoints import Endpoint
from ...errors import ShoalError
from ...fair_share import FairLimit, name_address
from ..addresses import DialBackAnswer
from ..clock import Clock
from ..libp2p.multiaddrs import PeerAddress, split_multiaddr
from ..libp2p.p2p_daemon import (
    P2P,
    list_peers,
    name_dialler,
    open_byte_stream,
    start_reading_p2pd,
    stop_p2pd,
)
from ..tcp.tls import check_certificate
from ..transport import Stream, Transport

log = logging.getLogger(__name__)

PROTOCOL = "/shoal/dial-back/1"

QUESTION = struct.Struct(">H32s")
REACHED, NOT_REACHED, BUSY = b"y", b"n", b"b"

_DIAL_SECONDS = 3.0
ANSWER_SECONDS = 6.0
"""Time that the asking peer waits: a dial, and a slow round trip."""

MAX_QUESTIONS = 64
"""How many are listened to at once."""

_MAX_DIALS_AT_ONCE = 4
_MAX_HOSTS = 64
PAUSE_SECONDS = 10.0
"""How long a host waits for its next turn, and 64 others for theirs. Peers ask on start only."""

_MAX_ANSWER_BYTES = 64
"""The verdict, and an address."""

_MAX_ASKED = 4
"""How many peers are asked; more than half of those with an opinion decide."""


class DialBack:
    """Dials peers that ask for it, and tells them whether they could be reached."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._dialled_at: dict[str, float] = {}
        self._num_dialling = 0
        self._limit = FairLimit(MAX_QUESTIONS, "questions")

    async def start(self, p2p: P2P) -> None:
        """Answer questions that reach a p2pd, until it ends."""
        await p2p.add_binary_stream_handler(PROTOCOL, self._serve)

    async def _serve(
        self, info: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Answer one question, unless the asker holds too many streams already."""
        try:
            with self._limit.hold(name_dialler(info)):
                async with asyncio.timeout(ANSWER_SECONDS):
                    port, fingerprint = QUESTION.unpack(await reader.readexactly(QUESTION.size))
                    writer.write(await self._answer(str(info.addr), port, fingerprint.hex()))
                    await writer.drain()
        except (ShoalError, OSError, EOFError, TimeoutError) as error:
            log.debug("could not answer the reachability question of %s: %r", info.addr, error)
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
        tenant = name_address(host)
        now = self._clock.now()
        recent = {name: at for name, at in self._dialled_at.items() if now - at < PAUSE_SECONDS}
        self._dialled_at = recent
        is_full = len(recent) >= _MAX_HOSTS or self._num_dialling >= _MAX_DIALS_AT_ONCE
        if is_full or tenant in recent:
            return False
        recent[tenant] = now
        return True

    async def _dial(self, endpoint: Endpoint) -> bytes:
        self._num_dialling += 1
        try:
            async with asyncio.timeout(_DIAL_SECONDS):
                await check_certificate(endpoint)
        except (ShoalError, TimeoutError) as error:
            log.debug("%s cannot be dialled back: %s", endpoint, error)
            return NOT_REACHED
        finally:
            self._num_dialling -= 1
        return REACHED


_SILENCE = DialBackAnswer(None, "")


async def can_be_dialled(p2p: P2P, endpoint: Endpoint) -> bool:
    """Return whether those that p2pd is connected to can dial our endpoint, by most of them.

    Without a majority against it the answer is yes: so it is for the first peer of a swarm.
    """
    answers = await ask_others(p2p, endpoint)
    num_against = sum(answer.denies(endpoint.host) for answer in answers)
    num_for = sum(
        bool(answer.is_reached) and answer.seen_host == endpoint.host for answer in answers
    )
    return num_against <= num_for


async def probe(
    transport: Transport, addresses: Sequence[str], host: str, port: int, announced_host: str
) -> list[DialBackAnswer]:
    """Listen for a moment as a peer would, and return whether others can dial that.

    Closes the transport.

    Raises UsageError when nobody can listen there, DirectoryError when no address answers.
    """
    try:
        listening = (await transport.listen(host, port, _hang_up)).endpoint
        p2p = await start_reading_p2pd([PeerAddress.parse(text) for text in addresses], None)
        try:
            endpoint = Endpoint(announced_host, listening.port, listening.fingerprint)
            return await ask_others(p2p, endpoint)
        finally:
            await stop_p2pd(p2p)
    finally:
        await transport.close()


async def ask_others(p2p: P2P, endpoint: Endpoint) -> list[DialBackAnswer]:
    """Ask some of those that p2pd is connected to whether they can dial our endpoint.

    Where nobody had a turn for our host, another peer on it may just have asked: we ask once more.
    """
    try:
        neighbours = await list_peers(p2p)
    except ShoalError:
        return []  # p2pd has ended; whoever uses it next says so
    peer_ids = [peer_id for peer_id, _ in neighbours[:_MAX_ASKED]]
    answers = await asyncio.gather(*(_ask(p2p, peer_id, endpoint) for peer_id in peer_ids))
    said = [answer for answer in answers if answer != _SILENCE]
    if said and all(answer.is_reached is None for answer in said):
        await asyncio.sleep(PAUSE_SECONDS)
        answers = await asyncio.gather(*(_ask(p2p, peer_id, endpoint) for peer_id in peer_ids))
    num_reaching = sum(bool(answer.is_reached) for answer in answers)
    log.info(
        "%d peers answered whether they can dial us, %d of them can", len(answers), num_reaching
    )
    return list(answers)


async def _hang_up(stream: Stream) -> None:
    return


async def _ask(p2p: P2P, peer_id: str, endpoint: Endpoint) -> DialBackAnswer:
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            reader, writer = await open_byte_stream(p2p, peer_id, PROTOCOL)
            try:
                writer.write(QUESTION.pack(endpoint.port, bytes.fromhex(endpoint.fingerprint)))
                answer = await _read_answer(reader)
            finally:
                writer.close()
    except (ShoalError, OSError, EOFError, TimeoutError) as error:
        log.debug("peer …%s does not say whether it can dial us: %s", peer_id[-6:], error)
        return _SILENCE
    verdict = {REACHED: True, NOT_REACHED: False}.get(answer[:1])
    return DialBackAnswer(verdict, answer[1:].decode("ascii", "replace"))


async def _read_answer(reader: asyncio.StreamReader) -> bytes:
    """Return everything up to the end of an answer, which is short."""
    answer = b""
    while len(answer) < _MAX_ANSWER_BYTES and (more := await reader.read(_MAX_ANSWER_BYTES)):
        answer += more
    return answer
