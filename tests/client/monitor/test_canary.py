"""Canaries: what their runs tell, and processes that answer, hang, end, or say something else."""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import closing
from dataclasses import replace

import pytest
from announcements import MODEL, NOW
from hand_clock import HandClock
from virtual_time import VirtualClock, run_virtual

from shoal.client.monitor.canary import (
    CanaryHop,
    CanaryProcess,
    CanaryRun,
    CanaryState,
    keep_running,
    read_answer,
    reduce_run,
)
from shoal.client.monitor.collector import SwarmAccess
from shoal.client.monitor.history import History
from shoal.client.monitor.monitor import Monitor
from shoal.client.monitor.state import EventKind, ProbeResult
from shoal.protocol.errors import DirectoryError
from shoal.protocol.ids import PeerId
from shoal.protocol.net.directory import Directory
from shoal.protocol.net.transport import Transport
from shoal.protocol.records.announcements import Announcement

pytestmark = pytest.mark.real_loop  # of processes

GOOD = CanaryRun(NOW, MODEL, first_token_seconds=0.5, tokens_per_second=8.0, text=", there was")
BAD = CanaryRun(NOW, MODEL, "no peer serves blocks 4:8")
OTHER = replace(GOOD, text=", there were")
HOP = CanaryHop(PeerId("12D3Koo"), "0:4", 0.001, 0.02, 0.003)
ANSWER = {
    "model_id": MODEL,
    "first_token_seconds": 0.5,
    "tokens_per_second": 8.0,
    "text": ", there was",
}


@pytest.mark.parametrize(
    ("runs", "kinds"),
    [
        ([GOOD, GOOD], []),
        ([BAD, BAD], [EventKind.CANARY_FAILED]),
        ([GOOD, BAD, GOOD], [EventKind.CANARY_FAILED, EventKind.CANARY_RECOVERED]),
        ([GOOD, OTHER, OTHER, GOOD], [EventKind.CANARY_DIFFERS]),
        ([BAD, OTHER, OTHER], [EventKind.CANARY_FAILED, EventKind.CANARY_RECOVERED]),
    ],
)
def test_what_changes_from_run_to_run_is_an_event(
    runs: list[CanaryRun], kinds: list[EventKind]
) -> None:
    state, told = CanaryState("model"), list[EventKind]()

    for run in runs:
        state, events = reduce_run(state, run, 8)
        told += (event.kind for event in events)

    assert told == kinds
    assert (state.num_runs, state.num_failed) == (len(runs), runs.count(BAD))


def make_process(program: str, deadline: float = 60.0) -> CanaryProcess:
    command = [sys.executable, "-c", program]
    return CanaryProcess("model", command, {"join": "x"}, HandClock(NOW), (deadline, deadline))


async def test_process_is_asked_for_each_run_and_keeps_its_settings() -> None:
    answer = ANSWER | {"hops": [vars(HOP)]}
    canary = make_process(
        "import json, sys\n"
        "settings = json.loads(sys.stdin.readline())\n"
        f"for line in sys.stdin: print(json.dumps({answer!r} | {{'text': settings['join']}}),"
        " flush=True)"
    )

    runs = [await canary.run() for _ in range(2)]

    assert runs == [replace(GOOD, text="x", hops=(HOP,))] * 2
    await canary.close()


async def test_process_that_hangs_is_ended_and_started_again() -> None:
    canary = make_process("import sys, time\nfor line in sys.stdin: time.sleep(1000)", 0.2)

    for _ in range(2):
        run = await canary.run()
        assert run == CanaryRun(NOW, run.model_id, "it took longer than 0.2 s")


@pytest.mark.parametrize(
    ("program", "error"),
    [
        ("raise SystemExit(7)", "its process ended with exit code 7"),
        ("print('[]')", "its process cannot be used: it said b'[]"),
        ("print('x' * 100000)", "its process cannot be used: "),
        ('print(\'{"text": 3, "os": 4}\')', "its process cannot be used: it said "),
    ],
    ids=["ends", "no answer", "too long", "other fields"],
)
async def test_process_that_cannot_be_used_is_a_failed_run(program: str, error: str) -> None:
    canary = make_process(program)

    run = await canary.run()

    assert run.error.startswith(error)
    await canary.close()


async def test_program_that_is_not_there_is_a_failed_run() -> None:
    canary = CanaryProcess("model", ["/nothing/here"], {}, HandClock(NOW))

    assert "its process cannot be used" in (await canary.run()).error


class _Instant(CanaryProcess):
    """Needs no process and no time."""

    def __init__(self) -> None:
        super().__init__("model", [], {}, VirtualClock())

    async def run(self) -> CanaryRun:
        return GOOD


def test_canaries_run_every_minute_and_at_once_when_a_peer_is_lost() -> None:
    async def list_times(*losses: float) -> list[float]:
        clock, times, has_lost = VirtualClock(), list[float](), asyncio.Event()
        asyncio.get_running_loop().call_later(150.0, lambda: running.cancel())
        for seconds in losses:
            asyncio.get_running_loop().call_later(seconds, has_lost.set)
        running = asyncio.create_task(
            keep_running([_Instant()], lambda *run: times.append(clock.now()), has_lost, clock)
        )
        await asyncio.wait([running])
        return times

    assert run_virtual(list_times()) == [0.0, 60.0, 120.0]
    assert run_virtual(list_times(5.0, 30.0, 70.0)) == [0.0, 10.0, 30.0, 70.0, 130.0]


def test_long_text_is_cut() -> None:
    assert len(read_answer(json.dumps(ANSWER | {"text": "x" * 9999}).encode(), NOW).text) == 200


async def test_monitor_keeps_and_describes_runs() -> None:
    async def join(addresses: object) -> tuple[Transport, Directory]:
        raise DirectoryError("nobody answers")

    async def probe(peer: Announcement, transport: object) -> ProbeResult:
        raise AssertionError

    clock = HandClock(NOW)
    canary = make_process(f"import json\nprint(json.dumps({ANSWER!r}))\ninput()\ninput()\ninput()")
    with closing(History(None, 3600.0, NOW)) as history:
        monitor = Monitor(SwarmAccess(clock, join, probe), history, canaries=[canary])
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(monitor.run([]))
            while not (runs := await monitor.read(lambda one: one.list_canary_runs("model", NOW))):
                await monitor.wait_for_change(monitor.revision)
            watching.cancel()

        (panel,) = monitor.describe().canaries
        assert (panel.text, panel.is_same, panel.health) == (GOOD.text, True, "healthy")
        assert runs == [GOOD]
        assert history.load_canary("model").first_text == GOOD.text
