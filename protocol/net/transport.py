"""The seam to the network: ordered streams of frames between two processes.

An implementation carries frames (`bytes`, at most `limits.MAX_FRAME_BYTES`) and knows nothing of
what is in them. All of them pass the same conformance tests.
"""

from collections.abc import Awaitable, Callable
from enum import Enum
from typing import Protocol

from ..endpoints import Endpoint


class Lane(Enum):
    """Which of the two connections of a pair a stream uses, so that bulk never delays a token."""

    INTERACTIVE = "interactive"
    BULK = "bulk"


class Stream(Protocol):
    """An ordered, bidirectional channel of frames to one other process.

    Frames arrive whole, in order and at most once, or the stream breaks. One task may send while
    another receives; two tasks may not do the same at once.
    """

    async def send(self, frame: bytes) -> None:
        """Hand one frame to the network, waiting while it is congested.

        Raises UnavailableError when the stream is broken and LocalProtocolError when the frame
        is larger than the limit or the stream was closed here.
        """
        ...

    async def receive(self) -> bytes | None:
        """Return the next frame, or None after the other end closed in good order.

        Raises UnavailableError when the stream is broken, RemoteProtocolError when the other end
        sent a frame beyond the limit.
        """
        ...

    async def close(self) -> None:
        """End the stream; safe to call twice and on a broken stream. Never raises."""
        ...


class Listener(Protocol):
    """An open door: accepts streams until closed."""

    @property
    def endpoint(self) -> Endpoint:
        """Where others can dial, with the real port and fingerprint."""
        ...

    async def close(self, grace_seconds: float = 0.0) -> None:
        """Stop accepting, give running streams that long to end, then break them."""
        ...


StreamServer = Callable[[Stream], Awaitable[None]]
"""Serves one accepted stream; the stream is closed when it returns or raises."""


class Transport(Protocol):
    """Makes streams. Owned by one process and one event loop; close it when done."""

    async def listen(self, host: str, port: int, serve: StreamServer) -> Listener:
        """Accept streams on a host and port (0: any free one), each served in a task of its own.

        Raises UsageError when the port is in use or the address is not ours.
        """
        ...

    async def open_stream(
        self, endpoint: Endpoint, lane: Lane = Lane.INTERACTIVE, timeout_seconds: float = 5.0
    ) -> Stream:
        """Dial an endpoint and return a stream that is known to be connected.

        Raises UnavailableError when nobody answers in time and RemoteProtocolError when the one
        who answers does not hold the certificate of the endpoint's fingerprint.
        """
        ...

    async def close(self) -> None:
        """Break every stream, close every connection and listener."""
        ...
