"""Photograph the monitor's page over a real swarm on this machine, before and after kills.

.venv/bin/python -P docs/draw_monitor.py

Writes five PNG files beside this one. It needs Debian's chromium, and takes five minutes.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, expect, sync_playwright

from shoal.cli.options.bundled_model import find_model
from shoal.peer.local_swarm.swarm import LocalSwarm

MODEL = "shoal-stories"
SPANS = [(0, 4), (0, 4), (4, 8), (4, 8)]
WIDE, NARROW = (1440, 1500), (375, 1200)
HISTORY_SECONDS = 60.0
"""The page shows at least so much."""

PATIENCE_MILLISECONDS = 120_000
CANARY_RESULTS = {"healthy": "tokens/s", "degraded": "tokens/s", "failing": "4:8"}
"""A part of what the canary shows when it has run."""


@contextmanager
def run_monitor(swarm: LocalSwarm) -> Iterator[str]:
    """Run a monitor with a canary; yields the address of its page."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["monitor", "--listen", "127.0.0.1:0", "--history", f"{folder}/history.sqlite"]
        command += ["--canary", MODEL, "--initial-peers", *swarm.initial_peers]
        with subprocess.Popen(
            [sys.executable, "-uPm", "shoal.cli", *command], stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            found = re.search(r"http://[\d.:]+/", process.stdout.readline())
            assert found
            try:
                yield found[0]
            finally:
                process.terminate()


def photograph(
    browser: Browser, page: str, health: str, scheme: str, size: tuple[int, int]
) -> None:
    """Write one picture of the page once it shows this health, and the canary's last run."""
    width, height = size
    context = browser.new_context(
        viewport={"width": width, "height": height},
        color_scheme="dark" if scheme == "dark" else "light",
    )
    opened = context.new_page()
    opened.goto(page)
    expect(opened.locator("#health strong")).to_have_text(health, timeout=PATIENCE_MILLISECONDS)
    canary = opened.locator(".canary .summary")
    expect(canary).to_contain_text(CANARY_RESULTS[health], timeout=PATIENCE_MILLISECONDS)
    expect(opened.locator(".chart canvas")).to_have_count(3, timeout=PATIENCE_MILLISECONDS)
    opened.wait_for_timeout(1000)  # the charts are drawn when the page is idle
    target = Path(__file__).with_name(f"monitor-{health}-{scheme}-{width}.png")
    opened.screenshot(path=target)
    # Half of the bytes; the colours of the small squares stay.
    Image.open(target).convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE).save(
        target, optimize=True
    )
    print(f"{target.name}: {target.stat().st_size // 1000} kB", flush=True)
    context.close()


def main() -> None:
    """Take all pictures."""
    with (
        LocalSwarm(find_model(MODEL), SPANS) as swarm,
        run_monitor(swarm) as page,
        sync_playwright() as playwright,
    ):
        chromium = shutil.which("chromium")
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        time.sleep(HISTORY_SECONDS)
        photograph(browser, page, "healthy", "light", WIDE)
        photograph(browser, page, "healthy", "dark", NARROW)
        swarm.peers[3].kill()
        time.sleep(HISTORY_SECONDS)
        photograph(browser, page, "degraded", "dark", WIDE)
        photograph(browser, page, "degraded", "light", NARROW)
        swarm.peers[2].kill()
        time.sleep(HISTORY_SECONDS)
        photograph(browser, page, "failing", "light", WIDE)
        browser.close()


if __name__ == "__main__":
    main()
