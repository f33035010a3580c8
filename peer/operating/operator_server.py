"""The gRPC services of a peer for its owner's tools: control, health and reflection.

This file and operator_client.py are the only ones that import grpc, and only `shoal serve` and the
commands that control peers import them.
"""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from ...protocol.errors import UsageError
from . import operator_pb2
from .control import PeerControl
from .operator_addresses import claim_socket
from .operator_config import TcpAccess

_WATCH_SECONDS = 1.0

_SERVICE = operator_pb2.DESCRIPTOR.services_by_name["Peer"]

_Context = grpc.aio.ServicerContext[Any, Any]


class _PeerServicer:
    """Carries out the methods of shoal.operator.v1.Peer, which it has by their names."""

    def __init__(self, control: PeerControl) -> None:
        self._control = control

    def _describe(self) -> operator_pb2.PeerDescription:
        return operator_pb2.PeerDescription(**self._control.describe())

    async def Describe(self, request: object, context: _Context) -> operator_pb2.PeerDescription:
        return self._describe()

    async def Watch(
        self, request: object, context: _Context
    ) -> AsyncIterator[operator_pb2.WatchReply]:
        with self._control.events.watch() as events:
            while True:
                told = [
                    operator_pb2.Event(time=time, name=event.name, facts=json.dumps(event.facts))
                    for time, event in events
                ]
                events.clear()
                yield operator_pb2.WatchReply(peer=self._describe(), events=told)
                await asyncio.sleep(_WATCH_SECONDS)

    async def SetLimits(
        self, request: operator_pb2.SetLimitsRequest, context: _Context
    ) -> operator_pb2.SetLimitsReply:
        changes = {field.name: value for field, value in request.limits.ListFields()}
        try:
            notes = self._control.set_limits(changes)
        except UsageError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        return operator_pb2.SetLimitsReply(peer=self._describe(), notes=notes)

    async def Drain(self, request: object, context: _Context) -> operator_pb2.PeerDescription:
        await self._control.drain()
        return self._describe()

    async def Resume(self, request: object, context: _Context) -> operator_pb2.PeerDescription:
        await self._control.resume()
        return self._describe()


class _HealthServicer(health_pb2_grpc.HealthServicer):
    """Tells under the empty name that the process runs, and under our service's whether it serves.

    Computed when it is asked for: the library's own servicer would have to be kept up to date.
    """

    def __init__(self, control: PeerControl) -> None:
        self._control = control

    def _find(self, service: str) -> int | None:
        status = health_pb2.HealthCheckResponse.ServingStatus
        if service not in ("", _SERVICE.full_name):
            return None
        is_well = not service or self._control.is_serving
        return status.SERVING if is_well else status.NOT_SERVING

    async def Check(self, request: Any, context: _Context) -> Any:
        status = self._find(request.service)
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no service {request.service!r:.80}")
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(self, request: Any, context: _Context) -> AsyncIterator[Any]:
        told = None
        while True:
            status = self._find(request.service)
            if status is None:
                status = health_pb2.HealthCheckResponse.ServingStatus.SERVICE_UNKNOWN
            if status != told:
                told = status
                yield health_pb2.HealthCheckResponse(status=status)
            await asyncio.sleep(_WATCH_SECONDS)


class _TokenCheck(grpc.aio.ServerInterceptor):
    """Refuses every call, of whatever service, that does not bring the token."""

    def __init__(self, token: str) -> None:
        self._expected = f"Bearer {token}".encode()

        async def refuse(request: object, context: _Context) -> None:
            detail = "the metadata has no `authorization: Bearer TOKEN` with this peer's token"
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, detail)

        self._refusal = grpc.unary_unary_rpc_method_handler(refuse)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        given = dict(handler_call_details.invocation_metadata or ()).get("authorization", "")
        given_bytes = given if isinstance(given, bytes) else given.encode()
        if hmac.compare_digest(given_bytes, self._expected):
            return await continuation(handler_call_details)
        return self._refusal


@asynccontextmanager
async def serve_operator(
    control: PeerControl, has_socket: bool, tcp: TcpAccess | None
) -> AsyncGenerator[list[str]]:
    """Serve the owner's tools while inside, on a Unix socket or over TCP, or both; yield where.

    Raises UsageError for an address or a name that cannot be used.
    """
    servers: list[grpc.aio.Server] = []
    addresses: list[str] = []
    async with AsyncExitStack() as stack:
        if has_socket:
            path = claim_socket(control.name)
            stack.callback(path.unlink, missing_ok=True)
            addresses.append(f"unix:{path}")
            servers.append(_make_server(control))
            stack.push_async_callback(servers[-1].stop, None)
            _bind(addresses[0], lambda: servers[0].add_insecure_port(addresses[0]))
            path.chmod(0o600)
        if tcp is not None:
            servers.append(_make_server(control, [_TokenCheck(tcp.token)]))
            stack.push_async_callback(servers[-1].stop, None)
            addresses.append(_bind_tls(servers[-1], tcp))
        for server in servers:
            await server.start()
        yield addresses


def _make_server(
    control: PeerControl, interceptors: Sequence[grpc.aio.ServerInterceptor] = ()
) -> grpc.aio.Server:
    # Two peers that share a port would get each other's calls.
    server = grpc.aio.server(interceptors=interceptors, options=[("grpc.so_reuseport", 0)])
    servicer = _PeerServicer(control)
    handlers = {
        method.name: (
            grpc.unary_stream_rpc_method_handler
            if method.server_streaming
            else grpc.unary_unary_rpc_method_handler
        )(
            getattr(servicer, method.name),
            request_deserializer=GetMessageClass(method.input_type).FromString,
            response_serializer=GetMessageClass(method.output_type).SerializeToString,
        )
        for method in _SERVICE.methods
    }
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(_SERVICE.full_name, handlers),)
    )
    health_pb2_grpc.add_HealthServicer_to_server(_HealthServicer(control), server)
    health = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
    reflection.enable_server_reflection(
        (_SERVICE.full_name, health, reflection.SERVICE_NAME), server
    )
    return server


def _bind_tls(server: grpc.aio.Server, tcp: TcpAccess) -> str:
    """Listen over TLS; return the address, with the port where any was asked for."""
    credentials = grpc.ssl_server_credentials([(tcp.key, tcp.certificate)])
    port = _bind(tcp.address, lambda: server.add_secure_port(tcp.address, credentials))
    return f"{tcp.address.rpartition(':')[0]}:{port}"


def _bind(address: str, add_port: Callable[[], int]) -> int:
    try:
        return add_port()
    except RuntimeError as error:
        raise UsageError(
            f"cannot listen for the owner's tools at {address}: it is in use, or no address of "
            "this machine"
        ) from error
