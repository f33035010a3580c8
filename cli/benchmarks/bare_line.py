"""Bare frames over a slow line and back: how long a way really takes, without peers."""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import cast

from .slow_lines import LineConfig, start_slow_lines

_NEAR_HOST, _FAR_HOST = "127.0.0.1", "127.0.0.2"


class _Echo(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._transport.write(data)


@asynccontextmanager
async def open_bare_line(line: LineConfig) -> AsyncGenerator[Callable[[bytes], Awaitable[float]]]:
    """Yield what sends a frame over a line of its own, and returns the seconds of half the trip."""
    async with await asyncio.get_running_loop().create_server(_Echo, _NEAR_HOST, 0) as server:
        port = server.sockets[0].getsockname()[1]
        with start_slow_lines(line, {(_FAR_HOST, port): (_NEAR_HOST, port)}):
            reader, writer = await asyncio.open_connection(_FAR_HOST, port)

            async def time_way(frame: bytes) -> float:
                started_at = time.perf_counter()
                writer.write(frame)
                await reader.readexactly(len(frame))
                return (time.perf_counter() - started_at) / 2

            yield time_way
            writer.close()
            await writer.wait_closed()
