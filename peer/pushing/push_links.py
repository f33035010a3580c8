"""The connections over which a peer pushes: one for each peer and lane, shared by all sessions.

Strangers choose whom to dial. So a peer is dialled only where it announces itself, every dial has a
pinned certificate and a deadline, each tenant has a share of the dials of a minute, and a peer that
failed is not dialled for a while. Why it failed the strangers do not hear: they could scan our
network through us. A peer without any endpoint is reached over streams that it has parked here.
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Protocol

from ...protocol.endpoints import Endpoint
from ...protocol.errors import (
    ErrorCode,
    NotDialledError,
    RefusedError,
    RemoteProtocolError,
    ShoalError,
    UnavailableError,
)
from ...protocol.fair_share import BUSY_SECONDS, RecentCosts, Tenant
from ...protocol.ids import PeerId, SessionId
from ...protocol.limits import MAX_PIECE_BYTES
from ...protocol.messages.codec import decode_frame, encode_frame
from ...protocol.messages.session import Attach, Declined, Lane, NextHop
from ...protocol.net.clock import AnswerTimeout, Clock
from ...protocol.net.dialling import dial, greet_peer
from ...protocol.net.retry import Backoff, Backoffs
from ...protocol.net.tasks import cancel_all
from ...protocol.net.transport import Stream, Transport
from .parked_streams import ParkedStreams

_logger = logging.getLogger(__name__)

_DIAL_SECONDS = 5.0
_PARKED_SECONDS = 3.0
"""How long a peer may take to answer on a stream that it has parked: it is open already. Behind a
NAT that forgot it nobody is, and the system notices that only after half a minute."""

_UNREACHED = Backoff(10.0, 10.0)
"""How long a peer that could not be reached is not dialled again."""

_MOST_ENDPOINTS = 2
"""Of one peer, that are tried."""

_IDLE_SECONDS = 10.0
"""How long a connection stays that no session uses; the other end waits twice as long for one."""

_SEND_SECONDS = 30.0

_MAX_DIALS_A_MINUTE = 128
"""Of all tenants; a single one gets 72 of them at once. Sessions share connections that are
open."""

_MAX_DIALS_OF_ONE_A_MINUTE = 32
"""Of one TLS key, which many made-up announcements may name; a single tenant gets 18. An open
connection is shared, and one that was idle is dialled again six times a minute in each lane."""

_MOST_DIALLED = 256
"""TLS keys whose dials are counted."""

_MAX_REPLAYED_BYTES_A_MINUTE = 2**30
"""Bytes that clients may have pushed again, of all sessions: four times what a peer logs."""

_MOST_REFUSAL_SECONDS = 1.0
"""How long a replay waits at most, behind its first frame, for the word that nobody wants it."""


_Key = tuple[PeerId, Lane]

FindEndpoints = Callable[[NextHop], Awaitable[Sequence[Endpoint]]]
"""Tells where a next hop announces that it can be dialled, whatever a client says. May raise
DirectoryError."""


class Sender(Protocol):
    """One session's outputs on their way to the next hop."""

    @property
    def tenant(self) -> Tenant:
        """The tenant of the session."""
        ...

    def pushes_to(self, following: NextHop) -> bool:
        """Return whether what is queued for a next hop is still to be sent there: not after it was
        lost.
        """
        ...

    def note_left(self, num_bytes: int) -> None:
        """Hear that so many bytes to push were sent, or never will be."""
        ...

    def note_lost(self, following: NextHop) -> None:
        """Hear that the next hop cannot be reached, or does not take the session."""
        ...

    def refuse(self, following: NextHop, refusal: RefusedError) -> None:
        """Hear that nothing can be pushed there, and what the client is to be told."""
        ...


@dataclass(frozen=True, slots=True)
class _Parcel:
    """Frames for the session of a next hop; `num_bytes` are counted until all of them are sent."""

    sender: Sender
    following: NextHop
    frames: Iterator[bytes]
    num_bytes: int
    is_replay: bool = False


def _make_next(parcel: _Parcel) -> bytes | None:
    """Return the next frame of a parcel. If none can be made, only its session is lost: what others
    push over the same connection goes on.
    """
    try:
        return next(parcel.frames, None)
    except Exception:
        _logger.exception("cannot make a frame to push")
        fault = RefusedError(ErrorCode.INTERNAL, "the peer failed to push what it computed")
        parcel.sender.refuse(parcel.following, fault)
        return None


class PushLinks:
    """All of them, of one peer. Closes what it has opened."""

    def __init__(
        self,
        transport: Transport,
        find_endpoints: FindEndpoints,
        clock: Clock,
        note_sent: Callable[[bytes], None],
        parked: ParkedStreams | None = None,
    ) -> None:
        """`note_sent` hears each frame that has left. Without `parked` the peer takes no offers: it
        cannot be dialled itself.
        """
        self._parked = parked
        self._transport = transport
        self._find_endpoints = find_endpoints
        self._clock = clock
        self._known: dict[_Key, _PushLink] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False
        self._dials = RecentCosts(_MAX_DIALS_A_MINUTE, 60.0)
        self._dials_of: dict[str, RecentCosts] = {}
        self._unreached = Backoffs[_Key](_UNREACHED, clock)
        self._note_sent = note_sent
        self.replayed = RecentCosts(_MAX_REPLAYED_BYTES_A_MINUTE, 60.0)

    def prepare(self, following: NextHop, sender: Sender) -> None:
        """Dial a next hop before there is anything to push, if that may be."""
        with contextlib.suppress(RefusedError):
            self._find(following, Lane.INTERACTIVE, sender.tenant)

    def push(self, following: NextHop, lane: Lane, frame: bytes, sender: Sender) -> None:
        """Send a step to the session of a next hop, behind what was pushed there before."""
        self._take(lane, _Parcel(sender, following, iter([frame]), len(frame)))

    def count_replay(self, tenant: Tenant, num_bytes: int) -> None:
        """Count a replay that is to begin. Raises RefusedError when there were too many lately."""
        if not self.replayed.take(tenant, max(num_bytes, MAX_PIECE_BYTES), self._clock.now()):
            raise RefusedError(ErrorCode.LOG_INCOMPLETE, "too much was sent again in this minute")

    def replay(
        self, following: NextHop, frames: Iterable[bytes], num_bytes: int, sender: Sender
    ) -> None:
        """Send a next hop what it lacks; each frame is made when the one before has left."""
        self._take(Lane.BULK, _Parcel(sender, following, iter(frames), num_bytes, is_replay=True))

    def _take(self, lane: Lane, parcel: _Parcel) -> None:
        sender, following = parcel.sender, parcel.following
        try:
            link = self._find(following, lane, sender.tenant)
        except RefusedError as error:
            _logger.info("peer …%s is not dialled: %s", following.peer_id[-6:], error)
            sender.note_left(parcel.num_bytes)
            # Behind the answer to what has set this off.
            asyncio.get_running_loop().call_soon(sender.note_lost, following)
        else:
            link.put(parcel)

    def forget(self, following: NextHop) -> None:
        """Note that a session pushes there no more."""
        for link in self._known.values():
            link.forget(following)

    async def close(self) -> None:
        """Close all connections, and dial no more."""
        self._is_closed = True
        await cancel_all(self._tasks)

    def _find(self, following: NextHop, lane: Lane, tenant: Tenant) -> "_PushLink":
        """Return the connection, or begin one. Raises RefusedError when that is too much."""
        if self._is_closed:  # sessions may still compute, and push what comes of it
            raise RefusedError(ErrorCode.DRAINING, "this peer is stopping")
        key = (following.peer_id, lane)
        known = self._known.get(key)
        if known is not None:
            return known
        has_parked = self._parked is not None and self._parked.has(*key)
        if not self._unreached.may_try(key) and not has_parked:
            detail = "it could not be reached a moment ago"
            raise RefusedError(ErrorCode.BUSY, detail, BUSY_SECONDS)
        if not self._dials.take(tenant, 1, self._clock.now()):
            detail = "too many connections to other peers were asked for in this minute"
            raise RefusedError(ErrorCode.BUSY, detail, BUSY_SECONDS)
        link = self._known[key] = _PushLink(following, lane, self._note_sent)
        task = asyncio.create_task(self._serve(key, link, tenant), name=repr(link))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return link

    async def _serve(self, key: _Key, link: "_PushLink", tenant: Tenant) -> None:
        """Be one connection, from the dial to its end."""
        leave = partial(self._leave, key, link)
        try:
            stream = await self._use_parked(link) or await self._dial(key, link, tenant)
            try:
                await link.run(stream, leave)
            finally:
                await stream.close()
        except ShoalError as failure:
            _logger.info("the connection to %r is lost: %s", link, failure)
        finally:
            leave()
            link.give_up()

    def _leave(self, key: _Key, link: "_PushLink") -> None:
        """Have nobody push over a connection any more; there may be another one by now."""
        if self._known.get(key) is link:
            del self._known[key]

    async def _use_parked(self, link: "_PushLink") -> Stream | None:
        """Return a stream that the peer has parked here; None if there is none that works."""
        if self._parked is None:
            return None
        while (stream := await self._parked.take(link.following.peer_id, link.lane)) is not None:
            try:
                async with asyncio.timeout(_PARKED_SECONDS):
                    await self._greet(link, stream)
            except (TimeoutError, ShoalError) as error:
                _logger.info(
                    "%r does not answer on a parked stream, which is closed: %r", link, error
                )
            else:
                return stream
        return None

    async def _dial(self, key: _Key, link: "_PushLink", tenant: Tenant) -> Stream:
        peer_id = link.following.peer_id
        failure: ShoalError
        try:
            async with AnswerTimeout(_DIAL_SECONDS, f"{link.name} did not answer in time"):
                endpoints = await self._find_endpoints(link.following)
                if not endpoints:
                    raise UnavailableError(f"{link.name} is not announced, or not connected")
                self._count_dial(endpoints[0].fingerprint, tenant)
                tried = endpoints[:_MOST_ENDPOINTS]
                stream = await dial(self._transport, self._clock, peer_id, tried, _DIAL_SECONDS)
                await self._greet(link, stream)
                return stream
        except ShoalError as error:
            failure = copy(error)
        self._unreached.forget_expired()
        if not isinstance(failure, NotDialledError):
            self._unreached.note_failure(key)
        raise failure

    def _count_dial(self, tls_key: str, tenant: Tenant) -> None:
        """Count a dial; raises NotDialledError where too many led to the same machine lately."""
        dials = self._dials_of.pop(tls_key, None) or RecentCosts(_MAX_DIALS_OF_ONE_A_MINUTE, 60.0)
        self._dials_of[tls_key] = dials  # behind all others
        if len(self._dials_of) > _MOST_DIALLED:
            del self._dials_of[next(iter(self._dials_of))]
        if not dials.take(tenant, 1, self._clock.now()):
            raise NotDialledError("its TLS key was dialled too often in this minute")

    async def _greet(self, link: "_PushLink", stream: Stream) -> None:
        _, rtt_seconds = await greet_peer(stream, link.following.peer_id, self._clock)
        link.note_rtt(rtt_seconds)


class _PushLink:
    """One connection to another peer, and the sessions that push over it."""

    def __init__(self, following: NextHop, lane: Lane, note_sent: Callable[[bytes], None]) -> None:
        self._note_sent = note_sent
        self.following = following
        self.lane = lane
        self._lines: dict[Tenant, deque[_Parcel]] = {}  # in the order of their turns
        self._has_parcels = asyncio.Event()
        self._users: dict[SessionId, tuple[NextHop, Sender]] = {}  # those that are attached
        self._refusal_seconds = 0.0

    def __repr__(self) -> str:
        return f"<link to {self.name}, {self.lane.value}>"

    @property
    def name(self) -> str:
        """The name of its peer for people."""
        return f"peer …{self.following.peer_id[-6:]}"

    def note_rtt(self, seconds: float) -> None:
        """Note how long a refusal is under way, at least."""
        self._refusal_seconds = min(1.5 * seconds, _MOST_REFUSAL_SECONDS)

    def put(self, parcel: _Parcel) -> None:
        """Queue a parcel behind others of its tenant: one who pushes much delays nobody else."""
        self._lines.setdefault(parcel.sender.tenant, deque()).append(parcel)
        self._has_parcels.set()

    def forget(self, following: NextHop) -> None:
        """Note that a session is over, or pushes elsewhere."""
        if self._is_attached(following):
            del self._users[following.session]

    def _is_attached(self, following: NextHop) -> bool:
        known = self._users.get(following.session)
        return known is not None and known[0].capability == following.capability

    async def run(self, stream: Stream, leave: Callable[[], None]) -> None:
        """Send what is queued until the stream breaks or nobody uses it for a while.

        Then it leaves, before it waits for anything: what is pushed later needs a new connection.
        No task group: an error would come in a group that it refers to, and what was being sent
        would stay in memory until the next full garbage collection.
        """
        tasks = [
            asyncio.create_task(self._send_all(stream, leave)),
            asyncio.create_task(self._hear(stream)),
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await cancel_all(tasks)
        for failure in [task.exception() for task in tasks if not task.cancelled()]:
            if failure is not None:
                raise copy(failure)

    async def _send_all(self, stream: Stream, leave: Callable[[], None]) -> None:
        while await self._send_next(stream):
            pass
        leave()

    async def _send_next(self, stream: Stream) -> bool:
        """Send a frame of the tenant whose turn it is; return whether to go on."""
        if not self._lines:
            self._has_parcels.clear()
            try:
                async with asyncio.timeout(_IDLE_SECONDS):
                    await self._has_parcels.wait()
            except TimeoutError:
                return bool(self._users or self._lines)
        tenant, line = next(iter(self._lines.items()))
        if not await self._send(stream, line[0]):
            parcel = line.popleft()
            parcel.sender.note_left(parcel.num_bytes)
        del self._lines[tenant]
        if line:
            self._lines[tenant] = line  # behind all others
        return True

    async def _send(self, stream: Stream, parcel: _Parcel) -> bool:
        """Send a frame, unless its session is over, or lost, or pushes elsewhere; return whether
        there may be more in the parcel.
        """
        if not parcel.sender.pushes_to(parcel.following):
            return False
        frame = _make_next(parcel)
        if frame is None:
            return False
        is_attached = self._is_attached(parcel.following)
        if not await self._send_in_time(stream, parcel, frame):
            raise UnavailableError(f"{self!r} does not read what is pushed")
        if parcel.is_replay:
            # Send no long replay to a peer that refuses it.
            await asyncio.sleep(0.0 if is_attached else self._refusal_seconds)
        return parcel.is_replay

    async def _send_in_time(self, stream: Stream, parcel: _Parcel, frame: bytes) -> bool:
        """Send a frame; return whether it left. No error comes of the timeout, which knows this
        task: the task would keep it, and with it what was being sent.
        """
        following = parcel.following
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_SEND_SECONDS):
                if not self._is_attached(following):
                    self._users[following.session] = following, parcel.sender
                    attach = Attach(following.session, following.epoch, following.capability)
                    await stream.send(encode_frame(attach))
                await stream.send(frame)
                self._note_sent(frame)
                return True
        return False

    async def _hear(self, stream: Stream) -> None:
        """Read what the peer says: nothing, unless it does not take a session."""
        while (frame := await stream.receive()) is not None:
            message = decode_frame(frame)
            if not isinstance(message, Declined):
                raise RemoteProtocolError(f"{self!r} sent an unexpected {type(message).__name__}")
            if message.session is None:
                raise UnavailableError(f"{self!r} ended the stream: {message.detail}")
            following, sender = self._users.pop(message.session, (None, None))
            if following is not None and sender is not None:
                _logger.info("%r declined a session: %s", self, message.detail)
                sender.note_lost(following)
        raise UnavailableError(f"{self!r} ended the stream")

    def give_up(self) -> None:
        """Tell all senders whose steps may not have arrived."""
        lost, self._users = self._users, {}
        lines, self._lines = self._lines, {}
        for parcel in chain.from_iterable(lines.values()):
            parcel.sender.note_left(parcel.num_bytes)
            lost[parcel.following.session] = parcel.following, parcel.sender
        for following, sender in lost.values():
            sender.note_lost(following)
