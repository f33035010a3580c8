"""The listening half of the gRPC transport: a server of one method, and the streams it accepts."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import grpc

from ..endpoints import Endpoint
from ..errors import ShoalError, UnavailableError
from .addresses import host_in
from .stream_end import StreamEnd
from .transport import StreamServer

log = logging.getLogger(__name__)

SERVICE = "shoal.v1.Peer"
METHOD = "Exchange"
# gRPC reports "headers received" for a call that failed at once, too; this header is the proof
# that our method runs at the other end.
ACCEPTED = (("shoal-accepted", "1"),)

EOF: object = grpc.aio.EOF  # type: ignore[attr-defined]  # missing in the type stubs

_LAST_WORDS_SECONDS = 1.0
"""How long the servers of broken streams may clean up before they are cancelled."""

_ORDERLY_SECONDS = 0.05
"""gRPC ends the messages of a vanished client like those of one that closed, and cancels the call
in the same breath. This long we listen for the cancellation before we believe in good order."""


class GrpcListener:
    """A gRPC server and the tasks that serve its streams."""

    def __init__(self, server: grpc.aio.Server, endpoint: Endpoint, serve: StreamServer) -> None:
        self._server = server
        self._endpoint = endpoint
        self._serve = serve
        self._tasks: set[asyncio.Task[None]] = set()
        handler: Any = grpc.stream_stream_rpc_method_handler(self._exchange)
        server.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler})]
        )

    @property
    def endpoint(self) -> Endpoint:
        return self._endpoint

    async def start(self) -> None:
        await self._server.start()

    async def close(self, grace_seconds: float = 0.0) -> None:
        await self._server.stop(grace_seconds or None)
        tasks = self._tasks - {asyncio.current_task()}
        if tasks:
            await asyncio.wait(tasks, timeout=_LAST_WORDS_SECONDS)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_LAST_WORDS_SECONDS)

    async def _exchange(self, _: object, context: Any) -> None:
        """Be the gRPC method: ends when the stream is closed here, broken, or cancelled there."""
        await context.send_initial_metadata(ACCEPTED)
        stream = _AcceptedStream(context)
        # A task of its own: gRPC cancels this one when the client vanishes, and whoever serves
        # the stream shall learn it from the stream.
        task = asyncio.create_task(self._serve_stream(stream), name=f"serve {context.peer()}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            await stream.wait_over()
        except asyncio.CancelledError:
            stream.break_off("the other end went away")
            raise
        if stream.is_broken:
            await context.abort(grpc.StatusCode.ABORTED, "the stream was broken off")

    async def _serve_stream(self, stream: _AcceptedStream) -> None:
        try:
            await self._serve(stream)
        except ShoalError as error:
            log.debug("a stream at %s ended: %s", self._endpoint, error)
            stream.break_off(str(error))
        except Exception:
            log.exception("serving a stream at %s failed", self._endpoint)
            stream.break_off("serving it failed")
        finally:
            await stream.close()


class _AcceptedStream(StreamEnd):
    """The listener's end."""

    def __init__(self, context: Any) -> None:
        super().__init__()
        self.remote_host = host_in(context.peer())
        self._context = context

    async def close(self) -> None:
        self.end()
        await self.stop_reading()

    async def _read(self) -> bytes | None:
        try:
            message = await self._context.read()
        except grpc.aio.BaseError as error:
            raise UnavailableError("the other end went away") from error
        if message is not EOF:
            return message
        await asyncio.wait({self._over}, timeout=_ORDERLY_SECONDS)
        if self._fault is not None:
            raise self._fault
        return None

    async def _write(self, message: bytes) -> None:
        try:
            await self._context.write(message)
        except grpc.aio.BaseError as error:
            raise UnavailableError("the other end went away") from error
