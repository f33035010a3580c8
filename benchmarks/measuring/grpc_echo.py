"""A bare echo over gRPC and TLS in a process of its own: what a hop is compared with.

Run as a module by `start_echo`; prints where it listens and ends with stdin.
"""

import asyncio
import json
import os
import sys
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import uvloop

from measuring.helper_process import HelperProcess
from shoal.protocol.net.tcp.tls import COMMON_NAME, make_tls_identity

_SERVICE, _METHOD = "Echo", "Exchange"


def start_echo() -> HelperProcess:
    """Start the process; it says its port and its certificate."""
    return HelperProcess(__name__)


def _import_grpc() -> Any:
    # Not above: it writes to the terminal when the echo ends, unless it is told before its import.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    import grpc

    return grpc


@asynccontextmanager
async def open_echo(port: int, certificate_pem: str) -> AsyncGenerator[Any]:
    """Yield a gRPC call to the echo at a port: `await call.write(data)`, `await call.read()`."""
    grpc = _import_grpc()
    certificate = certificate_pem.encode()
    options = [("grpc.ssl_target_name_override", COMMON_NAME)]
    credentials = grpc.ssl_channel_credentials(root_certificates=certificate)
    channel = grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials, options=options)
    async with channel:
        call = channel.stream_stream(f"/{_SERVICE}/{_METHOD}")()
        yield call
        await call.done_writing()


async def _echo(requests: AsyncIterator[bytes], _: object) -> AsyncIterator[bytes]:
    async for request in requests:
        yield request


async def _serve() -> None:
    grpc = _import_grpc()
    identity = make_tls_identity()
    server = grpc.aio.server()
    handler = grpc.stream_stream_rpc_method_handler(_echo)
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler(_SERVICE, {_METHOD: handler})]
    )
    pair = (identity.private_key_pem, identity.certificate_pem)
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([pair]))
    await server.start()
    print(json.dumps([port, identity.certificate_pem.decode()]), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(None)


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve())
