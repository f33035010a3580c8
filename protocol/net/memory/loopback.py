"""A whole network in one process: transports between named hosts, with trouble on demand.

Uses asyncio's time only, so that on a virtual loop days of network take no real time. Everything
here belongs to one event loop; nothing is safe to call from another thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
import random
from collections import deque
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass

from ...endpoints import Endpoint
from ...errors import (
    LocalProtocolError,
    RefusedError,
    RemoteProtocolError,
    ShoalError,
    UnavailableError,
    UsageError,
)
from ...limits import MAX_FRAME_BYTES, MAX_SMALL_FRAME_BYTES
from ...membership.membership import NO_MEMBERSHIP, Membership
from ..transport import (
    FrameGate,
    StreamServer,
    end_serving,
    make_not_a_member_error,
    open_gate,
    serve_stream,
)

_RETRANSMISSION_SECONDS = 0.2
"""The least time after which a lost frame is sent again (Linux's TCP_RTO_MIN)."""

_MAX_RETRANSMISSIONS = 5
"""A frame lost more often than this in a row breaks its stream."""

_PARTITION_BREAK_SECONDS = 25.0
"""Streams across a partition break after this long: the keepalive of the real transport."""

_FIRST_FREE_PORT = 49152

WINDOW_BYTES = 4 * 2**20
"""The most bytes that a stream holds in each direction before `send` waits; one larger frame is let
through."""

# A loop runs timers this much early; what they were set for is due then.
_TIMER_SLACK_SECONDS = 1e-6


@dataclass(frozen=True)
class Link:
    """One direction between two hosts, for each stream.

    A lost frame is not missing, as under TCP: it is sent again after 0.2 s (or two delays, where
    that is longer), twice that the next time, and holds up all frames behind it. A frame lost six
    times in a row breaks the stream. Streams do not share the bandwidth: each has all of it.
    """

    delay_seconds: float = 0.0
    bandwidth_bytes_per_second: float = math.inf
    loss_fraction: float = 0.0


class LoopbackNetwork:
    """The hosts of one process and what lies between them. Losses are drawn from the seed."""

    def __init__(self, seed: int = 0, link: Link | None = None) -> None:
        self._random = random.Random(seed)
        self._seed = seed
        self.default_link = link or Link()
        self._links: dict[tuple[str, str], Link] = {}
        self._partitions: dict[frozenset[str], asyncio.TimerHandle] = {}
        self._paused: set[str] = set()
        self._dead: set[str] = set()
        self.wires: set[Wire] = set()
        """The streams that are not over."""
        self.listeners: dict[tuple[str, int], _LoopbackListener] = {}
        """By host and port."""

    def __repr__(self) -> str:
        return (
            f"LoopbackNetwork(streams={len(self.wires)}, listeners={len(self.listeners)}, "
            f"partitions={len(self._partitions)}, paused={len(self._paused)}, "
            f"dead={len(self._dead)})"
        )

    def set_link(self, source: str, target: str, link: Link) -> None:
        """Change one direction between two hosts, for frames sent from now on."""
        self._links[source, target] = link

    def partition(self, a: str, b: str) -> None:
        """Let nothing through between two hosts. Nothing breaks for 25 seconds, then everything."""
        pair = frozenset((a, b))
        if pair not in self._partitions:
            loop = asyncio.get_running_loop()
            self._partitions[pair] = loop.call_later(_PARTITION_BREAK_SECONDS, self._give_up, pair)

    def heal(self, a: str, b: str) -> None:
        """End a partition: what was held up arrives now."""
        timer = self._partitions.pop(frozenset((a, b)), None)
        if timer is not None:
            timer.cancel()
            self._deliver_held_frames()

    def kill(self, host: str) -> None:
        """End a host like `kill -9`: its streams break at both ends, its listeners vanish."""
        self._dead.add(host)
        self._paused.discard(host)
        for key in [key for key in self.listeners if key[0] == host]:
            del self.listeners[key]
        for wire in [wire for wire in self.wires if host in wire.hosts]:
            wire.break_off(f"{host} was killed")

    def revive(self, host: str) -> None:
        """Let a killed host start again, with nothing of what it had."""
        self._dead.discard(host)

    def pause(self, host: str) -> None:
        """Stop a host like SIGSTOP: nothing reaches or leaves it, and nothing breaks."""
        self._paused.add(host)

    def resume(self, host: str) -> None:
        """Let a paused host go on: what was held up arrives now."""
        self._paused.discard(host)
        self._deliver_held_frames()

    def fingerprint_of(self, host: str, port: int) -> str:
        """Return the fingerprint that a listener of this host and port shows."""
        return hashlib.sha256(f"{self._seed}/{host}/{port}".encode()).hexdigest()

    def is_blocked(self, source: str, target: str) -> bool:
        """Return whether nothing gets from one host to the other at this moment."""
        if source in self._paused or target in self._paused:
            return True
        return frozenset((source, target)) in self._partitions

    def is_paused(self, host: str) -> bool:
        """Return whether a host stands still."""
        return host in self._paused

    def check_alive(self, host: str) -> None:
        """Raise UnavailableError for whatever a killed host still tries to do."""
        if host in self._dead:
            raise UnavailableError(f"{host} was killed")

    def plan_arrival(self, pipe: Pipe, num_bytes: int) -> float | None:
        """Draw when a frame sent now arrives, in the loop's time; None: lost once too often."""
        no_link = Link() if pipe.source == pipe.target else self.default_link
        link = self._links.get((pipe.source, pipe.target), no_link)
        sent_at = max(asyncio.get_running_loop().time(), pipe.busy_until)
        sent_at += num_bytes / link.bandwidth_bytes_per_second
        pipe.busy_until = sent_at
        patience = max(_RETRANSMISSION_SECONDS, 2 * link.delay_seconds)
        for _ in range(_MAX_RETRANSMISSIONS + 1):
            if self._random.random() >= link.loss_fraction:
                return sent_at + link.delay_seconds
            sent_at += patience
            patience *= 2
        return None

    def choose_port(self, host: str) -> int:
        """Return a port of a host that is not in use."""
        port = _FIRST_FREE_PORT
        while (host, port) in self.listeners:
            port += 1
        return port

    def accept(self, wire: Wire, endpoint: Endpoint, membership: Membership) -> ShoalError | None:
        """Accept a stream whose request has reached its target; or return why it is turned down."""
        listener = self.listeners.get((endpoint.host, endpoint.port))
        if listener is None:
            return UnavailableError(f"nobody answers at {endpoint}: connection refused")
        if listener.endpoint.fingerprint != endpoint.fingerprint:
            return RemoteProtocolError(
                f"the peer at {endpoint} presents another TLS certificate than it announced"
            )
        proof = membership.prove_to(endpoint.fingerprint)
        if not listener.membership.accepts(endpoint.fingerprint, proof):
            return make_not_a_member_error(endpoint, has_secret=membership.is_private)
        listener.accept(wire)
        return None

    def _deliver_held_frames(self) -> None:
        for wire in list(self.wires):
            wire.deliver_held_frames()

    def _give_up(self, pair: frozenset[str]) -> None:
        for wire in [wire for wire in self.wires if wire.hosts == pair]:
            wire.break_off("the other end was silent for too long")


class LoopbackTransport:
    """The transport of one host of a loopback network; in a private swarm among members only."""

    def __init__(
        self, network: LoopbackNetwork, host_name: str, membership: Membership | None = None
    ) -> None:
        self._network = network
        self._host = host_name
        self._membership = membership or NO_MEMBERSHIP
        self._dialled: set[Wire] = set()
        self._listeners: set[_LoopbackListener] = set()
        self._is_closed = False

    async def listen(self, host: str, port: int, serve: StreamServer) -> _LoopbackListener:
        self._check_open()
        if host not in (self._host, "0.0.0.0", "::"):
            raise UsageError(f"cannot listen on {host}: this host is {self._host}")
        port = port or self._network.choose_port(self._host)
        if (self._host, port) in self._network.listeners:
            raise UsageError(f"port {port} on {self._host} is in use; choose another one")
        fingerprint = self._network.fingerprint_of(self._host, port)
        endpoint = Endpoint(self._host, port, fingerprint)
        listener = _LoopbackListener(self._network, endpoint, serve, self._membership)
        self._network.listeners[self._host, port] = listener
        self._listeners.add(listener)
        return listener

    async def open_stream(self, endpoint: Endpoint, timeout_seconds: float = 5.0) -> LoopbackStream:
        self._check_open()
        wire = Wire(self._network, self._host, endpoint.host)
        self._network.wires.add(wire)
        answers: list[ShoalError | None] = []

        def answer() -> None:
            refusal = self._network.accept(wire, endpoint, self._membership)
            wire.back.push(lambda: answers.append(refusal))

        try:
            async with asyncio.timeout(timeout_seconds):
                wire.forward.push(answer)
                await wire.wait_until(lambda: bool(answers))
            if answers[0] is not None:
                raise answers[0]
        except BaseException as error:
            wire.break_off("the dialler gave up")
            if isinstance(error, TimeoutError):
                detail = f"{endpoint} did not answer within {timeout_seconds:.3g} s"
                raise UnavailableError(detail) from error
            raise
        self._dialled = {wire for wire in self._dialled if not wire.is_over}
        self._dialled.add(wire)
        return LoopbackStream(wire, wire.forward, wire.back)

    async def close(self) -> None:
        self._is_closed = True
        for wire in self._dialled:
            wire.break_off("its transport was closed")
        for listener in self._listeners:
            await listener.close()

    def _check_open(self) -> None:
        self._network.check_alive(self._host)
        if self._is_closed:
            raise LocalProtocolError("this transport is closed")


class _LoopbackListener:
    """The streams that a host accepts on one port, and the tasks that serve them."""

    def __init__(
        self,
        network: LoopbackNetwork,
        endpoint: Endpoint,
        serve: StreamServer,
        membership: Membership,
    ) -> None:
        self._network = network
        self.endpoint = endpoint
        self._serve = serve
        self.membership = membership
        self._tasks: dict[asyncio.Task[None], Wire] = {}

    def accept(self, wire: Wire) -> None:
        """Serve the listening end of a wire in a task of its own."""
        stream = LoopbackStream(wire, wire.back, wire.forward)
        name = f"serve {self.endpoint}"
        serving = serve_stream(self._serve, stream, self.endpoint, wire.break_off)
        task = asyncio.create_task(serving, name=name)
        self._tasks[task] = wire
        task.add_done_callback(self._tasks.pop)

    async def close(self, grace_seconds: float = 0.0) -> None:
        key = (self.endpoint.host, self.endpoint.port)
        if self._network.listeners.get(key) is self:
            del self._network.listeners[key]
        await end_serving(self._tasks, self._tasks.values(), grace_seconds)


_Item = bytes | None | Callable[[], None]
"""What travels: a frame, the end of all frames (None), or what is called when it arrives."""


class Wire:
    """Both directions of a stream, from its request until both ends closed it or it broke.

    `changed` is set whenever anybody who waits on the wire may find that the wait is over.
    """

    def __init__(self, network: LoopbackNetwork, dialler: str, listener: str) -> None:
        self.network = network
        self.hosts = frozenset((dialler, listener))
        self.fault: str | None = None
        self.changed = asyncio.Event()
        self.forward = Pipe(self, dialler, listener)
        self.back = Pipe(self, listener, dialler)
        self._num_open_ends = 2

    @property
    def is_over(self) -> bool:
        """Whether nothing can happen on it any more."""
        return self.fault is not None or self._num_open_ends == 0

    def break_off(self, reason: str) -> None:
        """Break the stream at both ends at once, if it is not over."""
        if not self.is_over:
            self.fault = reason
            self._finish()

    def close_end(self) -> None:
        """Take note that one of the two ends was closed."""
        self._num_open_ends -= 1
        if self._num_open_ends == 0 and self.fault is None:
            self._finish()

    def deliver_held_frames(self) -> None:
        """Deliver what an obstacle held up, if the obstacle is gone."""
        self.forward.deliver()
        self.back.deliver()
        self.changed.set()

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition on the wire. Raises UnavailableError when it breaks meanwhile."""
        while self.fault is None and not condition():
            self.changed.clear()
            await self.changed.wait()
        if self.fault is not None:
            raise UnavailableError(f"the stream broke: {self.fault}")

    def _finish(self) -> None:
        self.forward.stop()
        self.back.stop()
        self.changed.set()
        self.network.wires.discard(self)


class Pipe:
    """One direction: frames in transit, each with its time of arrival, then waiting to be taken.

    A late frame holds up those behind it: only the first one in transit has a timer.
    """

    def __init__(self, wire: Wire, source: str, target: str) -> None:
        self._wire = wire
        self.source = source
        self.target = target
        self.busy_until = 0.0
        """When all that was sent so far has left."""
        self._in_transit: deque[tuple[float, _Item]] = deque()
        self._arrived: deque[bytes | None] = deque()
        self._num_bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        self.has_ended = False

    def has_room(self, num_bytes: int) -> bool:
        """Return whether a frame may be pushed."""
        return self._num_bytes == 0 or self._num_bytes + num_bytes <= WINDOW_BYTES

    def push(self, item: _Item) -> None:
        """Send something on its way."""
        size = len(item) if isinstance(item, bytes) else 0
        wire = self._wire
        arrival = wire.network.plan_arrival(self, size)
        if arrival is None:
            wire.break_off("a frame was lost too often")
            return
        self._num_bytes += size
        self._in_transit.append((arrival, item))
        self._arm()

    def can_take(self) -> bool:
        """Return whether `take` would not wait."""
        return bool(self._arrived) and not self._wire.network.is_paused(self.target)

    @property
    def num_bytes_of_next(self) -> int:
        """How large the frame is that may be taken; 0 where the end is next."""
        return len(self._arrived[0] or b"")

    def take(self) -> bytes | None:
        """Remove the next frame, if `can_take`. The end is never removed."""
        frame = self._arrived[0]
        if frame is not None:
            self._arrived.popleft()
            self._num_bytes -= len(frame)
            self._wire.changed.set()
        return frame

    def deliver(self) -> None:
        """Let everything arrive that is due, unless an obstacle holds it up."""
        self.stop()
        if self._wire.network.is_blocked(self.source, self.target):
            return
        now = asyncio.get_running_loop().time() + _TIMER_SLACK_SECONDS
        while self._in_transit and self._in_transit[0][0] <= now:
            _, item = self._in_transit.popleft()
            if callable(item):
                item()
            else:
                self._arrived.append(item)
                self.has_ended = item is None
            self._wire.changed.set()
        self._arm()

    def stop(self) -> None:
        """Deliver nothing more until told to."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self) -> None:
        if self._in_transit and self._timer is None and not self._wire.is_over:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(self._in_transit[0][0], self.deliver)


class LoopbackStream:
    """One end of a wire."""

    def __init__(self, wire: Wire, outgoing: Pipe, incoming: Pipe) -> None:
        self._wire = wire
        self._outgoing = outgoing
        self._incoming = incoming
        self.remote_host: str | None = incoming.source
        self._is_closed = False
        self._refusal: RefusedError | None = None
        self._gate: FrameGate = open_gate

    def set_gate(self, gate: FrameGate) -> None:
        self._gate = gate

    async def send(self, frame: bytes) -> None:
        if len(frame) > MAX_FRAME_BYTES:
            raise LocalProtocolError(f"a frame of {len(frame)} bytes is beyond {MAX_FRAME_BYTES}")
        self._check_not_closed()
        try:
            await self._wire.wait_until(lambda: self._can_send(len(frame)))
        except asyncio.CancelledError:
            # The frame did not leave, but with other transports it might have left in part.
            self._wire.break_off("a send was cancelled half-way")
            raise
        self._check_not_closed()
        if self._incoming.has_ended:
            raise UnavailableError("the other end closed the stream")
        self._outgoing.push(frame)

    async def receive(self) -> bytes | None:
        if self._refusal is not None:
            raise copy(self._refusal)
        if not self._is_closed:
            await self._wire.wait_until(self._can_receive)
        if self._is_closed:
            return None
        num_bytes = self._incoming.num_bytes_of_next
        if num_bytes > MAX_SMALL_FRAME_BYTES:
            await self._pass_gate(num_bytes)
        return self._incoming.take()

    async def _pass_gate(self, num_bytes: int) -> None:
        try:
            async with self._gate(num_bytes):
                pass  # it is here as a whole already
        except RefusedError as refusal:
            self._incoming.take()
            self._refusal = refusal
            raise

    async def wait_over(self) -> None:
        with contextlib.suppress(UnavailableError):
            await self._wire.wait_until(lambda: self._is_closed)

    async def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            if not self._wire.is_over:
                self._outgoing.push(None)
            self._wire.changed.set()
            self._wire.close_end()

    def _can_send(self, num_bytes: int) -> bool:
        return self._is_closed or self._incoming.has_ended or self._outgoing.has_room(num_bytes)

    def _can_receive(self) -> bool:
        return self._is_closed or self._incoming.can_take()

    def _check_not_closed(self) -> None:
        if self._is_closed:
            raise LocalProtocolError("the stream was closed here")
