"""A transport that counts bytes and keeps the last frame of each direction, to measure with."""

from shoal.protocol.endpoints import Endpoint
from shoal.protocol.identity import Identity
from shoal.protocol.net.directory import Directory
from shoal.protocol.net.network import Network, Presence
from shoal.protocol.net.transport import FrameGate, Listener, Stream, StreamServer, Transport


class WatchedNetwork:
    """Joins over another network."""

    transport: "WatchedTransport"
    """There once a client has joined."""

    def __init__(self, inner: Network) -> None:
        self._inner = inner

    async def connect(self) -> tuple[Transport, Directory]:
        transport, directory = await self._inner.connect()
        self.transport = WatchedTransport(transport)
        return self.transport, directory

    async def serve(self, identity: Identity, serve: StreamServer) -> Presence:
        return await self._inner.serve(identity, serve)


class WatchedTransport:
    """Carries everything over another transport."""

    def __init__(self, inner: Transport) -> None:
        self._inner = inner
        self.last_sent = b""
        self.last_received = b""
        self.num_bytes = 0
        """Of all frames, in both directions."""

    async def listen(self, host: str, port: int, serve: StreamServer) -> Listener:
        return await self._inner.listen(host, port, serve)

    async def open_stream(self, endpoint: Endpoint, timeout_seconds: float = 5.0) -> Stream:
        return _WatchedStream(self, await self._inner.open_stream(endpoint, timeout_seconds))

    async def close(self) -> None:
        await self._inner.close()


class _WatchedStream:
    def __init__(self, transport: WatchedTransport, inner: Stream) -> None:
        self._transport = transport
        self._inner = inner

    @property
    def remote_host(self) -> str | None:
        return self._inner.remote_host

    def set_gate(self, gate: FrameGate) -> None:
        self._inner.set_gate(gate)

    async def wait_over(self) -> None:
        await self._inner.wait_over()

    async def send(self, frame: bytes) -> None:
        self._transport.last_sent = frame
        self._transport.num_bytes += len(frame)
        await self._inner.send(frame)

    async def receive(self) -> bytes | None:
        frame = await self._inner.receive()
        self._transport.last_received = frame or b""
        self._transport.num_bytes += len(frame or b"")
        return frame

    async def close(self) -> None:
        await self._inner.close()
