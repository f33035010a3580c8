"""The handler of incoming streams, which passes each to the service of the moment."""

import asyncio
import contextlib

from ...protocol.errors import ErrorCode, RefusedError, UnavailableError
from ...protocol.net.transport import Stream
from .answer_queue import encode_refusal
from .service import Service

_PATIENCE_SECONDS = 20.0
"""How long a stream waits for a service: as long as one may stay without a session. Loading may
take hours, and waiting costs a stranger nothing."""

_RETRY_SECONDS = 10.0


class StreamHandler:
    """Leads each stream to the service of the moment; while there is none, streams wait a while.

    So whoever dials while the last block is being loaded waits for it.
    """

    def __init__(self) -> None:
        self._opened: asyncio.Future[Service] = asyncio.Future()

    @property
    def service(self) -> Service:
        """The service of the moment; only while there is one."""
        return self._opened.result()

    def open(self, service: Service) -> None:
        """Let this service have the streams that wait, and those that come."""
        self._opened.set_result(service)

    def close(self) -> None:
        """Let streams that come wait for the next service."""
        if self._opened.done():
            self._opened = asyncio.Future()

    async def serve(self, stream: Stream) -> None:
        """Serve one stream until it ends, or tell it that there is nothing to be served yet.

        One that is offered outlives the service of the moment, on which nothing may hold then.
        """
        try:
            await self._serve_or_park(stream)
        except RefusedError as refusal:
            with contextlib.suppress(UnavailableError, TimeoutError):  # gone meanwhile
                async with asyncio.timeout(_RETRY_SECONDS):
                    await stream.send(encode_refusal(None, 0, refusal))

    async def _serve_or_park(self, stream: Stream) -> None:
        service = await self._wait_for_service(stream)
        if service is None:
            raise RefusedError(ErrorCode.BUSY, "the peer is loading its blocks", _RETRY_SECONDS)
        offer = await service.serve(stream)
        if offer is None:
            return
        parked = service.parked
        del service
        assert parked is not None  # or it would not have been taken
        await parked.keep(offer, stream)

    async def _wait_for_service(self, stream: Stream) -> Service | None:
        """Return the service that a stream is for; None once its end or its time has come."""
        opened = self._opened
        if not opened.done():
            ending = asyncio.create_task(stream.wait_over())
            try:
                await asyncio.wait(
                    {opened, ending},
                    timeout=_PATIENCE_SECONDS,
                    return_when=asyncio.FIRST_COMPLETED,
                )
            finally:
                ending.cancel()
                await asyncio.wait({ending})
        return opened.result() if opened.done() else None
