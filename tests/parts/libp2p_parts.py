"""A libp2p transport with a p2pd of its own, which elsewhere belongs to the directory."""

import asyncio
import warnings
from typing import Any

from shoal.protocol.endpoints import Endpoint
from shoal.protocol.net.transport import Listener, Stream, StreamServer


class OwnLibp2pTransport:
    """Starts p2pd when it is first needed and ends it when it is closed."""

    def __init__(self, *, is_listening: bool) -> None:
        self._is_listening = is_listening
        self._p2p: Any = None
        self._transport: Any = None
        self._starting = asyncio.Lock()

    async def listen(self, host: str, port: int, serve: StreamServer) -> Listener:
        return await (await self._start()).listen(host, port, serve)

    async def open_stream(self, endpoint: Endpoint, timeout_seconds: float = 5.0) -> Stream:
        return await (await self._start()).open_stream(endpoint, timeout_seconds)

    async def close(self) -> None:
        if self._p2p is None:
            return
        from shoal.protocol.net.libp2p.p2p_daemon import stop_p2pd

        await self._transport.close()
        await stop_p2pd(self._p2p)

    async def _start(self) -> Any:
        # hivemind takes seconds to import, and most tests of transports do without.
        from shoal.protocol.net.libp2p.libp2p_transport import Libp2pTransport
        from shoal.protocol.net.libp2p.p2p_daemon import start_reading_p2pd, start_serving_p2pd

        warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"hivemind\.")
        async with self._starting:
            if self._transport is None:
                if self._is_listening:
                    self._p2p = await start_serving_p2pd([], None, "127.0.0.1", 0)
                else:
                    self._p2p = await start_reading_p2pd([], None)
                self._transport = Libp2pTransport(self._p2p)
        return self._transport
