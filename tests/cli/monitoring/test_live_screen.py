"""`shoal top` on a terminal that textual makes: what it shows of a swarm in memory."""

from __future__ import annotations

import asyncio
from contextlib import closing
from typing import Any

import pytest
from announcements import identity_of, make_announcement, sign
from textual.pilot import Pilot
from textual.widgets import DataTable, Static

from shoal.cli.main import main
from shoal.cli.monitoring.live_screen import LiveScreen
from shoal.client.monitor.collector import SwarmAccess
from shoal.client.monitor.history import History
from shoal.client.monitor.monitor import Monitor
from shoal.client.monitor.state import ProbeResult
from shoal.protocol.ids import ModelId
from shoal.protocol.net.clock import SystemClock
from shoal.protocol.net.directory import Directory
from shoal.protocol.net.memory.loopback import LoopbackNetwork, LoopbackTransport
from shoal.protocol.net.memory.memory_directory import MemoryDirectory, MemoryDirectoryStore
from shoal.protocol.net.transport import Transport
from shoal.protocol.records.announcements import Announcement
from shoal.protocol.spans import Span

CLOCK = SystemClock()
PATIENCE_SECONDS = 30.0
FAULT = "closed port: nobody answers at 10.0.0.9:1 \x1b]52;c;aGk=\x07[/red]"


async def tell(
    directory: MemoryDirectory, number: int, span: Span, sequence: int = 1, **changes: Any
) -> None:
    facts = {"span": span, "sequence": sequence, "model_name": "org/model"} | changes
    announcement = make_announcement(number, CLOCK.wall(), **facts)
    await directory.announce(sign(announcement, number))


async def wait_for(pilot: Pilot[None], text: str) -> None:
    """Wait until the lines above the table hold a text."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while text not in read(pilot, "#health"):
            await pilot.pause(0.05)


def read(pilot: Pilot[None], part: str) -> str:
    return str(pilot.app.query_one(part, Static).content)


def read_rows(pilot: Pilot[None]) -> list[list[str]]:
    table = pilot.app.query_one(DataTable)
    return [list(map(str, table.get_row_at(index))) for index in range(table.row_count)]


async def test_screen_follows_a_swarm_and_ends_when_asked() -> None:
    directory = MemoryDirectory(MemoryDirectoryStore(), CLOCK)
    await tell(directory, 1, Span(0, 8))
    await tell(directory, 2, Span(0, 4))
    await tell(directory, 3, Span(0, 8))

    async def join(addresses: object) -> tuple[Transport, Directory]:
        return LoopbackTransport(LoopbackNetwork(0), "monitor"), directory

    async def probe(peer: Announcement, transport: object) -> ProbeResult:
        is_there = peer.peer_id != identity_of(3).peer_id
        return (
            ProbeResult(CLOCK.wall(), rtt_seconds=0.0123)
            if is_there
            else ProbeResult(CLOCK.wall(), FAULT)
        )

    with closing(History(None, 0.0, CLOCK.wall())) as history:
        monitor = Monitor(SwarmAccess(CLOCK, join, probe), history, read_seconds=0.05)
        async with LiveScreen(monitor, []).run_test(size=(100, 24)) as pilot:
            await wait_for(pilot, "DEGRADED")
            assert "org/model: 8 blocks; 2 peers; single 4:8" in read(pilot, "#health")
            assert [row[1] for row in read_rows(pilot)] == ["0:4", "0:8", "0:8"]
            assert [row[2] for row in read_rows(pilot)] == ["online", "online", "unconfirmed"]

            await tell(directory, 2, Span(4, 8), sequence=2)
            await wait_for(pilot, "single 0:4")
            assert "moved" in read(pilot, "#events")
            await pilot.press("s")
            assert [row[1] for row in read_rows(pilot)] == ["0:8", "0:8", "4:8"]

            await tell(directory, 4, Span(0, 8), model_id=ModelId("b" * 32), model_name="org/other")
            await wait_for(pilot, "org/other")
            assert {row[0] for row in read_rows(pilot)} == {"org/model", "org/other"}
            await pilot.press("q")


def test_screen_needs_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--initial-peers", "x"]) == 2

    assert "`shoal monitor --once` prints the state" in capsys.readouterr().err
