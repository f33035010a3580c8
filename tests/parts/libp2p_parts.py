"""A libp2p transport with a p2pd of its own, which elsewhere belongs to the directory."""

import asyncio
import warnings
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
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


@asynccontextmanager
async def connected_p2pds(
    num_serving: int = 1, num_reading: int = 1
) -> AsyncGenerator[tuple[list[Any], list[Any]]]:
    """Yield p2pds that listen, and others that are connected to them."""
    from shoal.protocol.net.libp2p.multiaddrs import PeerAddress
    from shoal.protocol.net.libp2p.p2p_daemon import (
        start_reading_p2pd,
        start_serving_p2pd,
        stop_p2pd,
    )

    async with AsyncExitStack() as stack:
        serving, addresses = list[Any](), list[PeerAddress]()
        for _ in range(num_serving):
            serving.append(await start_serving_p2pd([], None, "127.0.0.1", 0))
            stack.push_async_callback(stop_p2pd, serving[-1])
            addresses.append(PeerAddress.parse(str((await serving[-1].get_visible_maddrs())[0])))
        reading = [await start_reading_p2pd(addresses, None) for _ in range(num_reading)]
        for p2p in reading:
            stack.push_async_callback(stop_p2pd, p2p)
        yield serving, reading
