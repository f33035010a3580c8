"""Serves an ASGI application on the event loop of a process, beside its work."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Generator

import uvicorn
from starlette.types import ASGIApp

from ...protocol.endpoints import Endpoint
from ...protocol.errors import UsageError


def listen(host: str, port: int, option: str) -> socket.socket:
    """Return a socket that accepts connections; raises UsageError where it cannot.

    The `option` is where its user chose the address.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        reason = str(error.strerror).partition(" (while")[0]  # Python adds the address
        raise UsageError(
            f"cannot listen at {Endpoint(host, port)}: {reason}; choose another address with "
            f"{option}"
        ) from error


def name_url(listening: socket.socket) -> str:
    """Return the address of what is served there, for this machine."""
    host, port = listening.getsockname()[:2]
    shown = str({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(str(host), host))
    return f"http://{bracket(shown)}:{port}/"


def bracket(host: str) -> str:
    """Return a host as it stands in an address.

    >>> bracket("::1"), bracket("localhost")
    ('[::1]', 'localhost')
    """
    return f"[{host}]" if ":" in host else host


class _Server(uvicorn.Server):
    """Leaves signals to us: what else goes on has to end in good order."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


async def serve_app(
    app: ASGIApp, listening: socket.socket, max_connections: int, keep_alive_seconds: int = 5
) -> None:
    """Serve an application until cancelled; what is under way has two seconds then.

    A connection without a request is closed after `keep_alive_seconds`.
    """
    config = uvicorn.Config(
        app,
        log_config=None,
        log_level="error",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=max_connections,
        timeout_keep_alive=keep_alive_seconds,
        timeout_graceful_shutdown=2,
        lifespan="off",
        ws="none",
    )
    server = _Server(config)
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    try:
        await asyncio.shield(serving)
    finally:
        server.should_exit = True
        await serving
