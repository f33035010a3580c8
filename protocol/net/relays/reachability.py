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
from collections.abc import Collection, Sequence
from typing import Any

from ...endpoints import Endpoint
from ...errors import ShoalError
from ...fair_share import FairLimit
from ...ids import PeerId
from ..addresses import DialBackAnswer, list_own_hosts
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
from .reach import Reach, judge_reach

log = logging.getLogger(__name__)

PROTOCOL = "/shoal/dial-back/1"

QUESTION = struct.Struct(">H32s")
REACHED, NOT_REACHED, NOT_TRIED = b"y", b"n", b"b"

_DIAL_SECONDS = 3.0
ANSWER_SECONDS = 6.0
"""Time that the asking peer waits: a dial, and a slow round trip."""

MAX_QUESTIONS = 16
"""How many are answered at once; each host is held to its share."""

_MAX_ANSWER_BYTES = 64
"""The verdict, and an address."""

PAUSE_SECONDS = 10.0
"""How long older peers answer every further question of one host with `NOT_TRIED`."""

_MAX_ASKED = 4
"""How many peers are asked; half of those with an opinion decide."""


async def answer_dial_back(p2p: P2P) -> None:
    """From now on dial those that ask a p2pd for it, and tell them whether they were reached."""
    limit = FairLimit(MAX_QUESTIONS, "questions")

    async def serve(info: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one question, unless the asker holds too many streams already."""
        try:
            with limit.hold(name_dialler(info)):
                async with asyncio.timeout(ANSWER_SECONDS):
                    port, fingerprint = QUESTION.unpack(await reader.readexactly(QUESTION.size))
                    writer.write(await _answer(str(info.addr), port, fingerprint.hex()))
                    await writer.drain()
        except (ShoalError, OSError, EOFError, TimeoutError) as error:
            log.debug("could not answer the reachability question of %s: %r", info.addr, error)
        finally:
            writer.close()

    await p2p.add_binary_stream_handler(PROTOCOL, serve)


async def _answer(address: str, port: int, fingerprint: str) -> bytes:
    """Return the verdict on a port at the address of the asker, and that address."""
    host, _ = split_multiaddr(address)
    if not port or not host or "/p2p-circuit" in address:
        return NOT_TRIED + host.encode()
    endpoint = Endpoint(host, port, fingerprint)
    try:
        async with asyncio.timeout(_DIAL_SECONDS):
            await check_certificate(endpoint)
    except (ShoalError, TimeoutError) as error:
        log.debug("%s cannot be dialled back: %s", endpoint, error)
        return NOT_REACHED + host.encode()
    return REACHED + host.encode()


async def find_reach(
    p2p: P2P, endpoint: Endpoint, listen_host: str, among: Collection[PeerId] | None = None
) -> Reach:
    """Return from where those who know us can dial our endpoint, whatever host we announce.

    Whoever is on this machine is not asked: he would reach us through any firewall. Nor is anybody
    else than those `among` whom we ask, if that is said.
    """
    own_hosts = list_own_hosts(listen_host)
    return judge_reach(own_hosts, await ask_others(p2p, endpoint, own_hosts, among))


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


async def ask_others(
    p2p: P2P,
    endpoint: Endpoint,
    own_hosts: Collection[str] = (),
    among: Collection[PeerId] | None = None,
) -> list[DialBackAnswer]:
    """Ask some of those that p2pd is connected to whether they can dial our endpoint.

    Where peers answered, but none has tried, another peer on our host may just have asked: we ask
    once more.
    """
    try:
        neighbours = await list_peers(p2p)
    except ShoalError:
        return []  # p2pd has ended; whoever uses it next says so
    own_hosts = {*own_hosts} - {"127.0.0.1"}
    others = [id for id, address in neighbours if split_multiaddr(address)[0] not in own_hosts]
    peer_ids = [id for id in others if among is None or id in among][:_MAX_ASKED]
    answers = await asyncio.gather(*(_ask(p2p, peer_id, endpoint) for peer_id in peer_ids))
    if any(answer.seen_host for answer in answers) and all(
        answer.is_reached is None for answer in answers
    ):
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
        return DialBackAnswer(None, "")
    verdict = {REACHED: True, NOT_REACHED: False}.get(answer[:1])
    return DialBackAnswer(verdict, answer[1:].decode("ascii", "replace"))


async def _read_answer(reader: asyncio.StreamReader) -> bytes:
    """Return everything up to the end of an answer, which is short."""
    answer = b""
    while len(answer) < _MAX_ANSWER_BYTES and (more := await reader.read(_MAX_ANSWER_BYTES)):
        answer += more
    return answer
