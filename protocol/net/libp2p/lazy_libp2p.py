"""libp2p for those who have left the directory and may still want to dial a relayed peer."""

from __future__ import annotations

import asyncio

from ...endpoints import Endpoint
from ...errors import LocalProtocolError, UsageError
from ...membership.membership import Membership
from ..p2pd.p2p_daemon import start_reading_p2pd, stop_p2pd
from ..transport import Lane, Listener, Stream, StreamServer
from .libp2p_transport import P2P, Libp2pTransport


class LazyLibp2pTransport:
    """Only dials; starts a p2pd of its own for the first stream, and ends it on closing."""

    def __init__(self, membership: Membership | None = None) -> None:
        self._membership = membership
        self._started: tuple[P2P, Libp2pTransport] | None = None
        self._starting = asyncio.Lock()
        self._is_closed = False

    async def listen(self, host: str, port: int, serve: StreamServer) -> Listener:
        raise UsageError("this transport only dials")

    async def open_stream(
        self, endpoint: Endpoint, lane: Lane = Lane.INTERACTIVE, timeout_seconds: float = 5.0
    ) -> Stream:
        async with self._starting:
            if self._is_closed:
                raise LocalProtocolError("this transport is closed")
            if self._started is None:
                p2p = await start_reading_p2pd((), None, use_relay=True)
                self._started = p2p, Libp2pTransport(p2p, self._membership)
        return await self._started[1].open_stream(endpoint, lane, timeout_seconds)

    async def close(self) -> None:
        async with self._starting:
            self._is_closed = True
            if self._started is not None:
                p2p, transport = self._started
                await transport.close()
                await stop_p2pd(p2p)
                self._started = None
