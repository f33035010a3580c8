"""Transport over `grpc.aio`: one bidirectional method that carries raw frames, under pinned TLS.

Only this file, the dialling half, and grpc_listener import grpc. There is no generated code: the
method takes and gives bytes.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

# gRPC's core prints a line on stderr for every connection that a peer ends; we raise errors.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

import grpc

from ..endpoints import Endpoint
from ..errors import (
    LocalProtocolError,
    RemoteProtocolError,
    ShoalError,
    UnavailableError,
    UsageError,
)
from .addresses import check_can_bind, is_loopback
from .grpc_listener import ACCEPTED, EOF, METHOD, SERVICE, GrpcListener
from .grpc_options import CHANNEL_OPTIONS, MAX_STREAMS_PER_LISTENER, SERVER_OPTIONS
from .stream_end import StreamEnd
from .tls import TlsIdentity, fetch_pinned_certificate, fingerprint_of, make_tls_identity, name_in
from .transport import Lane, StreamServer

log = logging.getLogger(__name__)

_LINGER_SECONDS = 5.0
"""How long a closed stream waits for the other end to read what was sent and to close as well."""

_MAX_IDLE_CONNECTIONS = 32
"""Those without a stream that are kept for the next one; of more, the longest unused are closed."""

_SETTLING_SECONDS = 0.05
"""How long gRPC's own thread has to report the end of calls that were cut. What it reports to a
loop that is gone by then becomes a traceback in the log of the next loop."""


class GrpcTransport:
    """Dials and listens over TCP. Two connections per endpoint, one for each lane.

    Listens under TLS with the identity given, or a fresh one; with `plaintext=True` without TLS
    and on loopback addresses only. An endpoint without a fingerprint is dialled by a transport
    made with `plaintext=True`, on loopback addresses only, and refused by any other.
    """

    def __init__(self, identity: TlsIdentity | None = None, *, plaintext: bool = False) -> None:
        if identity is not None and plaintext:
            raise UsageError("a transport has a TLS identity or speaks plain text, not both")
        self._identity = None if plaintext else identity or make_tls_identity()
        self._certificates: dict[Endpoint, bytes] = {}
        self._connections: dict[tuple[Endpoint, Lane], _Connection] = {}
        self._streams: set[_DialledStream] = set()
        self._listeners: set[GrpcListener] = set()
        self._is_closed = False

    def __repr__(self) -> str:
        return (
            f"GrpcTransport(streams={len(self._streams)}, connections={len(self._connections)}, "
            f"certificates={len(self._certificates)}, "
            f"listeners={len(self._listeners)}, closed={self._is_closed})"
        )

    async def listen(self, host: str, port: int, serve: StreamServer) -> GrpcListener:
        self._check_open()
        if self._identity is None and not is_loopback(host):
            raise UsageError(f"plain text is for loopback addresses only, not for {host}")
        await check_can_bind(host, port)
        server = grpc.aio.server(
            options=SERVER_OPTIONS, maximum_concurrent_rpcs=MAX_STREAMS_PER_LISTENER
        )
        fingerprint = ""
        try:
            if self._identity is None:
                port = server.add_insecure_port(str(Endpoint(host, port)))
            else:
                fingerprint = fingerprint_of(self._identity.certificate_pem)
                pair = (self._identity.private_key_pem, self._identity.certificate_pem)
                credentials = grpc.ssl_server_credentials([pair])
                port = server.add_secure_port(str(Endpoint(host, port)), credentials)
        except (RuntimeError, ValueError) as error:
            raise UsageError(f"cannot listen on {Endpoint(host, port)}: {error}") from error
        listener = GrpcListener(server, Endpoint(host, port, fingerprint), serve)
        await listener.start()
        self._listeners.add(listener)
        return listener

    async def open_stream(
        self, endpoint: Endpoint, lane: Lane = Lane.INTERACTIVE, timeout_seconds: float = 5.0
    ) -> _DialledStream:
        self._check_open()
        if not endpoint.fingerprint and not (self._identity is None and is_loopback(endpoint.host)):
            # Endpoints come from strangers' announcements: they cannot talk us out of TLS.
            raise RemoteProtocolError(f"{endpoint} has no TLS fingerprint, and TLS is required")
        try:
            async with asyncio.timeout(timeout_seconds):
                stream = await self._dial(endpoint, lane)
        except TimeoutError as error:
            raise UnavailableError(
                f"{endpoint} did not answer within {timeout_seconds:g} s"
            ) from error
        if self._is_closed:
            await stream.abort("this transport was closed")
            raise LocalProtocolError("this transport was closed while it dialled")
        self._streams.add(stream)
        return stream

    async def close(self) -> None:
        self._is_closed = True
        for stream in list(self._streams):
            await stream.abort("this transport was closed")
        for connection in list(self._connections.values()):
            await connection.channel.close()
        for listener in list(self._listeners):
            await listener.close()
        self._listeners.clear()
        if self._connections:
            self._connections.clear()
            await asyncio.sleep(_SETTLING_SECONDS)

    async def _dial(self, endpoint: Endpoint, lane: Lane) -> _DialledStream:
        """Open a stream; if what we knew of the endpoint proves stale, once more from nothing."""
        is_known = (endpoint, lane) in self._connections or endpoint in self._certificates
        try:
            return await self._open_on(await self._connect(endpoint, lane))
        except UnavailableError:
            if not is_known:
                raise
        return await self._open_on(await self._connect(endpoint, lane))

    async def _open_on(self, connection: _Connection) -> _DialledStream:
        connection.num_streams += 1
        call: Any = connection.channel.stream_stream(f"/{SERVICE}/{METHOD}")()
        try:
            await _wait_accepted(call, connection.endpoint)
        except BaseException:
            call.cancel()
            connection.num_streams -= 1
            await self._forget(connection)
            raise
        return _DialledStream(call, connection, self._release)

    async def _connect(self, endpoint: Endpoint, lane: Lane) -> _Connection:
        """Return the connection we have, or a new one to a certificate that was checked."""
        self._check_open()
        certificate = self._certificates.get(endpoint)
        if endpoint.fingerprint and certificate is None:
            certificate = await fetch_pinned_certificate(endpoint)
            self._check_open()
            self._certificates[endpoint] = certificate
        connection = self._connections.get((endpoint, lane))
        if connection is None:
            connection = _Connection(endpoint, lane, _open_channel(endpoint, certificate))
            self._connections[endpoint, lane] = connection
        return connection

    async def _forget(self, connection: _Connection) -> None:
        """Let the next stream to an endpoint start from nothing; running streams go on."""
        self._certificates.pop(connection.endpoint, None)
        if self._connections.get((connection.endpoint, connection.lane)) is connection:
            del self._connections[connection.endpoint, connection.lane]
        if not connection.num_streams:
            await connection.channel.close()

    async def _release(self, stream: _DialledStream) -> None:
        """Take back a stream that ended; its connection stays for a while if it is in order."""
        if stream not in self._streams:
            return
        self._streams.discard(stream)
        connection = stream.connection
        connection.num_streams -= 1
        key = (connection.endpoint, connection.lane)
        is_current = self._connections.get(key) is connection
        if connection.num_streams:
            return
        if stream.is_broken or not is_current:
            await self._forget(connection)
            return
        self._connections[key] = self._connections.pop(key)  # the last one is the last one used
        idle = [known for known in self._connections.values() if not known.num_streams]
        for unused in idle[:-_MAX_IDLE_CONNECTIONS]:
            await self._forget(unused)

    def _check_open(self) -> None:
        if self._is_closed:
            raise LocalProtocolError("this transport is closed")


@dataclass(eq=False)
class _Connection:
    """One TCP connection to an endpoint for one lane, and how many streams use it."""

    endpoint: Endpoint
    lane: Lane
    channel: grpc.aio.Channel
    num_streams: int = 0


class _DialledStream(StreamEnd):
    """The dialler's end."""

    def __init__(
        self,
        call: Any,
        connection: _Connection,
        release: Callable[[_DialledStream], Awaitable[None]],
    ) -> None:
        super().__init__()
        self.remote_host = connection.endpoint.host
        self.connection = connection
        self._call = call
        self._release = release
        self._lingering: asyncio.Task[None] | None = None

    async def close(self) -> None:
        self.end()
        if self._lingering is None:
            self._lingering = asyncio.create_task(self._linger())
        if self.is_broken:
            await asyncio.wait({self._lingering})

    async def abort(self, reason: str) -> None:
        """Break the stream off, or cut its lingering short."""
        self.break_off(reason)
        if self._lingering is None:
            self._lingering = asyncio.create_task(self._linger())
        elif not self._lingering.done():
            self._lingering.cancel()
        await asyncio.wait({self._lingering})

    async def _linger(self) -> None:
        """See a closed stream to its end: what was sent still arrives, what comes is dropped."""
        try:
            if not self.is_broken:
                async with asyncio.timeout(_LINGER_SECONDS):
                    await self._call.done_writing()
                    while await (self._reading or self._read()) is not None:
                        self._reading = None
        except (TimeoutError, ShoalError, grpc.aio.BaseError):
            log.debug("a stream to %s did not end in good order", self.connection.endpoint)
        finally:
            self._call.cancel()
            await self.stop_reading()
            await self._release(self)

    async def _read(self) -> bytes | None:
        try:
            message = await self._call.read()
        except grpc.aio.AioRpcError as error:
            fault = _translate(error, self.connection.endpoint)
            self.end(fault)
            raise fault from error
        except asyncio.CancelledError:
            # Also how gRPC reports that the call, rather than this task, was cancelled.
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise UnavailableError(f"the stream to {self.connection.endpoint} was cut") from None
        return None if message is EOF else message

    async def _write(self, message: bytes) -> None:
        endpoint = self.connection.endpoint
        try:
            await self._call.write(message)
        except grpc.aio.AioRpcError as error:
            raise _translate(error, endpoint) from error
        except (asyncio.InvalidStateError, grpc.aio.BaseError) as error:
            raise UnavailableError(f"{endpoint} ended the stream") from error
        # gRPC takes messages for a call that ended in good order, and drops them.
        if self._call.done():
            raise UnavailableError(f"{endpoint} ended the stream")


def _open_channel(endpoint: Endpoint, certificate: bytes | None) -> grpc.aio.Channel:
    """Return a channel that trusts exactly this certificate; plain text without one."""
    if certificate is None:
        return grpc.aio.insecure_channel(str(endpoint), options=CHANNEL_OPTIONS)
    options = (*CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", name_in(certificate)))
    credentials = grpc.ssl_channel_credentials(root_certificates=certificate)
    return grpc.aio.secure_channel(str(endpoint), credentials, options=options)


async def _wait_accepted(call: Any, endpoint: Endpoint) -> None:
    headers = await call.initial_metadata()
    if ACCEPTED[0][0] in headers:
        return
    code = await call.code()
    if code in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.OK):
        raise RemoteProtocolError(f"{endpoint} answers, but does not speak {SERVICE}")
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        raise UnavailableError(f"{endpoint} has too many streams open")
    raise UnavailableError(f"nobody answers at {endpoint}: {await call.details()}")


def _translate(error: grpc.aio.AioRpcError, endpoint: Endpoint) -> ShoalError:
    if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return RemoteProtocolError(f"{endpoint} sent too much: {error.details()}")
    return UnavailableError(f"the stream to {endpoint} broke: {error.details()}")
