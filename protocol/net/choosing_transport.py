"""One transport out of two: what a stream travels over is for its endpoint to say."""

from ..endpoints import Endpoint, Libp2pEndpoint
from .transport import Lane, Listener, Stream, StreamServer, Transport


class ChoosingTransport:
    """Dials and listens directly, and dials through libp2p where an endpoint asks for it."""

    def __init__(self, direct: Transport, libp2p: Transport) -> None:
        self._direct = direct
        self._libp2p = libp2p

    def __repr__(self) -> str:
        return f"ChoosingTransport({self._direct!r}, {self._libp2p!r})"

    async def listen(self, host: str, port: int, serve: StreamServer) -> Listener:
        return await self._direct.listen(host, port, serve)

    async def open_stream(
        self, endpoint: Endpoint, lane: Lane = Lane.INTERACTIVE, timeout_seconds: float = 5.0
    ) -> Stream:
        chosen = self._libp2p if isinstance(endpoint, Libp2pEndpoint) else self._direct
        return await chosen.open_stream(endpoint, lane, timeout_seconds)

    async def close(self) -> None:
        await self._libp2p.close()
        await self._direct.close()
