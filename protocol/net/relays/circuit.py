# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
"""Circuit relays, as p2pd has them: reservations at others, and whether we are a good relay.

A relay carries streams only to peers that have a reservation there. p2pd makes reservations, too,
but only at the relays that it was told of when it was started. The question and its answer are
those of libp2p's circuit relay v2, in protobuf
(https://github.com/libp2p/specs/blob/master/relay/circuit-v2.md).

p2pd sets up two relay services: one with the limits of its command line, half an hour and 4 GiB for
a connection, as soon as libp2p hears that it is reachable; and at the end of its start always one
with libp2p's default, two minutes and 128 KiB. The one whose handler is set last serves. They run
side by side, no option leaves out the second, and only a peer that asks for a reservation learns
which one it is.

Imported by the directory only: hivemind takes seconds to import.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

from ...endpoints import Relay
from ...errors import RemoteProtocolError, ShoalError, UnavailableError
from ...ids import PeerId
from ...messages.codec import BodyCodec
from ...messages.fields import Body, Message, Record
from ..libp2p.multiaddrs import PeerAddress
from ..libp2p.p2p_daemon import (
    P2P,
    child_of,
    connect,
    list_peers,
    open_byte_stream,
    start_reading_p2pd,
    stop_p2pd,
)

log = logging.getLogger(__name__)

_HOP_PROTOCOL = "/libp2p/circuit/relay/0.2.0/hop"

_RESERVE = bytes([2, 0x08, 0])
"""Its length, and a HopMessage of which field 1, the type, is 0."""

_OK = 100

_MAX_ANSWER_BYTES = 4096
ANSWER_SECONDS = 4.0

_MIN_SECONDS = 600
_MIN_BYTES = 1 << 28
"""Between the limits of both services, far from either."""

MAX_STARTS = 10
"""On a busy machine 15 of 40 starts were not right."""

_ASK_SECONDS = 8.0


class RelayReservations:
    """Reservations at relays for the peer of a p2pd."""

    def __init__(self, p2p: P2P) -> None:
        self._p2p = p2p

    async def list_connected(self) -> set[PeerId]:
        """Return the peers that we are connected to without a relay.

        An empty set when p2pd has ended, as whoever uses it next says, or does not answer: the
        reservations are made again then.
        """
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                found = await list_peers(self._p2p)
        except (ShoalError, TimeoutError):
            return set()
        return {PeerId(peer_id) for peer_id, address in found if "/p2p-circuit" not in address}

    async def reserve(self, relay: Relay, *ways: Relay) -> None:
        """Make a reservation at a relay, or renew the one that we have; raises ShoalError.

        It is dialled at `ways`, where there are any, and else where others know it.
        """
        addresses = [str(way).removesuffix(f"/p2p/{way.peer_id}") for way in ways or (relay,)]
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                await connect(self._p2p, relay.peer_id, *addresses)
                answer = await ask_for_reservation(self._p2p, relay.peer_id)
        except (OSError, EOFError, TimeoutError) as error:
            raise UnavailableError(f"the relay {relay} does not answer") from error
        if answer.status != _OK:
            raise UnavailableError(
                f"the relay {relay} refused a reservation: status {answer.status}"
            )
        if not is_sufficient(answer):
            raise UnavailableError(f"the relay {relay} closes connections too soon")

    async def list_granting(self, relays: Sequence[Relay]) -> list[Relay]:
        """Return those of some peers that are relays and have a place for us."""

        async def grants(relay: Relay) -> bool:
            try:
                await self.reserve(relay)
            except ShoalError as error:
                log.info("%s is no relay for us: %s", relay, error)
                return False
            return True

        answers = await asyncio.gather(*map(grants, relays))
        return [relay for relay, is_granted in zip(relays, answers, strict=True) if is_granted]


async def ask_for_reservation(p2p: P2P, peer_id: PeerId) -> RelayAnswer:
    """Ask a relay that p2pd is connected to; raises ShoalError, OSError or EOFError."""
    reader, writer = await open_byte_stream(p2p, peer_id, _HOP_PROTOCOL)
    try:
        writer.write(_RESERVE)
        num_bytes = 0
        for shift in range(0, 14, 7):
            (byte,) = await reader.readexactly(1)
            num_bytes |= (byte & 0x7F) << shift
            if byte < 0x80:
                break
        if num_bytes > _MAX_ANSWER_BYTES:
            raise RemoteProtocolError("the answer of the relay is too long")
        return read_relay_answer(await reader.readexactly(num_bytes))
    finally:
        writer.transport.abort()


async def start_sufficient_relay(p2p: P2P, start: Callable[[], Awaitable[P2P]]) -> P2P | None:
    """Return a p2pd that carries whole texts: this one, or one that was started in its place.

    None when all of many were not right; then, and when it is interrupted, none is left running.
    """
    try:
        for _ in range(MAX_STARTS):
            if await is_sufficient_relay(p2p):
                return p2p
            log.info("p2pd relays with libp2p's default limits; it is restarted")
            await stop_p2pd(p2p)
            p2p = await start()
        await stop_p2pd(p2p)
    except BaseException:
        if child_of(p2p).returncode is None:
            await stop_p2pd(p2p)
        raise
    log.info("p2pd ignored our limits %d times; this peer is no relay", MAX_STARTS)
    return None


async def is_sufficient_relay(p2p: P2P) -> bool:
    """Return whether a p2pd carries whole texts as a relay, as far as can be found out."""
    try:
        answer = await _ask_as_another(p2p)
    except (ShoalError, OSError, EOFError, TimeoutError) as error:
        log.info("cannot find out the relay limits of this p2pd: %s", error)
        return True
    return is_sufficient(answer)


def is_sufficient(answer: RelayAnswer) -> bool:
    """Return whether a relay with the limits of this answer carries whole texts."""
    limit = answer.limit or RelayLimit()
    is_long = not 0 < limit.max_seconds < _MIN_SECONDS
    return is_long and not 0 < limit.max_bytes < _MIN_BYTES


async def _ask_as_another(p2p: P2P) -> RelayAnswer:
    """Ask for a reservation through a p2pd that was made for it, since none can dial itself.

    With it the reservation goes.
    """
    addresses = [PeerAddress.parse(str(address)) for address in await p2p.get_visible_maddrs()]
    async with asyncio.timeout(_ASK_SECONDS):
        asking = await start_reading_p2pd(addresses, None)
        try:
            return await ask_for_reservation(asking, addresses[0].peer_id)
        finally:
            await stop_p2pd(asking)


@dataclass(frozen=True, slots=True)
class RelayLimit(Record):
    """The limits of one connection through a relay; 0 means none."""

    max_seconds: Annotated[int, Body(1, "uint32")] = 0
    max_bytes: Annotated[int, Body(2, "uint64")] = 0


@dataclass(frozen=True, slots=True)
class RelayAnswer(Message):
    """What we read of the answer of a relay, libp2p's HopMessage; protobuf skips other fields."""

    limit: Annotated[RelayLimit | None, Body(4)] = None
    status: Annotated[int, Body(5, "uint32")] = 0


_ANSWER_CODEC = BodyCodec(RelayAnswer)


def read_relay_answer(message: bytes) -> RelayAnswer:
    """Read the answer of a relay; raises RemoteProtocolError for what is no message of protobuf.

    >>> read_relay_answer(bytes.fromhex("08021a0208012204087810632864"))
    RelayAnswer(limit=RelayLimit(max_seconds=120, max_bytes=99), status=100)
    """
    try:
        return RelayAnswer.read(_ANSWER_CODEC.read(message))
    except ValueError as error:
        raise RemoteProtocolError(f"the answer of the relay is malformed: {error}") from error
