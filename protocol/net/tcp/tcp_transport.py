"""Transport over TCP, under pinned TLS 1.3: each stream has a connection to itself.

A dialler begins with a frame that says hello, in a private swarm with a proof of membership behind
it. A listener answers hello when it takes the stream, and with a mark when not. Then frames go both
ways.
"""

from __future__ import annotations

import asyncio

from ...endpoints import Endpoint
from ...errors import LocalProtocolError, RemoteProtocolError, UnavailableError
from ...identity import Identity
from ...membership.membership import NO_MEMBERSHIP, Membership
from ..frame_stream import FrameStream, Mark
from ..transport import StreamServer, make_not_a_member_error
from .dial_rules import DialRules
from .tcp_listener import HELLO, TcpListener
from .tls import (
    TlsIdentity,
    connect_pinned,
    make_client_context,
    make_server_context,
    make_tls_identity,
)


class TcpTransport:
    """Dials and listens over TCP, a connection for each stream: so bulk never delays a token.

    Listens with the identity given, or a fresh one. Where its swarm is private, it proves its
    membership to whoever it dials, and takes streams of members only.
    """

    def __init__(
        self,
        identity: TlsIdentity | None = None,
        *,
        membership: Membership | None = None,
        rules: DialRules | None = None,
    ) -> None:
        """`rules` say what may be dialled; without them, everything."""
        self._rules = rules
        self._membership = membership or NO_MEMBERSHIP
        self._identity = identity or make_tls_identity()
        self._context = make_client_context()
        self._streams: set[FrameStream] = set()
        self._listeners: set[TcpListener] = set()
        self._is_closed = False

    @classmethod
    def of_peer(
        cls, identity: Identity, membership: Membership | None, rules: DialRules
    ) -> TcpTransport:
        """Return the transport of a peer, with a TLS key that depends on its identity.

        Peers that know its announcement from before a restart find the same key again.
        """
        tls_identity = make_tls_identity(identity.derive_secret("shoal TLS key"))
        return cls(tls_identity, membership=membership, rules=rules)

    async def listen(self, host: str, port: int, serve: StreamServer) -> TcpListener:
        self._check_open()
        listener = TcpListener(serve, make_server_context(self._identity), self._membership)
        await listener.start(host, port, self._identity.fingerprint)
        self._listeners.add(listener)
        return listener

    async def open_stream(self, endpoint: Endpoint, timeout_seconds: float = 5.0) -> FrameStream:
        self._check_open()
        if not endpoint.fingerprint:
            # Endpoints come from strangers' announcements: they cannot talk us out of TLS.
            raise RemoteProtocolError(f"{endpoint} has no TLS fingerprint, and TLS is required")
        if self._rules is None:
            return await self._open_stream(endpoint, timeout_seconds)
        return await self._rules.open_stream(endpoint, timeout_seconds, self._open_stream)

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

    async def _open_stream(self, endpoint: Endpoint, timeout_seconds: float) -> FrameStream:
        stream = FrameStream(str(endpoint))
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._dial(endpoint, stream)
        except TimeoutError as error:
            stream.break_off("nobody answered in time")
            raise UnavailableError(
                f"{endpoint} did not answer within {timeout_seconds:.3g} s"
            ) from error
        except BaseException:
            stream.break_off("dialling failed")
            raise
        return stream

    async def _dial(self, endpoint: Endpoint, stream: FrameStream) -> None:
        await connect_pinned(lambda: stream, endpoint, self._context)
        self._streams.add(stream)
        stream.lost.add_done_callback(lambda _: self._streams.discard(stream))
        self._check_open()
        await stream.send(HELLO + self._membership.prove_to(endpoint.fingerprint))
        answer = await stream.receive()
        if stream.mark is Mark.MEMBERS_ONLY:
            raise make_not_a_member_error(endpoint, has_secret=self._membership.is_private)
        if stream.mark is Mark.TOO_MANY_STREAMS:
            raise UnavailableError(f"{endpoint} has too many streams open")
        if answer != HELLO:
            raise RemoteProtocolError(f"{endpoint} answers, but does not speak {HELLO.decode()}")

    def _check_open(self) -> None:
        if self._is_closed:
            raise LocalProtocolError("this transport is closed")
