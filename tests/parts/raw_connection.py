"""A connection to a peer by hand, for what our own transport does not do."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress

from shoal.protocol.endpoints import Endpoint
from shoal.protocol.net.frame_stream import Framing
from shoal.protocol.net.tcp.tcp_listener import HELLO
from shoal.protocol.net.tcp.tls import make_client_context


@asynccontextmanager
async def dial_raw(
    endpoint: Endpoint,
    from_host: str = "127.0.0.1",
) -> AsyncGenerator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Connect and greet, as a stream of `TcpTransport` would."""
    reader, writer = await asyncio.open_connection(
        endpoint.host,
        endpoint.port,
        ssl=make_client_context(),
        server_hostname="",
        local_addr=(from_host, 0),
    )
    try:
        hello = b"".join(Framing().pack(HELLO))
        writer.write(hello)
        assert await reader.readexactly(len(hello)) == hello
        yield reader, writer
    finally:
        writer.transport.abort()
        with suppress(OSError):
            await writer.wait_closed()
