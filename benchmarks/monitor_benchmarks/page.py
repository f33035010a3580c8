"""The browser's time for the monitor's page of a large swarm: to show it, and for each update.

Announcements are renewed in a directory in memory, and one peer moves every ten seconds, so that
charts are drawn anew; all else is what ships. The times are the browser's own, from a trace of the
page's main thread. Needs Debian's chromium.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import tempfile
import time
from bisect import bisect_left
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from playwright.async_api import Browser, async_playwright

from measuring.crowd import Crowd
from measuring.program import measure_one, run_program
from measuring.report import TargetFigure, at_most
from monitor_benchmarks.swarm import MODEL, NUM_SPANS
from shoal.cli.benchmarking.figure import Figure
from shoal.cli.monitoring.page_server import serve_page
from shoal.client.monitor.collector import SwarmAccess
from shoal.client.monitor.history import History
from shoal.client.monitor.monitor import Monitor
from shoal.client.monitor.state import ProbeResult, SwarmState, reduce_probe, reduce_reading
from shoal.peer.operating.http_server import listen, name_url
from shoal.protocol.errors import UnavailableError
from shoal.protocol.net.clock import SystemClock
from shoal.protocol.net.directory import Directory
from shoal.protocol.net.memory.loopback import LoopbackNetwork, LoopbackTransport
from shoal.protocol.net.memory.memory_directory import MemoryDirectory, MemoryDirectoryStore
from shoal.protocol.net.tasks import cancel_all
from shoal.protocol.net.transport import Transport
from shoal.protocol.records.announcements import Announcement
from shoal.protocol.spans import Span

_CLOCK = SystemClock()
_DAY_SECONDS = 24 * 3600.0
_MINUTE_SECONDS = 60.0
_MOVE_SECONDS = 10.0
_CATEGORIES = ("disabled-by-default-devtools.timeline", "blink.user_timing")
_MARK = """
const listen = EventSource.prototype.addEventListener;
EventSource.prototype.addEventListener = function (kind, hear) {
  listen.call(this, kind, (event) => { performance.mark(`event ${kind}`); hear(event); });
};
"""
"""Marks in a trace where the page hears of the monitor."""

_UPDATE = "event view"


async def _keep_moving(crowd: Crowd) -> None:
    """Move one peer after the other by a block, until cancelled."""
    for number, span in enumerate(crowd.spans):
        await asyncio.sleep(_MOVE_SECONDS)
        crowd.spans[number] = Span(max(0, span.start - 1), span.stop - 1)
        crowd.renew(number)


def fill_history(history: History, announced: list[Announcement], now: float) -> None:
    """Fill a history with a day, in each minute of which one peer goes and another comes back."""
    state, rng = SwarmState(), random.Random(0)
    for minute in range(int(_DAY_SECONDS / _MINUTE_SECONDS), 0, -1):
        then = now - minute * _MINUTE_SECONDS
        gone = rng.randrange(len(announced))
        there = [
            replace(one, issued_at=then, expires_at=then + _MINUTE_SECONDS - 1)
            for number, one in enumerate(announced)
            if number != gone
        ]
        state, events = reduce_reading(state, MODEL.model_id, there, then)
        for peer in state.models[MODEL.model_id].peers.values():
            if peer.probe is None:
                answer = ProbeResult(then, rtt_seconds=0.01)
                state, _ = reduce_probe(state, MODEL.model_id, peer.announcement.peer_id, answer)
        history.take(state, events, then)


@asynccontextmanager
async def show_page(num_peers: int, folder: str) -> AsyncIterator[str]:
    """Watch a swarm and serve its page; yields the address."""
    store = MemoryDirectoryStore()
    crowd = Crowd(num_peers, MODEL, [store.records], lambda number: ("127.0.0.1", 1), NUM_SPANS)

    async def join(addresses: object) -> tuple[Transport, Directory]:
        return LoopbackTransport(LoopbackNetwork(0), "monitor"), MemoryDirectory(store, _CLOCK)

    async def probe(peer: Announcement, transport: object) -> ProbeResult:
        return ProbeResult(_CLOCK.wall(), rtt_seconds=0.0123)

    async with AsyncExitStack() as stack:
        await crowd.announce_all(stack)
        history = stack.enter_context(
            closing(History(Path(folder) / "history.sqlite", _DAY_SECONDS, _CLOCK.wall()))
        )
        announced = crowd.records.list_current(MODEL.model_id, _CLOCK.wall())
        fill_history(history, announced, _CLOCK.wall())
        listening = stack.enter_context(listen("127.0.0.1", 0, "--listen"))
        monitor = Monitor(SwarmAccess(_CLOCK, join, probe), history)
        tasks = [
            asyncio.create_task(serve_page(monitor, listening, "127.0.0.1", [])),
            asyncio.create_task(_keep_moving(crowd)),
        ]
        stack.push_async_callback(cancel_all, tasks)
        while sum(len(model.peers) for model in monitor.state.models.values()) < num_peers:
            await monitor.wait_for_change(monitor.revision)
        yield name_url(listening)


class Update(NamedTuple):
    """What the page's main thread did from one update to the next, in milliseconds."""

    ms: float
    cpu_ms: float
    """The processor's time in it; less where other programs run."""


def list_updates(trace: dict[str, Any]) -> list[Update]:
    """Return the updates in a trace of Chromium: tasks from each mark on.

    >>> of = {"pid": 1, "tid": 1}
    >>> task = {"name": "RunTask", "tdur": 400} | of
    >>> view = {"name": "event view"} | of
    >>> list_updates({"traceEvents": [
    ...     task | {"ts": 0, "dur": 9000}, view | {"ts": 10_000},
    ...     task | {"ts": 9_000, "dur": 5000}, task | {"ts": 20_000, "dur": 500},
    ...     view | {"ts": 30_000}, task | {"ts": 29_000, "dur": 2000}]})
    [Update(ms=5.5, cpu_ms=0.8), Update(ms=2.0, cpu_ms=0.4)]
    """
    events = trace["traceEvents"]
    views = [one for one in events if one["name"] == _UPDATE]
    if not views:
        raise UnavailableError("the page was not updated while it was traced")
    thread = views[0]["pid"], views[0]["tid"]
    tasks = sorted(
        (one["ts"], one["dur"], one["tdur"])
        for one in events
        if one["name"] == "RunTask" and (one["pid"], one["tid"]) == thread
    )
    ends = [start + duration for start, duration, _ in tasks]
    starts = sorted({bisect_left(ends, view["ts"]) for view in views})  # one task may hear of two
    updates = (tasks[start:stop] for start, stop in pairwise([*starts, len(tasks)]))
    return [
        Update(*(sum(task[which] for task in update) / 1000 for which in (1, 2)))
        for update in updates
        if update
    ]


async def measure(options: argparse.Namespace, say: Callable[[str], None]) -> list[Figure]:
    """Return how long a browser takes for the page, and for its updates."""
    chromium = shutil.which("chromium")
    if chromium is None:
        raise UnavailableError("Debian's chromium is not installed")
    say("making a day of history")
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        page = await stack.enter_async_context(show_page(options.peers, folder))
        playwright = await stack.enter_async_context(async_playwright())
        # Root has no sandbox.
        browser = await playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        stack.push_async_callback(browser.close)
        await _load(browser, page)  # the browser's own start
        say("loading")
        loads = [await _load(browser, page) for _ in range(options.loads)]
        say("tracing updates")
        updates = list_updates(await _trace(browser, page, options.seconds))
    return [
        Figure("peers in the table", options.peers, ""),
        Figure("page can be used, median", 1000 * median(loads), "ms"),
        TargetFigure("page can be used, longest", 1000 * max(loads), "ms", at_most(1500)),
        Figure("updates", len(updates), ""),
        Figure("one update, median", median(one.ms for one in updates), "ms"),
        TargetFigure("one update, longest", max(one.ms for one in updates), "ms", at_most(100)),
        Figure("processor time of one, longest", max(one.cpu_ms for one in updates), "ms"),
    ]


async def _load(browser: Browser, address: str) -> float:
    """Return the seconds until a new page has its charts and takes keys."""
    context = await browser.new_context()
    page = await context.new_page()
    started_at = time.perf_counter()
    await page.goto(address)
    await page.wait_for_selector(".depth canvas")
    await page.focus("input[name=lose]")
    seconds = time.perf_counter() - started_at
    await context.close()
    return seconds


async def _trace(browser: Browser, address: str, seconds: float) -> dict[str, Any]:
    context = await browser.new_context()
    page = await context.new_page()
    await page.add_init_script(_MARK)
    await page.goto(address)
    await page.wait_for_selector(".depth canvas")
    await page.wait_for_timeout(2000)  # the first charts are drawn
    await browser.start_tracing(page=page, categories=list(_CATEGORIES))
    await page.wait_for_timeout(1000 * seconds)
    trace = json.loads(await browser.stop_tracing())
    await context.close()
    return trace


def main() -> int:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", type=int, default=300)
    parser.add_argument("--loads", type=int, default=5, help="how often the page is loaded")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long updates are traced")
    title = "The monitor's page: {peers} peers, 80 blocks, a day of history"
    return measure_one("page", title, parser, lambda *given: asyncio.run(measure(*given)))


if __name__ == "__main__":
    run_program(main)
