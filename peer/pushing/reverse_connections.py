"""Streams that a peer which cannot be dialled keeps open to others, for them to push over.

Each is parked at a peer whose span ends where the own one begins. When that says Hello on it, it is
served like one that was accepted, and another one is parked in its place.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace

from ...protocol.errors import DirectoryError, RemoteProtocolError, ShoalError, UnavailableError
from ...protocol.identity import Identity
from ...protocol.ids import PeerId
from ...protocol.messages.codec import check_kind, encode_frame, read_answer
from ...protocol.messages.reverse_connections import Parked, make_offer
from ...protocol.messages.session import Lane
from ...protocol.net.clock import AnswerTimeout, Clock
from ...protocol.net.dialling import dial, greet_peer
from ...protocol.net.directory import KNOWN_PERIODS, Directory
from ...protocol.net.retry import Backoff, Retry
from ...protocol.net.tasks import cancel_all
from ...protocol.net.transport import Stream, StreamServer, Transport
from ...protocol.records.announcements import MAX_PARKED_AT, Announcement, PeerState, shorten
from ...protocol.records.coordinates import ORIGIN, estimate_rtt_seconds
from ...protocol.versions import REVERSE_VERSION

_logger = logging.getLogger(__name__)

_LOOK_SECONDS = 3.0
"""How often to see whether streams are parked elsewhere than was announced."""

_OFFER_SECONDS = 10.0
"""How long it may take to park a stream."""

_SETTLED_SECONDS = 5.0
"""A peer that keeps a stream for less, or declines it, is offered the next one ever later."""

_AGAIN = Backoff(1.0, 30.0)
"""Not more: a client that makes a peer break a stream keeps others from the edge as well."""

_LAST_WORDS_SECONDS = 1.0

_Key = tuple[PeerId, Lane]


def choose_hosts(
    own: Announcement,
    others: Iterable[Announcement],
    kept: Collection[PeerId] = (),
    failing: Collection[PeerId] = (),
) -> list[Announcement]:
    """Return the peers to park streams at: those that a chain may lead from to the own span, can be
    dialled and understand it. Those that have `kept` streams come first, then the nearest, and last
    those `failing` to.

    Steps, replays and mirrors all come from peers before it in a chain, which dial in the same
    way; so no other peer needs a stream.
    """
    fitting = [
        peer
        for peer in others
        if peer.peer_id != own.peer_id
        and peer.state is PeerState.ONLINE
        and peer.endpoints
        and peer.max_version >= REVERSE_VERSION
        and peer.span.start < own.span.start
        and own.span.adjoins(peer.span)
    ]

    def rank(peer: Announcement) -> tuple[bool, bool, float, PeerId]:
        here, there = own.coordinate or ORIGIN, peer.coordinate or ORIGIN
        is_known = here.is_settled and there.is_settled
        seconds = estimate_rtt_seconds(here, there) if is_known else float("inf")
        return peer.peer_id not in kept, peer.peer_id in failing, seconds, peer.peer_id

    return sorted(fitting, key=rank)[:MAX_PARKED_AT]


class ReverseConnections:
    """The reverse connections of one peer. Owned by its runner; `serve` gets each used stream."""

    def __init__(
        self,
        identity: Identity,
        transport: Transport,
        directory: Directory,
        serve: StreamServer,
        clock: Clock,
        period_seconds: float,
    ) -> None:
        """The directory is read once in a period."""
        self._identity = identity
        self._transport = transport
        self._directory = directory
        self._serve = serve
        self._clock = clock
        self._period_seconds = period_seconds
        self._own: Announcement | None = None
        self._hosts: dict[PeerId, Announcement] = {}
        self._parked: set[_Key] = set()  # also while another stream takes the place of a used one
        self._parking: dict[_Key, asyncio.Task[None]] = {}
        self._serving: dict[asyncio.Task[None], Stream] = {}

    def describe(self, announcement: Announcement) -> Announcement:
        """Return an announcement of the peer itself that tells where its streams are parked."""
        self._own = replace(announcement, parked_at=self._list_ready())
        return self._own

    def _list_ready(self) -> tuple[str, ...]:
        """Return how the ids of those end that have a stream for each lane."""
        of_lane = [{peer_id for peer_id, other in self._parked if other is lane} for lane in Lane]
        return tuple(sorted(map(shorten, set.intersection(*of_lane))))

    async def run(self, note_change: Callable[[Sequence[str]], None]) -> None:
        """Keep streams parked until cancelled; `note_change` hears how the ids end of those that
        hold them, when these are others than before.
        """
        looked_at, noted = float("-inf"), self._list_ready()
        try:
            while True:
                is_due = self._clock.now() - looked_at >= self._period_seconds
                if is_due and self._own is not None and self._own.state is not PeerState.JOINING:
                    looked_at = self._clock.now()
                    await self._look(self._own)
                if self._list_ready() != noted:
                    noted = self._list_ready()
                    note_change(noted)
                await asyncio.sleep(min(_LOOK_SECONDS, self._period_seconds))
        finally:
            await self._end()

    async def _look(self, own: Announcement) -> None:
        """Follow the directory: park where it is of use, and take away what is elsewhere."""
        try:
            others = await self._directory.lookup(
                own.model_id, KNOWN_PERIODS * self._period_seconds
            )
        except DirectoryError as error:
            _logger.debug("cannot look up peers to park streams at: %s", error)
            return
        kept = {peer_id for peer_id, _ in self._parked}
        failing = {peer_id for peer_id, _ in self._parking} - kept
        hosts = {host.peer_id: host for host in choose_hosts(own, others, kept, failing)}
        for (peer_id, lane), parking in list(self._parking.items()):
            # A restarted peer listens elsewhere and has lost the stream.
            if peer_id not in hosts or hosts[peer_id].endpoints != self._hosts[peer_id].endpoints:
                await cancel_all([parking])
                del self._parking[peer_id, lane]
                self._parked.discard((peer_id, lane))
        self._hosts = hosts
        for host in hosts.values():
            for lane in Lane:
                if (host.peer_id, lane) not in self._parking:
                    parking = self._keep_parked(host, lane)
                    self._parking[host.peer_id, lane] = asyncio.create_task(parking)

    async def _keep_parked(self, host: Announcement, lane: Lane) -> None:
        """Have one stream parked at a peer, always; a peer that does not keep it has some rest."""
        retry = Retry(_AGAIN, self._clock)
        while True:
            began_at = self._clock.now()
            try:
                await self._park(host, lane)
            except ShoalError as error:
                self._parked.discard((host.peer_id, lane))
                _logger.info("cannot park a stream at peer …%s: %s", host.peer_id[-6:], error)
            except Exception:
                self._parked.discard((host.peer_id, lane))
                _logger.exception("parking a stream at peer …%s failed", host.peer_id[-6:])
            if self._clock.now() - began_at >= _SETTLED_SECONDS:
                retry.reset()
            retry.note_failure()
            await retry.pause()

    async def _park(self, host: Announcement, lane: Lane) -> None:
        """Park one stream and wait until it is used, or over. Raises ShoalError if it cannot."""
        stream = await self._offer(host, lane)
        self._parked.add((host.peer_id, lane))
        frame: bytes | None = None
        try:
            with contextlib.suppress(UnavailableError):
                frame = await stream.receive()
        finally:
            if frame is None:
                await stream.close()
        if frame is not None:
            self._begin_serving(_HeardStream(stream, frame))

    async def _offer(self, host: Announcement, lane: Lane) -> Stream:
        """Return a stream that the other peer keeps from now on. Raises ShoalError."""
        name = f"peer …{host.peer_id[-6:]}"
        async with AnswerTimeout(_OFFER_SECONDS, f"{name} did not answer in time"):
            stream = await dial(
                self._transport, self._clock, host.peer_id, host.endpoints, _OFFER_SECONDS
            )
            try:
                await self._agree(stream, host, lane, name)
            except BaseException:
                await stream.close()
                raise
            return stream

    async def _agree(self, stream: Stream, host: Announcement, lane: Lane, name: str) -> None:
        """Offer a stream that is open, and hear that it is kept."""
        welcome, _ = await greet_peer(stream, host.peer_id, self._clock)
        if not welcome.nonce:
            raise RemoteProtocolError(f"{name} takes no offers")
        fingerprint = host.endpoints[0].fingerprint  # all are of the one TLS key of the peer
        offer = make_offer(self._identity, fingerprint, welcome.nonce, lane is Lane.BULK)
        await stream.send(encode_frame(offer))
        check_kind(read_answer(await stream.receive(), name), Parked, name)

    def _begin_serving(self, stream: Stream) -> None:
        task = asyncio.create_task(self._serve_to_end(stream))
        self._serving[task] = stream
        task.add_done_callback(self._serving.pop)

    async def _serve_to_end(self, stream: Stream) -> None:
        try:
            await self._serve(stream)
        except ShoalError as error:
            _logger.debug("a stream that this peer had parked ended: %s", error)
        except Exception:
            _logger.exception("serving a stream that this peer had parked failed")
        finally:
            await stream.close()

    async def _end(self) -> None:
        await cancel_all(self._parking.values())
        for stream in list(self._serving.values()):
            await stream.close()
        if self._serving:
            await asyncio.wait(list(self._serving), timeout=_LAST_WORDS_SECONDS)
        await cancel_all(self._serving)


class _HeardStream:
    """A stream of which the first frame was received already: it is received once more."""

    def __init__(self, stream: Stream, frame: bytes) -> None:
        self.remote_host = stream.remote_host
        self.send, self.set_gate = stream.send, stream.set_gate
        self.wait_over, self.close = stream.wait_over, stream.close
        self._stream = stream
        self._frame: bytes | None = frame

    async def receive(self) -> bytes | None:
        frame, self._frame = self._frame, None
        return await self._stream.receive() if frame is None else frame
