"""The interface to the network: ordered streams of frames between two processes.

An implementation carries frames (`bytes`, at most `limits.MAX_FRAME_BYTES`) and does not interpret
them. All implementations pass the same conformance tests.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from functools import partial
from typing import Protocol

from ..endpoints import Endpoint, Libp2pEndpoint
from ..errors import ErrorCode, NotAMemberError, RefusedError, ShoalError
from ..limits import MAX_PIECE_BYTES

log = logging.getLogger(__name__)

_LAST_WORDS_SECONDS = 1.0
"""How long the servers of broken streams may clean up before they are cancelled."""

FrameGate = Callable[[int], AbstractAsyncContextManager[object]]
"""Admits a frame of a given size: entered when the frame has begun to arrive, left when it is
complete or never will be. Entering may wait, and may raise RefusedError."""


def open_gate(num_bytes: int) -> AbstractAsyncContextManager[object]:
    """Admit every frame at once."""
    return nullcontext()


@asynccontextmanager
async def refuse_large_frames(num_bytes: int, limit: int = 0) -> AsyncGenerator[None]:
    """Be the gate of a stream on which nothing but a few words has to be said to us.

    A frame that the gate is asked about is refused unless it is within the limit. It counts against
    no tenant.
    """
    if num_bytes > limit:
        raise RefusedError(ErrorCode.BAD_FRAME, f"an unexpected frame of {num_bytes} bytes arrived")
    yield


admit_pieces: FrameGate = partial(refuse_large_frames, limit=MAX_PIECE_BYTES)
"""The gate of a stream on which a peer answers with nothing larger than a piece of data."""


def make_not_a_member_error(endpoint: Endpoint, has_secret: bool) -> NotAMemberError:
    """Return the error that a dialler raises when a peer refuses it as a non-member.

    `has_secret` says whether the dialler belongs to a private swarm itself.
    """
    if has_secret:
        return NotAMemberError(
            f"the peer at {endpoint} does not belong to the swarm of this join code, or the secret "
            "of the code is wrong; ask for a new code",
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
    another receives; two tasks must not do the same at once.
    """

    @property
    def remote_host(self) -> str | None:
        """The host at the other end, without its port, or None if the transport cannot know it.

        At a listener this is the source address of the frames: a hint, since many hosts may share
        it.
        """
        ...

    def set_gate(self, gate: FrameGate) -> None:
        """Ask a gate about every frame larger than `limits.MAX_SMALL_FRAME_BYTES` from now on.

        Such frames take memory before they are received. Without a gate all are admitted.
        """
        ...

    async def send(self, frame: bytes) -> None:
        """Hand one frame to the network; wait while it is congested.

        Cancelling breaks the stream, since part of the frame may have left. Raises UnavailableError
        if the stream is broken, LocalProtocolError if the frame exceeds the limit or the stream was
        closed here.
        """
        ...

    async def receive(self) -> bytes | None:
        """Return the next frame, or None after either end has closed the stream in good order.

        Cancelling loses nothing: the next call continues. Raises UnavailableError if the stream is
        broken, SilentError if the other end stopped in the middle of a frame, RemoteProtocolError
        if it sent a frame beyond the limit, RefusedError if the gate refuses a frame. After the
        latter three, nothing more is received, but sent frames still arrive.
        """
        ...

    async def wait_over(self) -> None:
        """Wait until the stream is closed at this end, or broken. Never raises.

        It also detects a break while no task sends or receives.
        """
        ...

    async def close(self) -> None:
        """Close the stream: sent frames still arrive, frames that were not received are dropped.

        Does not wait for the other end. Breaks the stream if another task has sent half of a frame.
        Safe to call twice and on a broken stream. Never raises.
        """
        ...


class Listener(Protocol):
    """Accepts streams until it is closed."""

    @property
    def endpoint(self) -> Endpoint:
        """The endpoint to dial: the requested host, the real port and the fingerprint."""
        ...

    async def close(self, grace_seconds: float = 0.0) -> None:
        """Stop accepting, give running streams this long to end, then break them."""
        ...


StreamServer = Callable[[Stream], Awaitable[object]]
"""Serves one accepted stream, which is closed when it returns and broken when it raises.

An error that is not a ShoalError is logged with its traceback. When the stream or the listener
breaks, the stream reports it, and the server has a second to return before it is cancelled.
"""


async def serve_stream(
    serve: StreamServer, stream: Stream, endpoint: Endpoint, break_off: Callable[[str], None]
) -> None:
    """See an accepted stream to its end, as `StreamServer` says; `break_off` breaks it."""
    try:
        await serve(stream)
    except ShoalError as error:
        log.debug("a stream accepted at %s ended: %s", endpoint, error)
        break_off(str(error))
    except Exception:
        log.exception("serving a stream accepted at %s failed", endpoint)
        break_off("serving it failed")
    finally:
        await stream.close()


class Breakable(Protocol):
    """An accepted stream, for its listener."""

    def break_off(self, reason: str) -> None:
        """Break the stream at both ends."""
        ...


async def end_serving(
    tasks: Iterable[asyncio.Task[None]], streams: Iterable[Breakable], grace_seconds: float
) -> None:
    """End the tasks that serve streams, as `Listener.close` says; leaves alone who calls it.

    `streams` shows those that are still there after the grace.
    """
    serving = set(tasks) - {asyncio.current_task()}
    if serving and grace_seconds:
        await asyncio.wait(serving, timeout=grace_seconds)
    for stream in list(streams):
        stream.break_off("the listener was closed")
    if serving:
        await asyncio.wait(serving, timeout=_LAST_WORDS_SECONDS)
    for task in serving:
        task.cancel()
    if serving:
        await asyncio.wait(serving, timeout=_LAST_WORDS_SECONDS)


class Transport(Protocol):
    """Opens and accepts streams. Owned by one process and one event loop; close it when done."""

    async def listen(self, host: str, port: int, serve: StreamServer) -> Listener:
        """Accept streams on a host and port (0: any free one); serve each in a task of its own.

        Raises UsageError if the port is in use or the address is not ours.
        """
        ...

    async def open_stream(self, endpoint: Endpoint, timeout_seconds: float = 5.0) -> Stream:
        """Dial an endpoint and return a stream that is known to be connected.

        No stream delays another: each has a connection of its own, or takes its turn.

        Raises UnavailableError if there is no answer in time; RemoteProtocolError if the other end
        does not hold the certificate of the endpoint's fingerprint, or does not speak our protocol;
        NotAMemberError if its swarm is private and not ours. The caller closes the stream.
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

    async def listen(self, host: str, port: int, serve: StreamServer) -> Listener:
        return await self._direct.listen(host, port, serve)

    async def open_stream(self, endpoint: Endpoint, timeout_seconds: float = 5.0) -> Stream:
        chosen = self._libp2p if isinstance(endpoint, Libp2pEndpoint) else self._direct
        return await chosen.open_stream(endpoint, timeout_seconds)

    async def close(self) -> None:
        await self._libp2p.close()
        await self._direct.close()
