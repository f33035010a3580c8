"""Where streams come in, whatever the peer serves at that moment."""

import asyncio

from ..protocol.net.transport import Stream
from .service import Service


class Door:
    """Leads each stream to the service of the moment; while there is none, streams wait.

    So whoever dials while blocks are being loaded waits for them.
    """

    def __init__(self) -> None:
        self._opened: asyncio.Future[Service] = asyncio.Future()

    def open(self, service: Service) -> None:
        """Let this service have the streams that wait, and those that come."""
        self._opened.set_result(service)

    def close(self) -> None:
        """Let streams that come wait for the next service."""
        if self._opened.done():
            self._opened = asyncio.Future()

    async def serve(self, stream: Stream) -> None:
        """Serve one stream until it ends."""
        service = await asyncio.shield(self._opened)
        await service.serve(stream)
