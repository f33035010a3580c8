"""Serves the page of a monitor until it is told to end."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import socket
from collections.abc import Generator, Sequence

import uvicorn

from ...client.monitor.monitor import Monitor
from ...client.monitor.page.app import Page
from ...peer.placement.placement import Candidate, decide_placement
from ...peer.placement.supply import Room, Supply
from ...protocol.endpoints import Endpoint
from ...protocol.errors import UsageError
from ...protocol.ids import PeerId
from ...protocol.net.addresses import list_own_hosts
from ...protocol.net.tasks import cancel_all
from ...protocol.records.swarm_view import SwarmView
from ...protocol.spans import Span

_MAX_CONNECTIONS = 200


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that accepts connections; raises UsageError where it cannot."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        address = Endpoint(host, port)
        raise UsageError(
            f"cannot listen at {address}: {error.strerror}; choose another one with --listen"
        ) from error


def name_page(listening: socket.socket) -> str:
    """Return the address of the page for a browser on this machine."""
    host, port = listening.getsockname()[:2]
    shown = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(str(host), str(host))
    return f"http://{_bracket(str(shown))}:{port}/"


def list_own_names(host: str) -> list[str]:
    """Return the names under which a page that listens at a host may be asked for.

    A page of another site could otherwise point its own name at this machine, and read what it
    gets.
    """
    return [
        "localhost",
        "127.0.0.1",
        "[::1]",
        *map(_bracket, {host, socket.gethostname(), *list_own_hosts(host)}),
    ]


def _bracket(host: str) -> str:
    return f"[{host}]" if ":" in host else host


class _Server(uvicorn.Server):
    """Leaves signals to us: streams of events have to end first."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


async def serve_until_signalled(
    monitor: Monitor, listening: socket.socket, host: str, addresses: Sequence[str]
) -> None:
    """Serve the page until Ctrl-C, SIGTERM or the end of the terminal."""
    serving = asyncio.create_task(serve_page(monitor, listening, host, addresses))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, serving.cancel)
    await asyncio.wait([serving])
    if not serving.cancelled():
        serving.result()


async def serve_page(
    monitor: Monitor, listening: socket.socket, host: str, addresses: Sequence[str]
) -> None:
    """Watch the swarm and serve the page, under the names of a host, until cancelled."""
    page = Page(monitor, list_own_names(host), choose_place)
    server = _Server(
        uvicorn.Config(
            page.app,
            log_config=None,
            log_level="error",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=_MAX_CONNECTIONS,
            timeout_graceful_shutdown=2,
            lifespan="off",
            ws="none",
        )
    )

    def stop() -> None:
        page.end()
        server.should_exit = True

    watching = asyncio.create_task(monitor.run(addresses))
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    try:
        await asyncio.wait([watching, serving], return_when=asyncio.FIRST_COMPLETED)
    finally:
        stop()
        try:
            await serving
        finally:
            await cancel_all([watching])
    if not watching.cancelled():
        watching.result()


def choose_place(view: SwarmView, num_blocks: int) -> Span | None:
    """Return where peers' own placement would send a newcomer with room for so many blocks."""
    supply = Supply.of_view(view)
    speed = supply.typical_blocks_per_second
    newcomer = Candidate(PeerId(""), Room(num_blocks), speed, load_seconds=0.0)
    return decide_placement(supply, newcomer, random.Random(0)).span
