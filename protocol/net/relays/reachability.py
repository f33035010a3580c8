# hivemind's types are partial; what we say ourselves is checked.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
"""How a peer learns whether others can dial it: it asks some of them to try.

What they do then is in `dial_back.py`.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from ...endpoints import Endpoint, Relay
from ...errors import ShoalError
from ...identity import Identity
from ...ids import PeerId
from ..libp2p.p2p_streams import open_byte_stream
from ..p2pd.multiaddrs import PeerAddress
from ..p2pd.p2p_daemon import list_relays, start_reading_p2pd, start_serving_p2pd, stop_p2pd
from ..tcp.tcp_transport import TcpTransport
from ..transport import Stream
from .dial_back import ANSWER_SECONDS, NOT_REACHED, PAUSE_SECONDS, PROTOCOL, QUESTION, REACHED
from .relay_keeper import NUM_RELAYS, rank_relays
from .relay_service import start_until_it_carries

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # about what hivemind itself uses
    from hivemind.p2p import P2P

log = logging.getLogger(__name__)

_MAX_ANSWER_BYTES = 64
"""The verdict, and an address."""

_MAX_ASKED = 4
"""How many peers are asked; more than half of those with an opinion decide."""


@dataclass(frozen=True)
class Reach:
    """What one peer says of an endpoint that it was asked to dial."""

    is_reached: bool | None
    """None: it had no time to try, or no idea."""
    seen_host: str
    """Where it sees the machine that asked; that is what it dialled. Empty if it did not say."""

    def says_no(self, host: str) -> bool:
        """Return whether it means that others cannot dial this host.

        Reached at another one, we are behind a NAT that lets the port through, and would announce
        an address that means nothing outside. A public one the other may know from within, by its
        own.
        """
        if self.is_reached and self.seen_host != host:
            return not _is_for_everybody(host)
        return self.is_reached is False


_SILENCE = Reach(None, "")


async def make_reachable(
    p2p: P2P,
    initial_peers: Sequence[PeerAddress],
    identity: Identity | None,
    host: str,
    port: int,
    endpoint: Endpoint,
) -> tuple[P2P, Sequence[Relay]]:
    """Return a p2pd that is a relay for others, or one behind relays when nobody can dial us.

    With it come all that may be relays, best first; p2pd is told of as many as are needed. It is
    the one that was given, or a new one.
    """

    async def start(*trusted: Relay) -> P2P:
        return await start_serving_p2pd(initial_peers, identity, host, port, trusted)

    relays = rank_relays(PeerId(str(p2p.peer_id)), list_relays(initial_peers))
    if not relays or await can_be_dialled(p2p, endpoint):
        return await start_until_it_carries(p2p, start), ()
    await stop_p2pd(p2p)
    return await start(*relays[:NUM_RELAYS]), relays


async def can_be_dialled(p2p: P2P, endpoint: Endpoint) -> bool:
    """Return whether those that p2pd is connected to can dial our endpoint, by most of them.

    Without a majority against it the answer is yes: so it is for the first peer of a swarm.
    """
    answers = await ask_others(p2p, endpoint)
    num_against = sum(answer.says_no(endpoint.host) for answer in answers)
    num_for = sum(
        bool(answer.is_reached) and answer.seen_host == endpoint.host for answer in answers
    )
    return num_against <= num_for


async def probe(addresses: Sequence[str], host: str, port: int, announced_host: str) -> list[Reach]:
    """Listen for a moment as a peer would, and return whether others can dial that.

    Raises UsageError when nobody can listen there, DirectoryError when no address answers.
    """
    transport = TcpTransport()
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


async def ask_others(p2p: P2P, endpoint: Endpoint) -> list[Reach]:
    """Ask some of those that p2pd is connected to whether they can dial our endpoint.

    Where nobody had a turn for our host, another peer on it may just have asked: we ask once more.
    """
    try:
        neighbours: Any = await cast(Any, p2p)._client.list_peers()
    except (OSError, EOFError):
        return []  # p2pd has ended; whoever uses it next says so
    peer_ids = [neighbour.peer_id.to_base58() for neighbour in neighbours][:_MAX_ASKED]
    answers = await asyncio.gather(*(_ask(p2p, peer_id, endpoint) for peer_id in peer_ids))
    said = [answer for answer in answers if answer != _SILENCE]
    if said and all(answer.is_reached is None for answer in said):
        await asyncio.sleep(PAUSE_SECONDS)
        answers = await asyncio.gather(*(_ask(p2p, peer_id, endpoint) for peer_id in peer_ids))
    num_reaching = sum(bool(answer.is_reached) for answer in answers)
    log.info("of %d peers, %d can dial us", len(answers), num_reaching)
    return list(answers)


async def _hang_up(stream: Stream) -> None:
    return


async def _ask(p2p: P2P, peer_id: str, endpoint: Endpoint) -> Reach:
    """Return what one peer answers."""
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
    return Reach(verdict, answer[1:].decode("ascii", "replace"))


async def _read_answer(reader: asyncio.StreamReader) -> bytes:
    """Return everything up to the end of an answer, which is short."""
    answer = b""
    while len(answer) < _MAX_ANSWER_BYTES and (more := await reader.read(_MAX_ANSWER_BYTES)):
        answer += more
    return answer


def _is_for_everybody(host: str) -> bool:
    """Return whether a host means the same everywhere: a name, or a public address."""
    try:
        return ipaddress.ip_address(host).is_global
    except ValueError:
        return True
