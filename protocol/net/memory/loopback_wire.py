"""One stream of a loopback network: two pipes, the frames in them, a stream end at each side."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from copy import copy
from enum import Enum
from typing import Protocol

from ...errors import LocalProtocolError, RefusedError, UnavailableError
from ...limits import MAX_FRAME_BYTES, MAX_PIECE_BYTES
from ..transport import FrameGate, open_gate

WINDOW_BYTES = 4 * 2**20
"""The most bytes that a stream holds in each direction before `send` waits; one larger frame is let
through."""

# A loop runs timers this much early; what they were set for is due then.
_TIMER_SLACK_SECONDS = 1e-6


class Signal(Enum):
    """Marks that travel between frames."""

    REQUEST = "request"
    ACCEPTED = "accepted"
    REFUSED = "refused"
    WRONG_CERTIFICATE = "wrong certificate"
    NOT_A_MEMBER = "not a member"
    END = "end"


class Medium(Protocol):
    """The interface of a wire to the network around it."""

    def plan_arrival(self, pipe: Pipe, num_bytes: int) -> float | None:
        """Draw when a frame sent now arrives, in the loop's time; None: lost once too often."""
        ...

    def is_blocked(self, source: str, target: str) -> bool:
        """Return whether nothing gets from one host to the other at this moment."""
        ...

    def is_paused(self, host: str) -> bool:
        """Return whether a host stands still."""
        ...

    def forget(self, wire: Wire) -> None:
        """Take note that a wire is over."""
        ...


class Wire:
    """Both directions of a stream, from its request until both ends closed it or it broke.

    `changed` is set whenever anybody who waits on the wire may find that the wait is over.
    """

    def __init__(self, medium: Medium, dialler: str, listener: str) -> None:
        self.medium = medium
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

    def request(self, answer: Callable[[], Signal]) -> None:
        """Send the request; what `answer` returns once it has arrived is sent back."""
        self.forward.on_request = lambda: self.back.push(answer())
        self.forward.push(Signal.REQUEST)

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

    def stir(self) -> None:
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
        self.medium.forget(self)


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
        self._in_transit: deque[tuple[float, bytes | Signal]] = deque()
        self._arrived: deque[bytes | Signal] = deque()
        self._num_bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        self.on_request: Callable[[], None] | None = None
        self.has_ended = False

    def has_room(self, num_bytes: int) -> bool:
        """Return whether a frame may be pushed."""
        return self._num_bytes == 0 or self._num_bytes + num_bytes <= WINDOW_BYTES

    def push(self, item: bytes | Signal) -> None:
        """Send a frame or a mark on its way."""
        size = len(item) if isinstance(item, bytes) else 0
        wire = self._wire
        arrival = wire.medium.plan_arrival(self, size)
        if arrival is None:
            wire.break_off("a frame was lost too often")
            return
        self._num_bytes += size
        self._in_transit.append((arrival, item))
        self._arm()

    def can_take(self) -> bool:
        """Return whether `take` would not wait."""
        return bool(self._arrived) and not self._wire.medium.is_paused(self.target)

    @property
    def num_bytes_of_next(self) -> int:
        """How large the frame is that may be taken; 0 where a mark is next."""
        item = self._arrived[0]
        return len(item) if isinstance(item, bytes) else 0

    async def take(self) -> bytes | Signal:
        """Wait for the next frame or mark and remove it. An end is never removed."""
        await self._wire.wait_until(self.can_take)
        item = self._arrived[0]
        if item is not Signal.END:
            self._arrived.popleft()
        if isinstance(item, bytes):
            self._num_bytes -= len(item)
            self._wire.changed.set()
        return item

    def deliver(self) -> None:
        """Let everything arrive that is due, unless an obstacle holds it up."""
        self.stop()
        if self._wire.medium.is_blocked(self.source, self.target):
            return
        now = asyncio.get_running_loop().time() + _TIMER_SLACK_SECONDS
        while self._in_transit and self._in_transit[0][0] <= now:
            _, item = self._in_transit.popleft()
            if item is not Signal.REQUEST:
                self._arrived.append(item)
            elif self.on_request is not None:
                self.on_request()
            self.has_ended = self.has_ended or item is Signal.END
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
        self._is_closed = False
        self._refusal: RefusedError | None = None
        self._gate: FrameGate = open_gate

    @property
    def remote_host(self) -> str:
        return self._incoming.source

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
        if num_bytes > MAX_PIECE_BYTES:
            await self._pass_gate(num_bytes)
        item = await self._incoming.take()
        return item if isinstance(item, bytes) else None

    async def _pass_gate(self, num_bytes: int) -> None:
        try:
            async with self._gate(num_bytes):
                pass  # it is here as a whole already
        except RefusedError as refusal:
            await self._incoming.take()
            self._refusal = refusal
            raise

    async def wait_over(self) -> None:
        with contextlib.suppress(UnavailableError):
            await self._wire.wait_until(lambda: self._is_closed)

    async def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            if not self._wire.is_over:
                self._outgoing.push(Signal.END)
            self._wire.changed.set()
            self._wire.close_end()

    def _can_send(self, num_bytes: int) -> bool:
        return self._is_closed or self._incoming.has_ended or self._outgoing.has_room(num_bytes)

    def _can_receive(self) -> bool:
        return self._is_closed or self._incoming.can_take()

    def _check_not_closed(self) -> None:
        if self._is_closed:
            raise LocalProtocolError("the stream was closed here")
