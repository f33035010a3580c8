"""Streams that peers have opened to this one so that it can reach them: nobody can dial them.

They wait here until there is something to push. What keeps one alive is TCP's keepalive, which both
ends send every 15 seconds: NATs forget what is silent for a minute.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field

from ...protocol.errors import DirectoryError, ErrorCode, RefusedError, ShoalError, UnavailableError
from ...protocol.fair_share import BUSY_SECONDS, check_room_for, name_address
from ...protocol.ids import PeerId
from ...protocol.messages.reverse_connections import Offer, Parked, check_offer
from ...protocol.messages.session import Lane
from ...protocol.net.clock import Clock
from ...protocol.net.transport import Stream, refuse_large_frames
from ...protocol.records.announcements import Announcement
from ...protocol.wire.codec import encode_frame
from ..process.background import cancel_all

_logger = logging.getLogger(__name__)

_MAX_STREAMS = 512
"""Of all peers. Those of one address are held to their share, whatever ids it makes up."""

_MAX_STREAMS_PER_LANE = 2
"""Of one peer. Behind a NAT that was restarted it parks a new one before the old one is missed."""

_CHECK_SECONDS = 900.0
"""How often to see whether a peer that parks streams is announced still."""

_TELL_SECONDS = 10.0
"""Time for the offering peer to read that its stream is kept; nothing else was sent to it."""


@dataclass(frozen=True, eq=False)
class _Reservation:
    """Room for an offered stream, which at first waits for the directory."""

    key: tuple[PeerId, Lane]
    address: str


@dataclass(eq=False)
class _ParkedStream:
    reservation: _Reservation
    stream: Stream
    hearing: asyncio.Task[bytes | None] = field(init=False)
    is_taken: bool = False

    def __post_init__(self) -> None:
        # Nothing is said on it, but so it is noticed when somebody does, or when it ends.
        self.hearing = asyncio.create_task(self.stream.receive())


class ParkedStreams:
    """All of them, at one peer. `fingerprint` is that of its TLS key."""

    def __init__(
        self,
        fingerprint: str,
        look: Callable[[], Awaitable[Iterable[Announcement]]],
        clock: Clock,
        period_seconds: float,
    ) -> None:
        """`look` reads the announced peers, at most once in a period."""
        self._fingerprint = fingerprint
        self._look = look
        self._clock = clock
        self._period_seconds = period_seconds
        self._reservations: set[_Reservation] = set()
        self._parked: list[_ParkedStream] = []  # oldest first; all are reserved
        self._announced: frozenset[PeerId] = frozenset()
        self._looked_at = float("-inf")
        self._looking = asyncio.Lock()

    def check(self, offer: Offer, nonce: bytes) -> None:
        """Raise RemoteProtocolError unless an offer is genuine and made for this stream."""
        check_offer(offer, self._fingerprint, nonce)

    def has(self, peer_id: PeerId, lane: Lane) -> bool:
        """Return whether a stream to a peer is there to be taken."""
        return bool(self._list((peer_id, lane)))

    async def take(self, peer_id: PeerId, lane: Lane) -> Stream | None:
        """Return the newest stream of a peer, which is to be closed by who takes it; None if there
        is none.
        """
        while parked := self._list((peer_id, lane)):
            newest = parked[-1]
            self._remove(newest)
            if newest.hearing.done():
                continue  # its end was not seen yet
            newest.is_taken = True
            await cancel_all([newest.hearing])
            return newest.stream
        return None

    async def keep(self, offer: Offer, stream: Stream) -> None:
        """Keep a stream whose offer was checked, until it is over: here, or for who took it.

        Raises RefusedError when it is not kept.
        """
        reservation = self._reserve(offer, name_address(stream.remote_host))
        try:
            await self._check_is_announced(offer.peer_id)
            stream.set_gate(refuse_large_frames)
            await _tell_parked(stream)
            await self._keep(_ParkedStream(reservation, stream))
        finally:
            self._reservations.discard(reservation)

    async def _keep(self, parked: _ParkedStream) -> None:
        """Keep a stream instead of the oldest one, where its peer has enough."""
        peer_id, _ = key = parked.reservation.key
        for oldest in self._list(key)[: 1 - _MAX_STREAMS_PER_LANE]:
            self._remove(oldest)
            oldest.hearing.cancel()
        self._parked.append(parked)
        try:
            while not parked.hearing.done() and peer_id in self._announced:
                await asyncio.wait({parked.hearing}, timeout=_CHECK_SECONDS)
                if not parked.hearing.done():
                    await self._look_again()
        finally:
            self._remove(parked)
            await cancel_all([parked.hearing])
            _read(parked.hearing)
        if parked.is_taken:
            await parked.stream.wait_over()

    def _remove(self, parked: _ParkedStream) -> None:
        """Take a stream out and its reservation back, unless that was done."""
        if parked in self._parked:
            self._parked.remove(parked)
        self._reservations.discard(parked.reservation)

    def _list(self, key: tuple[PeerId, Lane]) -> list[_ParkedStream]:
        return [parked for parked in self._parked if parked.reservation.key == key]

    async def _check_is_announced(self, peer_id: PeerId) -> None:
        """Raise RefusedError unless the directory lists the peer for this model."""
        if peer_id not in self._announced:
            await self._look_again()
        if peer_id not in self._announced:
            detail = "streams are kept for peers only, and you have not announced yourself"
            raise RefusedError(ErrorCode.BUSY, detail, self._period_seconds)

    async def _look_again(self) -> None:
        """Read the announced peers, unless that was done a moment ago: strangers trigger it."""
        async with self._looking:
            if self._clock.now() - self._looked_at < self._period_seconds:
                return
            self._looked_at = self._clock.now()
            try:
                self._announced = frozenset(peer.peer_id for peer in await self._look())
            except DirectoryError as error:
                _logger.debug("cannot look up which peers may park streams: %s", error)

    def _reserve(self, offer: Offer, address: str) -> _Reservation:
        """Reserve room for one more stream; raises RefusedError when there is none.

        A peer may have one more than it keeps, which replaces its oldest one.
        """
        lane = Lane.BULK if offer.is_bulk else Lane.INTERACTIVE
        reservation = _Reservation((offer.peer_id, lane), address)
        if (
            sum(other.key == reservation.key for other in self._reservations)
            > _MAX_STREAMS_PER_LANE
        ):
            detail = "another stream of this peer is about to be parked"
            raise RefusedError(ErrorCode.BUSY, detail, BUSY_SECONDS)
        oldest = self._list(reservation.key)[: 1 - _MAX_STREAMS_PER_LANE]
        others = self._reservations - {parked.reservation for parked in oldest}
        addresses = [other.address for other in others]
        check_room_for(address, addresses, _MAX_STREAMS, "streams to peers that cannot be dialled")
        self._reservations.add(reservation)
        return reservation


async def _tell_parked(stream: Stream) -> None:
    """Say that a stream is kept. Raises UnavailableError if nobody reads it."""
    try:
        async with asyncio.timeout(_TELL_SECONDS):
            await stream.send(encode_frame(Parked()))
    except TimeoutError as error:
        raise UnavailableError("the peer that offered the stream does not read from it") from error


def _read(hearing: asyncio.Task[bytes | None]) -> None:
    """Note how a stream ended, which is of no consequence."""
    if not hearing.cancelled() and isinstance(hearing.exception(), ShoalError):
        _logger.debug("a parked stream ended: %s", hearing.exception())
