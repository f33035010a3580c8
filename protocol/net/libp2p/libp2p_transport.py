# hivemind's types are partial; what we say ourselves is checked.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
"""Transport over libp2p, through the p2pd process of the directory: for peers behind a NAT.

Slower than TCP, since every byte passes through p2pd at both ends and maybe through a relay, and
all streams share one connection. libp2p encrypts, and proves the peer id: it is the public key.

Imported by the directory only: hivemind takes seconds to import.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from ...endpoints import Endpoint, Libp2pEndpoint
from ...errors import (
    LocalProtocolError,
    RemoteProtocolError,
    ShoalError,
    UnavailableError,
    UsageError,
)
from ...fair_share import FairLimit
from ...ids import PeerId
from ...membership.membership import NO_MEMBERSHIP, Membership
from ..tcp.dial_rules import DialRules
from ..tcp.tcp_listener import HELLO_SECONDS, MAX_HANDSHAKES, MAX_STREAMS
from ..transport import StreamServer, end_serving, make_not_a_member_error, serve_stream
from .hivemind_packages import importing_hivemind
from .libp2p_stream import Libp2pStream
from .multiaddrs import split_multiaddr
from .p2p_daemon import (
    connect,
    name_dialler,
    open_byte_stream,
)

with importing_hivemind():
    from hivemind.p2p import P2P
    from hivemind.p2p.p2p_daemon_bindings.utils import ControlFailure

log = logging.getLogger(__name__)

PROTOCOL = "/shoal/exchange/1"

_HELLO = b"shoal-exchange 1 "
"""First message of a dialler; in a private swarm a proof of membership follows."""

_ACCEPTED = b"shoal-accepted 1"
_MEMBERS_ONLY = b"shoal-members-only 1"
"""First messages of a listener. p2pd takes a stream for open before the other end has agreed."""


class Libp2pTransport:
    """Dials peers by their id, and listens where p2pd does. Leaves p2pd to its owner.

    In a private swarm it proves its membership to whoever it dials, and takes streams of members
    only.
    """

    def __init__(
        self, p2p: P2P, membership: Membership | None = None, rules: DialRules | None = None
    ) -> None:
        """`rules` say through which relays is dialled; without them, through all."""
        self._p2p = p2p
        self._rules = rules
        self._membership = membership or NO_MEMBERSHIP
        self._streams: set[Libp2pStream] = set()
        self._listener: Libp2pListener | None = None
        self._is_closed = False

    async def listen(self, host: str, port: int, serve: StreamServer) -> Libp2pListener:
        """See Transport.listen: one listener at a time, where p2pd listens already.

        Port 0 stands for the port of p2pd, a host that means every address for any of them.
        """
        self._check_open()
        is_any = host in ("0.0.0.0", "::")
        addresses = [split_multiaddr(str(text)) for text in await self._p2p.get_visible_maddrs()]
        fitting = [at for at in addresses if (is_any or at[0] == host) and port in (0, at[1])]
        if not fitting:
            raise UsageError(f"libp2p does not listen on {Endpoint(host, port)}")
        if self._listener is not None and self._listener.is_open:
            raise UsageError(f"port {fitting[0][1]} on {host} is in use; choose another one")
        peer_id = PeerId(str(self._p2p.peer_id))
        endpoint = Libp2pEndpoint(host, fitting[0][1], peer_id=peer_id)
        self._listener = Libp2pListener(endpoint, serve, self._membership)
        await self._listener.start(self._p2p)
        return self._listener

    async def move(self, p2p: P2P) -> None:
        """From now on dial and listen through another p2pd; the one before has ended."""
        self._p2p = p2p
        if self._listener is not None and self._listener.is_open:
            await self._listener.start(p2p)

    async def open_stream(self, endpoint: Endpoint, timeout_seconds: float = 5.0) -> Libp2pStream:
        self._check_open()
        if not isinstance(endpoint, Libp2pEndpoint):
            raise UsageError(f"{endpoint} is not dialled through libp2p")
        if self._rules is None:
            return await self._open_stream(endpoint, timeout_seconds)
        return await self._rules.open_stream(endpoint, timeout_seconds, self._open_stream)

    async def _open_stream(self, endpoint: Libp2pEndpoint, timeout_seconds: float) -> Libp2pStream:
        try:
            async with asyncio.timeout(timeout_seconds):
                return await self._dial(endpoint)
        except TimeoutError as error:
            raise UnavailableError(
                f"{endpoint} did not answer within {timeout_seconds:.3g} s"
            ) from error

    async def close(self) -> None:
        self._is_closed = True
        streams = list(self._streams)
        for stream in streams:
            stream.break_off("this transport was closed")
        for stream in streams:
            await stream.wait_lost()
        if self._listener is not None:
            await self._listener.close()

    async def _dial(self, endpoint: Libp2pEndpoint) -> Libp2pStream:
        await connect(self._p2p, endpoint.peer_id, endpoint.address)
        reader, writer = await open_byte_stream(self._p2p, endpoint.peer_id, PROTOCOL)
        stream = Libp2pStream(reader, writer, str(endpoint), endpoint.host)
        self._streams.add(stream)
        stream.lost.add_done_callback(lambda _: self._streams.discard(stream))
        try:
            stream.greet(_HELLO + self._membership.prove_to(endpoint.peer_id))
            await self._wait_accepted(stream, endpoint)
            self._check_open()
        except BaseException:
            stream.break_off("it was not accepted")
            raise
        return stream

    async def _wait_accepted(self, stream: Libp2pStream, endpoint: Endpoint) -> None:
        try:
            answer = await stream.receive()
        except UnavailableError as error:
            raise UnavailableError(f"{endpoint} takes no more streams") from error
        if answer == _MEMBERS_ONLY:
            raise make_not_a_member_error(endpoint, has_secret=self._membership.is_private)
        if answer != _ACCEPTED:
            raise RemoteProtocolError(f"{endpoint} answers, but does not speak {PROTOCOL}")

    def _check_open(self) -> None:
        if self._is_closed:
            raise LocalProtocolError("this transport is closed")


class Libp2pListener:
    """The streams that p2pd hands us, and the tasks that serve them."""

    def __init__(
        self,
        endpoint: Libp2pEndpoint,
        serve: StreamServer,
        membership: Membership,
    ) -> None:
        self.endpoint = endpoint
        self._serve = serve
        self._membership = membership
        self._serving: set[asyncio.Task[None]] = set()
        self._streams: set[Libp2pStream] = set()
        self._handshakes = FairLimit(MAX_HANDSHAKES, "strangers")
        self._limit = FairLimit(MAX_STREAMS, "streams")
        self.is_open = False

    async def start(self, p2p: P2P) -> None:
        """Take the streams that come to a p2pd, until `close`."""
        self._p2p = p2p
        await p2p.add_binary_stream_handler(PROTOCOL, self._accept)
        self.is_open = True

    async def close(self, grace_seconds: float = 0.0) -> None:
        if self.is_open:
            self.is_open = False
            try:
                await self._p2p.remove_binary_stream_handler(PROTOCOL)
            except (ControlFailure, OSError, EOFError) as error:
                log.debug("p2pd did not remove the stream handler: %r", error)
        await end_serving(self._serving, self._streams, grace_seconds)

    async def _accept(
        self, info: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Take one stream from p2pd; it is served in a task of its own, which we can cancel."""
        if not self.is_open:
            writer.close()
            return
        task = asyncio.create_task(self._attend(info, reader, writer))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def _attend(
        self, info: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """See a stream from its first message to its end."""
        host, _ = split_multiaddr(str(info.addr))
        tenant = name_dialler(info)
        try:
            with self._handshakes.hold(tenant):
                async with asyncio.timeout(HELLO_SECONDS):
                    stream = await Libp2pStream.accept(reader, writer, host or None)
                    self._streams.add(stream)
                    stream.lost.add_done_callback(lambda _: self._streams.discard(stream))
                    is_welcome = self._judge(await stream.receive() or b"")
                if not is_welcome:
                    stream.greet(_MEMBERS_ONLY)
                    await stream.close()
                    await stream.wait_lost()
                    return
            with self._limit.hold(tenant):
                stream.greet(_ACCEPTED)
                await serve_stream(self._serve, stream, self.endpoint, stream.break_off)
                await stream.wait_lost()
        except (TimeoutError, OSError, ShoalError) as error:
            log.debug("refused a connection at %s: %s", self.endpoint, error)
        finally:
            writer.transport.abort()

    def _judge(self, hello: bytes) -> bool:
        """Return whether a dialler may come in, by its first message."""
        if not hello.startswith(_HELLO):
            raise RemoteProtocolError(f"the first message does not speak {PROTOCOL}")
        proof = hello.removeprefix(_HELLO)
        return self._membership.accepts(self.endpoint.peer_id, proof)
