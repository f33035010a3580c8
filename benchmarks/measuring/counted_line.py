"""A TCP line that counts the bytes of every connection over it, TLS and TCP/IP headers included."""

import asyncio
import socket
import struct
from contextlib import AsyncExitStack, closing, suppress
from dataclasses import dataclass, replace
from typing import Self

from shoal.protocol.endpoints import Endpoint
from shoal.protocol.net.tasks import cancel_all
from shoal.protocol.net.transport import Listener, Stream, StreamServer, Transport

_HEADER_BYTES = 52
"""Of one segment: 20 of IP, 20 of TCP and 12 of its timestamps."""

_SEGMENT_BYTES = 1460
"""What fits into an Ethernet packet of 1,500 bytes; loopback would take 64 KiB."""

_PIECE_BYTES = 2**16

# struct tcp_info of Linux: tcpi_segs_out and tcpi_segs_in.
_SEGMENTS = struct.Struct("=136xII")


@dataclass
class Traffic:
    """What went over a line: bytes of the ends that dialled, and of those that were dialled."""

    num_connections: int = 0
    there_bytes: int = 0
    back_bytes: int = 0


class CountedLine:
    """Listens at all loopback addresses and forwards every connection to a port of this machine.

    Who is dialled through it sees the address that was dialled as that of the dialling end. A
    connection counts when it is over.
    """

    def __init__(self, target_port: int) -> None:
        self.traffic = Traffic()
        self.port = 0
        self._target = "127.0.0.1", target_port
        self._forwarding: set[asyncio.Task[None]] = set()

    @classmethod
    async def open(cls, target_port: int, stack: AsyncExitStack) -> Self:
        """Return a line that is open until a stack is closed."""
        line = cls(target_port)
        listening = socket.create_server(("0.0.0.0", 0))
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, _SEGMENT_BYTES)
        line.port = listening.getsockname()[1]
        stack.push_async_callback(lambda: cancel_all(line._forwarding))
        await stack.enter_async_context(await asyncio.start_server(line._accept, sock=listening))
        return line

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # asyncio itself forgets tasks whose connection has ended in one direction.
        task = asyncio.create_task(self._forward(reader, writer))
        self._forwarding.add(task)
        task.add_done_callback(self._forwarding.discard)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted: socket.socket = writer.get_extra_info("socket")
        dialled = accepted.getsockname()[0]
        with closing(writer), suppress(OSError):
            far_reader, far_writer = await asyncio.open_connection(
                *self._target, local_addr=(dialled, 0)
            )
            with closing(far_writer):
                there_bytes, back_bytes = await asyncio.gather(
                    _carry(reader, far_writer), _carry(far_reader, writer)
                )
                info = accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _SEGMENTS.size)
                num_sent, num_received = _SEGMENTS.unpack(info)
                self.traffic.num_connections += 1
                self.traffic.there_bytes += there_bytes + num_received * _HEADER_BYTES
                self.traffic.back_bytes += back_bytes + num_sent * _HEADER_BYTES


async def _carry(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> int:
    """Forward bytes until their end; return how many there were."""
    num_bytes = 0
    with suppress(OSError):  # an end that breaks is one that closes
        while piece := await source.read(_PIECE_BYTES):
            num_bytes += len(piece)
            sink.write(piece)
            await sink.drain()
        sink.write_eof()
    return num_bytes


class LinedTransport:
    """Dials every endpoint through one line. Implements Transport over another one."""

    def __init__(self, inner: Transport, line: CountedLine) -> None:
        self._inner = inner
        self._line = line

    async def listen(self, host: str, port: int, serve: StreamServer) -> Listener:
        return await self._inner.listen(host, port, serve)

    async def open_stream(self, endpoint: Endpoint, timeout_seconds: float = 5.0) -> Stream:
        return await self._inner.open_stream(
            replace(endpoint, port=self._line.port), timeout_seconds
        )

    async def close(self) -> None:
        await self._inner.close()
