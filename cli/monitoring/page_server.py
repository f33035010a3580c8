"""Serves the page of a monitor until it is told to end."""

from __future__ import annotations

import asyncio
import random
import signal
import socket
from collections.abc import Sequence

from ...client.monitor.monitor import Monitor
from ...client.monitor.page.app import MonitorPage
from ...peer.operating import http_server
from ...peer.placement.placement import Candidate, decide_placement
from ...peer.placement.supply import BlockRoom, Supply
from ...peer.process.config import (
    ANNOUNCEMENT_BYTES,
    PeerConfig,
    choose_adapter_bytes,
    choose_pass_bytes,
)
from ...protocol.ids import PeerId
from ...protocol.net.addresses import list_own_hosts
from ...protocol.net.tasks import cancel_all
from ...protocol.records.swarm_view import SwarmView
from ...protocol.spans import Span

_MAX_CONNECTIONS = 200

OTHER_BYTES = 3 * 2**29 + ANNOUNCEMENT_BYTES
"""What a peer leaves free, and keeps for messages and announcements: 1.7 GiB."""

_LOADED_BLOCKS = 4
"""A block in float32, as it is loaded, is as large as four in int8."""


def list_own_names(host: str) -> list[str]:
    """Return the names under which a page that listens at a host may be asked for.

    A page of another site could otherwise point its own name at this machine, and read what it
    gets.
    """
    return [
        "localhost",
        "127.0.0.1",
        "[::1]",
        *map(http_server.bracket, {host, socket.gethostname(), *list_own_hosts(host)}),
    ]


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
    page = MonitorPage(monitor, list_own_names(host), choose_place, count_room)
    watching = asyncio.create_task(monitor.run(addresses))
    serving = asyncio.create_task(http_server.serve_app(page.app, listening, _MAX_CONNECTIONS))
    try:
        await asyncio.wait([watching, serving], return_when=asyncio.FIRST_COMPLETED)
    finally:
        page.end()
        await cancel_all([serving, watching])
    for task in (watching, serving):
        if not task.cancelled():
            task.result()


def choose_place(view: SwarmView, num_blocks: int) -> Span | None:
    """Return where peers' own placement would send a newcomer with room for so many blocks."""
    supply = Supply.of_view(view)
    speed = supply.typical_blocks_per_second
    newcomer = Candidate(PeerId(""), BlockRoom(num_blocks), speed, load_seconds=0.0)
    return decide_placement(supply, newcomer, random.Random(0)).span


def count_room(free_bytes: int, block_bytes: int) -> int:
    """Return for how many blocks a machine with so much free memory has room.

    As `shoal serve` counts it where no option says anything of memory.
    """
    other_bytes = PeerConfig(model="").kv_budget_bytes + OTHER_BYTES
    other_bytes += choose_pass_bytes(free_bytes) + choose_adapter_bytes(free_bytes)
    left_bytes = free_bytes - other_bytes - _LOADED_BLOCKS * block_bytes
    return max(0, left_bytes // block_bytes)
