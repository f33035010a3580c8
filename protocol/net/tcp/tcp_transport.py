"""Transport over TCP, under pinned TLS 1.3: each stream has a connection to itself.

A dialler begins with a frame that says hello, in a private swarm with a proof of membership behind
it. A listener answers hello when it takes the stream, and with a mark when not. Then frames go both
ways.
"""

from __future__ import annotations

import asyncio
import logging
import ssl

from ...endpoints import Endpoint
from ...errors import LocalProtocolError, RemoteProtocolError, UnavailableError, UsageError
from ...membership.membership import Membership
from ..addresses import check_can_bind, is_loopback, set_keepalive
from ..frame_stream import FrameStream, Mark
from ..transport import StreamServer, turn_away
from .tcp_listener import HELLO, TcpListener
from .tls import (
    SHUTDOWN_SECONDS,
    TlsIdentity,
    check_pinned,
    explain,
    fingerprint_of,
    make_client_context,
    make_server_context,
    make_tls_identity,
)

log = logging.getLogger(__name__)


class TcpTransport:
    """Dials and listens over TCP, a connection for each stream: so bulk never delays a token.

    Listens under TLS with the identity given, or a fresh one; with `plaintext=True` without TLS
    and on loopback addresses only. An endpoint without a fingerprint is dialled by a transport
    made with `plaintext=True`, on loopback addresses only, and refused by any other.

    In a private swarm it proves its membership to whoever it dials, and takes streams of members
    only; that needs TLS, whose key the proof is made for.
    """

    def __init__(
        self,
        identity: TlsIdentity | None = None,
        *,
        plaintext: bool = False,
        membership: Membership | None = None,
    ) -> None:
        if identity is not None and plaintext:
            raise UsageError("a transport takes a TLS identity or plaintext, not both")
        if membership is not None and membership.is_private and plaintext:
            raise UsageError("a private swarm needs TLS: leave out plaintext")
        self._membership = membership
        self._identity = None if plaintext else identity or make_tls_identity()
        self._context = make_client_context()
        self._streams: set[FrameStream] = set()
        self._listeners: set[TcpListener] = set()
        self._is_closed = False

    def __repr__(self) -> str:
        return (
            f"TcpTransport(streams={len(self._streams)}, listeners={len(self._listeners)}, "
            f"closed={self._is_closed})"
        )

    async def listen(self, host: str, port: int, serve: StreamServer) -> TcpListener:
        self._check_open()
        if self._identity is None and not is_loopback(host):
            raise UsageError(f"plaintext is allowed on loopback addresses only, not on {host}")
        await check_can_bind(host, port)
        context = None if self._identity is None else make_server_context(self._identity)
        fingerprint = (
            "" if self._identity is None else fingerprint_of(self._identity.certificate_pem)
        )
        listener = TcpListener(serve, context, self._membership)
        try:
            await listener.start(host, port, fingerprint)
        except OSError as error:
            raise UsageError(f"cannot listen on {Endpoint(host, port)}: {error}") from error
        self._listeners.add(listener)
        return listener

    async def open_stream(self, endpoint: Endpoint, timeout_seconds: float = 5.0) -> FrameStream:
        self._check_open()
        if not endpoint.fingerprint and not (self._identity is None and is_loopback(endpoint.host)):
            # Endpoints come from strangers' announcements: they cannot talk us out of TLS.
            raise RemoteProtocolError(f"{endpoint} has no TLS fingerprint, and TLS is required")
        stream = FrameStream(str(endpoint))
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._dial(endpoint, stream)
        except TimeoutError as error:
            stream.break_off("nobody answered in time")
            raise UnavailableError(
                f"{endpoint} did not answer within {timeout_seconds:g} s"
            ) from error
        except BaseException:
            stream.break_off("dialling failed")
            raise
        return stream

    async def close(self) -> None:
        self._is_closed = True
        streams = list(self._streams)
        for stream in streams:
            stream.break_off("this transport was closed")
        for listener in list(self._listeners):
            await listener.close()
        self._listeners.clear()
        for stream in streams:
            await stream.wait_lost()

    async def _dial(self, endpoint: Endpoint, stream: FrameStream) -> None:
        await self._connect(endpoint, stream)
        self._streams.add(stream)
        stream.lost.add_done_callback(lambda _: self._streams.discard(stream))
        self._check_open()
        membership = self._membership
        proof = b"" if membership is None else membership.prove_to(endpoint.fingerprint)
        await stream.send(HELLO + proof)
        answer = await stream.receive()
        if stream.mark is Mark.MEMBERS_ONLY:
            is_private = membership is not None and membership.is_private
            raise turn_away(endpoint, has_secret=is_private)
        if stream.mark is Mark.TOO_MANY_STREAMS:
            raise UnavailableError(f"{endpoint} has too many streams open")
        if answer != HELLO:
            raise RemoteProtocolError(f"{endpoint} answers, but does not speak {HELLO.decode()}")

    async def _connect(self, endpoint: Endpoint, stream: FrameStream) -> None:
        loop = asyncio.get_running_loop()
        is_plain = not endpoint.fingerprint
        try:
            connected, _ = await loop.create_connection(
                lambda: stream,
                endpoint.host,
                endpoint.port,
                ssl=None if is_plain else self._context,
                server_hostname=None if is_plain else "",
                ssl_shutdown_timeout=None if is_plain else SHUTDOWN_SECONDS,
            )
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError, ssl.SSLSyscallError) as error:
            raise UnavailableError(f"{endpoint} broke off the TLS handshake") from error
        except ssl.SSLError as error:
            raise RemoteProtocolError(f"{endpoint} does not answer with our TLS") from error
        except (OSError, UnicodeError) as error:
            raise UnavailableError(f"nobody answers at {endpoint}: {explain(error)}") from error
        set_keepalive(connected.get_extra_info("socket"))
        stream.remote_host = str(connected.get_extra_info("peername")[0])
        if not is_plain:
            secured: ssl.SSLObject = connected.get_extra_info("ssl_object")
            check_pinned(secured.getpeercert(binary_form=True) or b"", endpoint)

    def _check_open(self) -> None:
        if self._is_closed:
            raise LocalProtocolError("this transport is closed")
