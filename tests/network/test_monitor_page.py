"""The monitor's page in a browser, as a person sees it: a swarm in each state of health.

The swarm is a directory in memory whose announcements the tests make; all else is what ships.
"""

from __future__ import annotations

import asyncio
import re
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest
from announcements import identity_of, make_announcement, sign

from shoal.cli.monitoring.page_server import serve_page
from shoal.client.monitor.canary import CanaryProcess
from shoal.client.monitor.collector import SwarmAccess
from shoal.client.monitor.history import History
from shoal.client.monitor.monitor import Monitor
from shoal.client.monitor.state import ProbeResult
from shoal.peer.operating.http_server import listen, name_url
from shoal.protocol.errors import DirectoryError
from shoal.protocol.ids import ModelId
from shoal.protocol.net.clock import SystemClock
from shoal.protocol.net.directory import Directory
from shoal.protocol.net.memory.loopback import LoopbackNetwork, LoopbackTransport
from shoal.protocol.net.memory.memory_directory import MemoryDirectory, MemoryDirectoryStore
from shoal.protocol.net.transport import Transport
from shoal.protocol.records.announcements import Announcement, PeerState, TrainingProgress
from shoal.protocol.spans import Span

CHROMIUM = shutil.which("chromium")
if CHROMIUM is None:
    pytest.skip("Debian's chromium is not installed", allow_module_level=True)

from axe_playwright_python.sync_playwright import Axe  # noqa: E402
from playwright.sync_api import Browser, Page, expect, sync_playwright  # noqa: E402

pytestmark = [pytest.mark.network, pytest.mark.slow]

PATIENCE_SECONDS = 60.0
HTML = "<img src=x onerror=document.title='bad'>"
SHORT_HTML = "<img src=x onerror=alert(1)>"
"""No longer than a name may be."""
CLOCK = SystemClock()


class Stage(MemoryDirectory):
    """A swarm whose peers are announced by hand, and the monitor that watches it."""

    def __init__(self) -> None:
        super().__init__(MemoryDirectoryStore(), CLOCK)
        self.is_silent = False
        self.has_full_disk = False
        self.canaries = list[CanaryProcess]()
        self._sequence = 0
        self._loop = asyncio.new_event_loop()
        self._listening = listen("127.0.0.1", 0, "--listen")
        self.page = name_url(self._listening)
        self._serving: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._run(),))

    def __enter__(self) -> Stage:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        assert self._serving is not None
        self._loop.call_soon_threadsafe(self._serving.cancel)
        self._thread.join()
        self._loop.close()
        self._listening.close()

    async def _run(self) -> None:
        with closing(History(None, 3600.0, CLOCK.wall())) as history:
            if self.has_full_disk:
                history._database.execute("PRAGMA query_only = ON")
            access = SwarmAccess(CLOCK, self._join, self._probe)
            monitor = Monitor(access, history, read_seconds=0.1, canaries=self.canaries)
            self._serving = asyncio.create_task(
                serve_page(monitor, self._listening, "127.0.0.1", [])
            )
            await asyncio.wait([self._serving])

    async def _join(self, addresses: object) -> tuple[Transport, Directory]:
        return LoopbackTransport(LoopbackNetwork(0), "monitor"), self

    async def _probe(self, peer: Announcement, transport: object) -> ProbeResult:
        return ProbeResult(CLOCK.wall(), rtt_seconds=0.0123)

    def tell(self, number: int, start: int, stop: int, **changes: Any) -> None:
        """Announce what a peer serves from now on, of 8 blocks."""
        self._sequence += 1
        facts = {"span": Span(start, stop), "sequence": self._sequence, "model_name": "org/model"}
        announcement = make_announcement(number, CLOCK.wall(), **(facts | changes))
        announcing = self.announce(sign(announcement, number))
        asyncio.run_coroutine_threadsafe(announcing, self._loop).result(PATIENCE_SECONDS)

    async def lookup(self, model_id: ModelId, max_age_seconds: float = 0.0) -> list[Announcement]:
        self._check_speaks()
        return await super().lookup(model_id)

    async def list_models(self) -> list[ModelId]:
        self._check_speaks()
        return await super().list_models()

    def _check_speaks(self) -> None:
        if self.is_silent:
            raise DirectoryError("nobody answers")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        # Root has no sandbox.
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def stage() -> Iterator[Stage]:
    with Stage() as stage:
        yield stage


OTHER = ModelId("b" * 32)
CANARY = """
import json, sys
hop = {"peer_id": "12D3Koo", "span": "0:8", "queue_seconds": 0.001, "compute_seconds": 0.02,
    "network_seconds": 0.003}
for _ in sys.stdin:
    print(json.dumps({"model_id": "", "text": "<b>", "first_token_seconds": 0.25,
        "tokens_per_second": 8.5, "hops": [hop], "failovers": ["…abc[4:8] is gone"]}), flush=True)
"""


@contextmanager
def open_page(browser: Browser, stage: Stage, width: int, scheme: Any = "light") -> Iterator[Page]:
    """Open the page; nothing may be complained of in the browser's console, or asked of others."""
    complaints = list[str]()
    context = browser.new_context(
        viewport={"width": width, "height": 900}, color_scheme=scheme, reduced_motion="reduce"
    )
    context.set_default_timeout(1000 * PATIENCE_SECONDS)
    page = context.new_page()
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda one: complaints.extend(_foreign(one.url, stage.page)))
    try:
        page.goto(stage.page)
        yield page
    finally:
        context.close()
    assert complaints == []


def _foreign(url: str, page: str) -> list[str]:
    return [] if url.startswith((page, "data:")) else [url]


def expect_text(page: Page, text: str) -> None:
    expect(page.locator("body")).to_contain_text(text, timeout=1000 * PATIENCE_SECONDS)


WAIT_FOR_LAST_ROW = """(isLaidOut) => new Promise((tell) => {
  const cell = document.querySelector("table.peers tbody tr:last-child td");
  const look = (numFrames) => {
    const isSo = cell.checkVisibility({ contentVisibilityAuto: true }) === isLaidOut;
    if (isSo || numFrames === 0) tell(isSo);
    else requestAnimationFrame(() => look(numFrames - 1));
  };
  look(300);
})"""


WAIT_FOR_CHART_OF = """async (mode) => {
  for (let numFrames = 0; numFrames < 3600; numFrames++) {
    const chart = echarts.getInstanceByDom(document.querySelector(".chart.depth"));
    if (chart?.getOption()?.darkMode === mode) return true;
    await new Promise(requestAnimationFrame);
  }
  return false;
}"""


def announce_degraded(stage: Stage) -> None:
    stage.tell(1, 0, 8)
    stage.tell(2, 0, 4)


@pytest.mark.parametrize(("width", "scheme"), [(1440, "light"), (375, "dark")])
def test_page_is_usable_by_everybody(
    browser: Browser, stage: Stage, width: int, scheme: str
) -> None:
    announce_degraded(stage)
    with open_page(browser, stage, width, scheme) as page:
        expect_text(page, "Blocks 4:8 have a single replica.")
        expect(page.locator(".chart canvas")).to_have_count(2)

        violations = Axe().run(page).response["violations"]

        assert [(one["id"], one["impact"]) for one in violations] == []
        wider = page.evaluate("document.documentElement.scrollWidth - innerWidth")
        assert wider <= 0
        page.keyboard.press("Tab")
        reached = [page.evaluate("document.activeElement.className || document.activeElement.name")]
        for _ in range(3):
            page.keyboard.press("Tab")
            reached.append(page.evaluate("document.activeElement.name"))
        assert reached[0] == "scroll"
        assert reached[1:3] == ["lose", "room"]


def test_charts_follow_the_colours_of_the_system(browser: Browser, stage: Stage) -> None:
    announce_degraded(stage)
    with open_page(browser, stage, 1440) as page:
        expect(page.locator(".chart canvas")).to_have_count(2)
        assert page.evaluate(WAIT_FOR_CHART_OF, "auto")

        page.emulate_media(color_scheme="dark")

        assert page.evaluate(WAIT_FOR_CHART_OF, True)
        expect(page.locator(".chart canvas")).to_have_count(2)


def test_page_follows_the_swarm_without_being_loaded_again(browser: Browser, stage: Stage) -> None:
    stage.tell(1, 0, 8)
    stage.tell(2, 0, 8)
    with open_page(browser, stage, 1440) as page:
        expect_text(page, "Every block of every model has two replicas or more.")
        page.evaluate("window.isSame = true")

        stage.tell(2, 4, 8)
        expect_text(page, "Blocks 0:4 have a single replica.")
        row = page.locator(f"tr[data-id='{identity_of(2).peer_id}']")
        expect(row).to_contain_text("4:8")
        expect_text(page, "moved …")
        stage.tell(1, 0, 8, state=PeerState.OFFLINE)
        expect_text(page, "No peer serves blocks 0:4.")
        expect(page.locator("#health")).to_contain_text("failing")
        stage.tell(3, 0, 8)
        expect(page.locator("table.peers tbody tr")).to_have_count(3)
        expect_text(page, "Blocks 0:4 have a single replica.")

        stage.is_silent = True
        expect_text(page, "No directory answers")
        expect(page.locator("table.peers tbody tr")).to_have_count(3)  # what was known
        stage.is_silent = False
        expect(page.locator("#health")).to_contain_text("degraded")
        assert page.evaluate("window.isSame")


def test_rows_out_of_sight_are_not_laid_out(browser: Browser, stage: Stage) -> None:
    num_peers = 100  # several screens
    for number in range(num_peers):
        stage.tell(number, 0, 8)
    with open_page(browser, stage, 1440) as page:
        rows = page.locator("table.peers tbody tr")
        expect(rows).to_have_count(num_peers)

        assert page.evaluate(WAIT_FOR_LAST_ROW, False)
        rows.last.scroll_into_view_if_needed()
        assert page.evaluate(WAIT_FOR_LAST_ROW, True)


HAS_POINTS = """points => {
    const chart = echarts.getInstanceByDom(document.querySelector("div.losses:has(canvas)"));
    const { series } = chart.getOption();
    return JSON.stringify(series.map(one => one.data)) === JSON.stringify(points);
}"""
"""Whether the lines in the chart of losses have these points."""


def test_models_come_and_go_on_the_page_that_is_open(browser: Browser, stage: Stage) -> None:
    announce_degraded(stage)
    with open_page(browser, stage, 1440) as page:
        expect_text(page, "Blocks 4:8 have a single replica.")
        page.evaluate("window.isSame = true")

        progress = TrainingProgress(12, 400, 4.5, 4.75)
        stage.tell(3, 0, 2, model_id=OTHER, model_name="run/stories", training=progress)

        expect_text(page, "No peer serves blocks 2:8.")
        other = page.locator(f"section[data-id='{OTHER}']")
        expect(other.locator("h2")).to_have_text("run/stories failing")
        expect(page.locator("#health")).to_contain_text("failing")
        expect(other.locator(".progress")).to_have_text(
            "Update 12 of 400, loss 4.5 nats per token, held-out loss 4.75"
        )
        expect(page.locator(".chart canvas")).to_have_count(5)  # one of losses
        stage.tell(4, 0, 2, model_id=OTHER, model_name="run/stories", training=progress)
        page.wait_for_function(HAS_POINTS, arg=[[[12, 4.5]], [[12, 4.75]]])
        expect(other.locator(".what-if")).to_be_hidden()
        assert Axe().run(page).response["violations"] == []
        assert page.evaluate("window.isSame")


def test_canary_is_shown_as_it_runs(browser: Browser) -> None:
    stage = Stage()
    command = [sys.executable, "-c", CANARY]
    stage.canaries.append(CanaryProcess("org/model", command, {}, CLOCK))
    with stage:
        announce_degraded(stage)
        with open_page(browser, stage, 1440) as page:
            canary = page.locator("section.canary")
            expect_text(page, "First token after 250.0 ms, 8.5 tokens/s, same text")
            expect(canary.locator("tbody tr")).to_have_text("…12D3Koo0:81.0 ms20.0 ms3.0 ms")
            expect(canary.locator(".findings")).to_have_text("…abc[4:8] is gone")
            expect(canary.locator("canvas")).to_have_count(1)
            assert Axe().run(page).response["violations"] == []


def test_text_of_strangers_stays_text(browser: Browser, stage: Stage) -> None:
    stage.tell(1, 0, 8, software=HTML, name=SHORT_HTML, device=HTML)
    with open_page(browser, stage, 1440) as page:
        cell = page.locator("td[data-column=software]")
        expect(cell).to_have_text(HTML)
        expect(page.locator("td[data-column=device]")).to_have_text(HTML)
        expect(page.locator("td[data-column=peer]")).to_contain_text(SHORT_HTML)

        stage.tell(1, 0, 8, software=HTML.replace("x", "y"))

        expect(cell).to_have_text(HTML.replace("x", "y"))
        assert page.locator("main img").count() == 0
        assert page.title() == "degraded: shoal monitor"


def test_what_if_is_answered(browser: Browser, stage: Stage) -> None:
    announce_degraded(stage)
    with open_page(browser, stage, 1440) as page:
        expect_text(page, "Blocks 4:8 have a single replica.")

        page.fill("input[name=lose]", identity_of(1).peer_id[-8:])
        page.fill("input[name=room]", "4")
        page.click("text=Simulate")

        expect_text(page, "No peer serves blocks 4:8.")
        expect_text(page, "A machine with room for 4 blocks would serve blocks 4:8.")
        expect(page.locator("main")).to_contain_text(re.compile(r"Peers read \d+ s ago\."))
        assert Axe().run(page).response["violations"] == []


def test_page_lives_on_a_full_disk_and_says_when_its_monitor_is_gone(browser: Browser) -> None:
    stage = Stage()
    stage.has_full_disk = True
    with stage:
        announce_degraded(stage)
        context = browser.new_context()
        page = context.new_page()
        page.goto(stage.page)
        expect_text(page, "Blocks 4:8 have a single replica.")
        expect_text(page, "the history cannot be written: attempt to write a readonly database")
        expect(page.locator("#connection")).to_be_hidden()

    expect(page.locator("#connection")).to_be_visible(timeout=1000 * PATIENCE_SECONDS)
    context.close()
