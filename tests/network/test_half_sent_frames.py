"""Strangers send nearly all of many large frames to a real `shoal serve`, and then nothing more.

What has arrived of a frame is memory that the peer cannot use. The attacks speak HTTP/2 or gRPC by
themselves, since our own transport finishes what it begins.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from shoal.peer.local_swarm import LocalSwarm
from shoal.protocol import limits
from shoal.protocol.endpoints import Endpoint
from shoal.protocol.ids import ModelId
from shoal.protocol.messages import Hello, Welcome
from shoal.protocol.net.clock import SystemClock
from shoal.protocol.net.grpc_transport import GrpcTransport
from shoal.protocol.net.hivemind_directory import HivemindDirectory
from shoal.protocol.net.pieces import MAX_MESSAGE_BYTES, cut_frame
from shoal.protocol.net.tls import fetch_pinned_certificate, name_in
from shoal.protocol.wire import decode_frame, encode_frame

pytestmark = [pytest.mark.network, pytest.mark.slow]

NUM_STREAMS = 60
METHOD = "/shoal.v1.Peer/Exchange"
HELLO = encode_frame(Hello(1, 1, "a stranger"))
LARGEST = bytes(limits.MAX_FRAME_BYTES)
MIB = 2**20

DATA, HEADERS, RESET, SETTINGS, PING, WINDOW_UPDATE = 0, 1, 3, 4, 6, 8
FRAME_BYTES = 16384


class Target:
    """A peer, where it listens, and how much memory it takes."""

    def __init__(self, swarm: LocalSwarm, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._process = swarm.peers[0]

    @property
    def memory_bytes(self) -> int:
        """Resident memory of the peer's process."""
        for line in Path(f"/proc/{self._process.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
        raise AssertionError("the peer is gone")

    async def expect_service(self) -> None:
        """See that somebody who comes now is served."""
        transport = GrpcTransport()
        async with asyncio.timeout(20):
            stream = await transport.open_stream(self.endpoint)
            await stream.send(HELLO)
            answer = await stream.receive()
        assert answer is not None
        assert isinstance(decode_frame(answer), Welcome)
        await transport.close()


@pytest.fixture(scope="module")
def target(tiny_models: Any) -> Iterator[Target]:
    async def look_up(swarm: LocalSwarm) -> Endpoint:
        directory = await HivemindDirectory.join(
            swarm.initial_peers, identity=None, clock=SystemClock(), client_mode=True
        )
        try:
            (announcement,) = await directory.lookup(ModelId(swarm.peers[0].facts["model_id"]))
        finally:
            await directory.close()
        return announcement.endpoints[0]

    tiny = tiny_models.get("llama")
    with LocalSwarm(tiny.directory, spans=[(0, 4)], weights="fp32") as swarm:
        yield Target(swarm, asyncio.run(look_up(swarm)))


class RawConnection:
    """HTTP/2 by hand: sends what each stream still has to say, as far as the peer lets it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._window = self._first_window = 65535
        self._windows: dict[int, int] = {}
        self._unsent: dict[int, bytes] = {}

    @classmethod
    async def dial(cls, endpoint: Endpoint) -> RawConnection:
        context = ssl.create_default_context()
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        context.set_alpn_protocols(["h2"])
        reader, writer = await asyncio.open_connection(endpoint.host, endpoint.port, ssl=context)
        connection = cls(reader, writer)
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        connection._write(SETTINGS, 0, 0)
        return connection

    def open_stream(self, content: bytes) -> None:
        """Call the method and have this content sent on the new stream."""
        number = 2 * len(self._windows) + 1
        headers = {
            ":method": "POST",
            ":scheme": "https",
            ":path": METHOD,
            ":authority": "x",
            "te": "trailers",
            "content-type": "application/grpc",
        }
        # Literal header fields, never indexed, no Huffman coding (RFC 7541, 6.2.3).
        block = b"".join(
            b"\x10%c%b%c%b" % (len(name), name.encode(), len(value), value.encode())
            for name, value in headers.items()
        )
        self._windows[number] = self._first_window
        self._unsent[number] = content
        self._write(HEADERS, 4, number, block)

    async def send_all(self, seconds: float) -> None:
        """Send for so long, or until everything has left or was turned down."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._unsent:
                    self._send_what_fits()
                    await self._writer.drain()
                    await self._read()

    async def close(self) -> None:
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

    def _send_what_fits(self) -> None:
        for number, content in list(self._unsent.items()):
            sendable = min(len(content), self._windows[number], self._window)
            for start in range(0, sendable, FRAME_BYTES):
                part = content[start : min(start + FRAME_BYTES, sendable)]
                self._write(DATA, 0, number, part)
            self._windows[number] -= max(0, sendable)
            self._window -= max(0, sendable)
            self._unsent[number] = content[max(0, sendable) :]
            if not self._unsent[number]:
                del self._unsent[number]

    async def _read(self) -> None:
        head = await self._reader.readexactly(9)
        kind, flags = head[3], head[4]
        number = int.from_bytes(head[5:]) & 0x7FFFFFFF
        content = await self._reader.readexactly(int.from_bytes(head[:3]))
        if kind == SETTINGS and not flags & 1:
            for start in range(0, len(content), 6):
                name, value = struct.unpack_from(">HI", content, start)
                if name == 4:  # SETTINGS_INITIAL_WINDOW_SIZE
                    for stream in self._windows:
                        self._windows[stream] += value - self._first_window
                    self._first_window = value
            self._write(SETTINGS, 1, 0)
        elif kind == PING and not flags & 1:
            self._write(PING, 1, 0, content)
        elif kind == WINDOW_UPDATE and number:
            self._windows[number] += int.from_bytes(content)
        elif kind == WINDOW_UPDATE:
            self._window += int.from_bytes(content)
        elif kind == RESET or (kind == HEADERS and flags & 1):
            self._unsent.pop(number, None)

    def _write(self, kind: int, flags: int, number: int, content: bytes = b"") -> None:
        head = struct.pack(">I", len(content))[1:] + bytes([kind, flags])
        self._writer.write(head + struct.pack(">I", number) + content)


@pytest.mark.parametrize("num_bytes", [limits.MAX_FRAME_BYTES, MAX_MESSAGE_BYTES])
def test_messages_that_stop_before_their_end_take_little_memory(
    target: Target, num_bytes: int
) -> None:
    """Messages as large as a frame are no good any more, those as large as a piece are."""
    message = b"\0" + struct.pack(">I", num_bytes) + next(cut_frame(LARGEST)).ljust(num_bytes, b"x")

    async def test() -> None:
        before = target.memory_bytes
        connection = await RawConnection.dial(target.endpoint)
        for _ in range(NUM_STREAMS):
            connection.open_stream(message[:-1])
        await connection.send_all(10)

        # A window of 64 KiB and a piece for each, and what allocators take.
        assert target.memory_bytes - before < NUM_STREAMS * MIB // 2 + 16 * MIB
        await target.expect_service()
        await connection.close()

    asyncio.run(test())


def test_frames_that_stop_before_their_end_take_what_one_address_may_have(target: Target) -> None:
    *pieces, _ = cut_frame(LARGEST)

    async def send(channel: grpc.aio.Channel) -> None:
        call: Any = channel.stream_stream(METHOD)()
        for message in (*cut_frame(HELLO), *pieces):
            await call.write(message)
        await asyncio.Event().wait()

    async def test() -> None:
        before = target.memory_bytes
        certificate = await fetch_pinned_certificate(target.endpoint)
        options = (
            ("grpc.ssl_target_name_override", name_in(certificate)),
            ("grpc.use_local_subchannel_pool", 1),
        )
        credentials = grpc.ssl_channel_credentials(root_certificates=certificate)
        async with grpc.aio.secure_channel(
            str(target.endpoint), credentials, options=options
        ) as channel:
            sending = [asyncio.create_task(send(channel)) for _ in range(NUM_STREAMS)]
            await asyncio.wait(sending, timeout=10)

            # A quarter of 512 MiB; those that wait for room hold a window and two pieces each.
            assert target.memory_bytes - before < 220 * MIB
            await target.expect_service()
            for task in sending:
                task.cancel()
            await asyncio.wait(sending)

    asyncio.run(test())
