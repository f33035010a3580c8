"""Streams that peers have opened to this one so that it can reach them: nobody can dial them.

They wait here until there is something to push. What keeps one alive is TCP's keepalive, which both
ends send every 15 seconds: NATs forget what is silent for a minute.
"""

import asyncio
import logging
from dataclasses import dataclass, field

from ...protocol.errors import ShoalError
from ...protocol.fair_share import check_share, name_address
from ...protocol.ids import PeerId
from ...protocol.messages.codec import encode_frame
from ...protocol.messages.reverse_connections import Offer, Parked, check_offer
from ...protocol.messages.session import Lane
from ...protocol.net.clock import AnswerTimeout
from ...protocol.net.tasks import cancel_all
from ...protocol.net.transport import Stream, refuse_large_frames

_logger = logging.getLogger(__name__)

_MAX_STREAMS = 512
"""Of all peers. Those of one address are held to their share, whatever ids it makes up."""

_MAX_STREAMS_PER_LANE = 2
"""Of one peer. Behind a NAT that was restarted it parks a new one before the old one is missed."""

_TELL_SECONDS = 10.0
"""Time for the offering peer to read that its stream is kept; nothing else was sent to it."""


@dataclass(eq=False)
class _ParkedStream:
    key: tuple[PeerId, Lane]
    address: str
    stream: Stream
    hearing: asyncio.Task[bytes | None] = field(init=False)
    is_taken: bool = False

    def __post_init__(self) -> None:
        # Nothing is said on it, but so it is noticed when somebody does, or when it ends.
        self.hearing = asyncio.create_task(self.stream.receive())


class ParkedStreams:
    """All of them, at one peer. `fingerprint` is that of its TLS key."""

    def __init__(self, fingerprint: str) -> None:
        self._fingerprint = fingerprint
        self._parked: list[_ParkedStream] = []  # oldest first

    def check(self, offer: Offer, nonce: bytes) -> None:
        """Raise RemoteProtocolError unless an offer is genuine and made for this stream."""
        check_offer(offer, self._fingerprint, nonce)

    def has(self, peer_id: PeerId, lane: Lane) -> bool:
        """Return whether a stream to a peer is there to be taken."""
        return bool(self._list((peer_id, lane)))

    async def take(self, peer_id: PeerId, lane: Lane) -> Stream | None:
        """Return the newest stream of a peer, for the caller to close; None if there is none."""
        while parked := self._list((peer_id, lane)):
            newest = parked[-1]
            self._parked.remove(newest)
            if newest.hearing.done():
                continue  # its end was not seen yet
            newest.is_taken = True
            await cancel_all([newest.hearing])
            return newest.stream
        return None

    async def keep(self, offer: Offer, stream: Stream) -> None:
        """Keep a stream whose offer was checked, until it is over, here or at its taker.

        It takes the place of the oldest one, where its peer has enough. Raises RefusedError when
        there is no room for it, SilentError when its peer does not read that it is kept.
        """
        key = offer.peer_id, Lane.BULK if offer.is_bulk else Lane.INTERACTIVE
        address = name_address(stream.remote_host)
        too_old = self._list(key)[: 1 - _MAX_STREAMS_PER_LANE]
        addresses = [other.address for other in self._parked if other not in too_old]
        check_share(address, addresses, _MAX_STREAMS, "streams to peers that cannot be dialled")
        for oldest in too_old:
            self._parked.remove(oldest)
            oldest.hearing.cancel()
        stream.set_gate(refuse_large_frames)
        parked = _ParkedStream(key, address, stream)
        self._parked.append(parked)
        try:
            async with AnswerTimeout(_TELL_SECONDS, "the offering peer does not read"):
                await stream.send(encode_frame(Parked()))
            await asyncio.wait({parked.hearing})
        finally:
            if parked in self._parked:
                self._parked.remove(parked)
            await cancel_all([parked.hearing])
            _read(parked.hearing)
        if parked.is_taken:
            await parked.stream.wait_over()

    def _list(self, key: tuple[PeerId, Lane]) -> list[_ParkedStream]:
        return [parked for parked in self._parked if parked.key == key]


def _read(hearing: asyncio.Task[bytes | None]) -> None:
    """Note how a stream ended, which is of no consequence."""
    if not hearing.cancelled() and isinstance(hearing.exception(), ShoalError):
        _logger.debug("a parked stream ended: %s", hearing.exception())
