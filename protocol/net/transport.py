"""The seam to the network: ordered streams of frames between two processes.

An implementation carries frames (`bytes`, at most `limits.MAX_FRAME_BYTES`) and knows nothing of
what is in them. All of them pass the same conformance tests.
"""

import logging
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Protocol

from ..endpoints import Endpoint, Libp2pEndpoint
from ..errors import NotAMemberError, ShoalError

log = logging.getLogger(__name__)

FrameGate = Callable[[int], AbstractAsyncContextManager[object]]
"""Lets a frame of so many bytes in: entered when it has begun to arrive, left when it is whole or
never will be. Entering may wait, and raise RefusedError."""


def open_gate(num_bytes: int) -> AbstractAsyncContextManager[object]:
    """Let every frame in at once."""
    return nullcontext()


def turn_away(endpoint: Endpoint, has_secret: bool) -> NotAMemberError:
    """Return what a dialler raises when a peer does not take it for a member of its swarm.

    `has_secret` says whether the dialler belongs to a private swarm itself.
    """
    if has_secret:
        return NotAMemberError(
            f"the peer at {endpoint} belongs to another swarm than this join code, or the code's "
            "secret is wrong; ask for a new one",
            has_secret=True,
        )
    return NotAMemberError(
        f"the peer at {endpoint} belongs to a private swarm; ask its owner for a "
        "join code (--join)",
        has_secret=False,
    )


class Stream(Protocol):
    """An ordered, bidirectional channel of frames to one other process.

    Frames arrive whole, in order and at most once, or the stream breaks. One task may send while
    another receives; two tasks may not do the same at once.
    """

    @property
    def remote_host(self) -> str | None:
        """The host at the other end, without its port, or None where the transport cannot know.

        A listener sees the address that the frames come from: a hint, since many may share it.
        """
        ...

    def set_gate(self, gate: FrameGate) -> None:
        """Have a gate asked about every frame larger than `limits.MAX_PIECE_BYTES`, from now on.

        Those take memory before they are received. Without a gate they all come in.
        """
        ...

    async def send(self, frame: bytes) -> None:
        """Hand one frame to the network, waiting while it is congested.

        Cancelling it breaks the stream, since part of the frame may have left. Raises
        UnavailableError when the stream is broken and LocalProtocolError when the frame is larger
        than the limit or the stream was closed here.
        """
        ...

    async def receive(self) -> bytes | None:
        """Return the next frame, or None after one of the two ends closed in good order.

        Cancelling it loses nothing: the next call goes on where it stood. Raises UnavailableError
        when the stream is broken, RemoteProtocolError when the other end sent a frame beyond the
        limit or did not finish one in time, RefusedError when the gate refuses one. Behind those
        two nothing more is received, but what is sent still arrives.
        """
        ...

    async def wait_over(self) -> None:
        """Wait until the stream is closed at this end, or broken. Never raises.

        Also tells of a break while nobody sends or receives.
        """
        ...

    async def close(self) -> None:
        """End the stream: what was sent still arrives, what was not received is dropped.

        Does not wait for the other end. Breaks the stream where another task has sent half of a
        frame. Safe to call twice and on a broken stream. Never raises.
        """
        ...


class Listener(Protocol):
    """An open door: accepts streams until closed."""

    @property
    def endpoint(self) -> Endpoint:
        """Where others can dial: the host that was asked for, the real port and fingerprint."""
        ...

    async def close(self, grace_seconds: float = 0.0) -> None:
        """Stop accepting, give running streams that long to end, then break them."""
        ...


StreamServer = Callable[[Stream], Awaitable[object]]
"""Serves one accepted stream, which is closed when it returns and broken when it raises.

An error that is not a ShoalError is logged with its traceback. When the stream or the listener
breaks, it learns so from the stream and has a second to end before it is cancelled.
"""


async def serve_stream(
    serve: StreamServer, stream: Stream, endpoint: Endpoint, break_off: Callable[[str], None]
) -> None:
    """See an accepted stream to its end, as `StreamServer` says; `break_off` breaks it."""
    try:
        await serve(stream)
    except ShoalError as error:
        log.debug("a stream at %s ended: %s", endpoint, error)
        break_off(str(error))
    except Exception:
        log.exception("serving a stream at %s failed", endpoint)
        break_off("serving it failed")
    finally:
        await stream.close()


class Transport(Protocol):
    """Makes streams. Owned by one process and one event loop; close it when done."""

    async def listen(self, host: str, port: int, serve: StreamServer) -> Listener:
        """Accept streams on a host and port (0: any free one), each served in a task of its own.

        Raises UsageError when the port is in use or the address is not ours.
        """
        ...

    async def open_stream(self, endpoint: Endpoint, timeout_seconds: float = 5.0) -> Stream:
        """Dial an endpoint and return a stream that is known to be connected.

        No stream holds up another one: each has a connection of its own, or its turn.

        Raises UnavailableError when nobody answers in time and RemoteProtocolError when the one
        who answers does not hold the certificate of the endpoint's fingerprint, or does not speak
        our protocol, NotAMemberError when its swarm is private and not ours. Every stream has to
        be closed by the one who opened it.
        """
        ...

    async def close(self) -> None:
        """Break every stream, close every connection and listener."""
        ...


class ChoosingTransport:
    """Dials and listens directly, and dials through libp2p where an endpoint asks for it."""

    def __init__(self, direct: Transport, libp2p: Transport) -> None:
        self._direct = direct
        self._libp2p = libp2p

    def __repr__(self) -> str:
        return f"ChoosingTransport({self._direct!r}, {self._libp2p!r})"

    async def listen(self, host: str, port: int, serve: StreamServer) -> Listener:
        return await self._direct.listen(host, port, serve)

    async def open_stream(self, endpoint: Endpoint, timeout_seconds: float = 5.0) -> Stream:
        chosen = self._libp2p if isinstance(endpoint, Libp2pEndpoint) else self._direct
        return await chosen.open_stream(endpoint, timeout_seconds)

    async def close(self) -> None:
        await self._libp2p.close()
        await self._direct.close()
