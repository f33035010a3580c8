"""The listening half of the TCP transport: an open port, and the streams that it accepts."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from typing import Any

from ...endpoints import Endpoint
from ...errors import RefusedError, ShoalError
from ...fair_share import Tenant, check_share, name_address
from ...limits import MAX_FRAME_BYTES
from ...membership.membership import Membership
from ..addresses import open_listening
from ..frame_stream import FrameStream, Mark
from ..tasks import cancel_all
from ..transport import StreamServer, end_serving, serve_stream
from ..turns import Turns
from .tls import SHUTDOWN_SECONDS

log = logging.getLogger(__name__)

MAX_STREAMS = 2048
"""The most connections that all strangers together may open. A peer serves half as many by default;
the others hear why it does not serve them. One address is held to its share, also at a peer that
still loads and serves nobody."""

MAX_HANDSHAKES = 512
"""Connections in the handshake. Those of one address are held to their share, so
that who says nothing keeps nobody else out."""

MAX_CONNECTION_MICROSECONDS = 100_000
"""Of each second, the most that goes into connections: 66 handshakes, 37 of a single address, which
may begin twice as many at once after a second or two without any; half as many that are served."""

_HANDSHAKE_MICROSECONDS = 1_500
"""Event-loop time of one handshake, measured with ECDSA on P-256."""

_SERVICE_MICROSECONDS = 1_500
"""The same of the tasks, the first messages and the end of a stream that is served, beside what its
frames are charged."""

HELLO_SECONDS = 5.0
"""How long a stranger may take for the handshake and his first frame; so long one may also have to
wait for the handshake."""

_UNREAD_LIMITS = 64 * 2**10, 32 * 2**10
"""Encrypted bytes that may wait in TLS for a stream that is not read, and those at which more are
taken: a record has 16 KiB. No account has them: with what asyncio reads in one go, and the tiny
frames beside them, a stream takes 0.35 MiB, and 0.7 MiB with asyncio's own limits."""

HELLO = b"shoal/1"
"""The first frame from either end: it proves that the other one is of our kind."""

_MAX_HELLO_BYTES = 1024

_PAUSE_SECONDS = 0.1
"""Before another attempt to accept, when the system cannot."""

_PACE_SECONDS = 0.004
"""Between two connections: many that come at once leave time for others, and wait outside."""

_REFUSED_AT_ONCE = 8
"""Connections that are refused without a pause: 2,000 a second, or else one address that begins
more than 250 would keep all others waiting outside."""


class TcpListener:
    """Accepts connections and owns the tasks that serve them."""

    def __init__(
        self,
        serve: StreamServer,
        context: ssl.SSLContext,
        membership: Membership,
    ) -> None:
        self._serve = serve
        self._context = context
        self._membership = membership
        self.endpoint = Endpoint("", 0)
        self._sockets: list[socket.socket] = []
        self._accepting: list[asyncio.Task[None]] = []
        self._serving: set[asyncio.Task[None]] = set()
        self._greeting: list[str] = []  # by tenant
        self._served: list[str] = []
        self._turns = Turns(MAX_CONNECTION_MICROSECONDS, 1.44)  # half is forgotten in 1 s
        self._streams: set[FrameStream] = set()

    async def start(self, host: str, port: int, fingerprint: str) -> None:
        """Listen; raises UsageError when that cannot be."""
        self._sockets = await open_listening(host, port)
        self.endpoint = Endpoint(host, self._sockets[0].getsockname()[1], fingerprint)
        self._accepting = [asyncio.create_task(self._accept(opened)) for opened in self._sockets]

    async def close(self, grace_seconds: float = 0.0) -> None:
        await cancel_all(self._accepting)
        for opened in self._sockets:
            opened.close()
        await end_serving(self._serving, self._streams, grace_seconds)
        for stream in list(self._streams):
            await stream.wait_lost()

    async def _accept(self, opened: socket.socket) -> None:
        loop, num_refused = asyncio.get_running_loop(), 0
        while True:
            try:
                accepted, address = await loop.sock_accept(opened)
            except OSError as error:
                # Descriptors or memory have run out, and may come back.
                log.warning("cannot accept a connection at %s: %s", self.endpoint, error)
                await asyncio.sleep(_PAUSE_SECONDS)
                continue
            tenant = name_address(address[0])
            try:
                check_share(tenant, self._greeting, MAX_HANDSHAKES, "strangers")
            except RefusedError:
                accepted.close()
                num_refused += 1
                if num_refused % _REFUSED_AT_ONCE == 0:
                    await asyncio.sleep(_PACE_SECONDS)
                continue
            accepted.setblocking(False)
            self._greeting.append(tenant)
            task = asyncio.create_task(self._attend(accepted, address[0], tenant))
            self._serving.add(task)
            task.add_done_callback(self._serving.discard)
            await asyncio.sleep(_PACE_SECONDS)

    async def _attend(self, accepted: socket.socket, host: str, tenant: str) -> None:
        """See a connection from the handshake to its end."""
        stream = FrameStream(host)
        stream.limit(_MAX_HELLO_BYTES)
        self._streams.add(stream)
        try:
            await self._wait_for_turn(accepted, tenant)
            is_welcome = await self._greet(accepted, stream, tenant)
        except TimeoutError:
            is_welcome = False
        finally:
            self._greeting.remove(tenant)
        if not is_welcome:
            self._streams.discard(stream)
            return
        stream.lost.add_done_callback(lambda _: self._streams.discard(stream))
        self._served.append(tenant)
        self._turns.charge(Tenant(tenant), _SERVICE_MICROSECONDS)
        try:
            await serve_stream(self._serve, stream, self.endpoint, stream.break_off)
        finally:
            self._served.remove(tenant)

    async def _wait_for_turn(self, accepted: socket.socket, tenant: str) -> None:
        """Wait until a handshake may begin. Hangs up and raises TimeoutError if that takes long."""
        try:
            async with asyncio.timeout(HELLO_SECONDS):
                await self._turns.wait(Tenant(tenant))
        except BaseException:
            accepted.close()
            raise
        self._turns.charge(Tenant(tenant), _HANDSHAKE_MICROSECONDS)

    async def _greet(self, accepted: socket.socket, stream: FrameStream, tenant: str) -> bool:
        """Make the connection safe and let the stream begin; return whether it did."""
        loop = asyncio.get_running_loop()
        refusal: Mark | None = None
        try:
            async with asyncio.timeout(HELLO_SECONDS):
                connected: Any = await loop.connect_accepted_socket(
                    lambda: stream,
                    accepted,
                    ssl=self._context,
                    ssl_handshake_timeout=HELLO_SECONDS,
                    ssl_shutdown_timeout=SHUTDOWN_SECONDS,
                )
                connected[0].set_read_buffer_limits(*_UNREAD_LIMITS)
                refusal = self._judge(await stream.receive(), tenant)
                if refusal is None:
                    stream.limit(MAX_FRAME_BYTES)
                    await stream.send(HELLO)
                    return True
        except (TimeoutError, OSError, ShoalError) as error:
            log.debug("refused a connection at %s: %s", self.endpoint, error)
        stream.hang_up_with(refusal or Mark.END)
        return False

    def _judge(self, hello: bytes | None, tenant: str) -> Mark | None:
        """Return why a stranger does not get in, None if he does."""
        if hello is None or not hello.startswith(HELLO):
            return Mark.END
        proof = hello.removeprefix(HELLO)
        if not self._membership.accepts(self.endpoint.fingerprint, proof):
            return Mark.MEMBERS_ONLY
        try:
            check_share(tenant, self._served, MAX_STREAMS, "streams")
        except RefusedError:
            return Mark.TOO_MANY_STREAMS
        return None
