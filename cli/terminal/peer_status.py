"""Whether the peer of this machine is useful: a line on the terminal, or an event every minute."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import itertools
import shutil
import sys
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import TYPE_CHECKING, Any

from ...peer.process.background import BackgroundTasks
from ...peer.process.config import PeerEvent
from ..options.quantities import count_of, show_bytes
from .peer_events import print_json
from .terminal import StatusLine, Terminal

if TYPE_CHECKING:
    from ...peer.operating.figures import Figures
    from ...peer.operating.run_figures import RunFigures

_SECONDS = 2.0
_TIMES_EACH = 2
"""How often each line is shown before the next one."""

_SECONDS_OF_EVENTS = 60.0

_WINDOW_SECONDS = 10.0
"""Over which tokens per second are counted, at least."""


class PeerStatus:
    """The status line of a peer, made from its figures."""

    def __init__(self) -> None:
        self._day: datetime.date | None = None
        self._tokens_before = 0
        self._recent: deque[tuple[float, int]] = deque()

    def update(self, figures: Figures, day: datetime.date, now: float) -> dict[str, Any]:
        """Return what there is to say, at a time in seconds of any clock that does not jump."""
        num_tokens = figures.compute.num_decode_tokens + figures.compute.num_prefill_tokens
        if day != self._day:
            self._day, self._tokens_before = day, 0 if self._day is None else num_tokens
        self._recent.append((now, num_tokens))
        while len(self._recent) > 2 and now - self._recent[1][0] >= _WINDOW_SECONDS:
            self._recent.popleft()
        then, tokens_then = self._recent[0]
        measured, service = figures.measured, figures.service
        memory = ("weight_bytes", "kv_used_bytes", "adapter_used_bytes", "pending_bytes")
        return {
            "state": str(figures.state),
            "span": None if figures.span is None else str(figures.span),
            "least_replicas": None if figures.replicas is None else figures.replicas.least,
            "blocks_alone": 0 if figures.replicas is None else figures.replicas.single,
            "sessions": int(measured.get("sessions", 0)),
            "sessions_served": service.num_opened,
            "tokens_today": num_tokens - self._tokens_before,
            "tokens_per_second": (
                round((num_tokens - tokens_then) / (now - then), 1) if now > then else 0.0
            ),
            "memory_bytes": int(sum(measured.get(name, 0) for name in memory)),
            "received_bytes": service.received_bytes.total(),
            "sent_bytes": service.sent_bytes.total(),
        }


def write_status(facts: dict[str, Any], columns: int) -> list[str]:
    """Return the status in lines that fit, to be shown in turn; none before there are blocks.

    >>> status = {"state": "online", "span": "2:4", "least_replicas": 3, "blocks_alone": 0,
    ...     "sessions": 1, "sessions_served": 17, "tokens_today": 12345, "tokens_per_second": 8.25,
    ...     "memory_bytes": 2**29, "received_bytes": 2**21, "sent_bytes": 2**20}
    >>> write_status(status, 80)  # doctest: +NORMALIZE_WHITESPACE
    ['blocks 2:4 on 3+ peers | 1 session, 17 served | 12,345 tokens today, 8.2/s',
    '512 MiB of memory | 2 MiB in, 1 MiB out']
    """
    lines = list[str]()
    for part in _list_parts(facts):
        longer = f"{lines[-1]} | {part}" if lines else ""
        if longer and len(longer) < columns:  # the last column is the cursor's
            lines[-1] = longer
        else:
            lines.append(part)
    return lines


def _list_parts(facts: dict[str, Any]) -> Iterator[str]:
    if facts["state"] == "offline":
        yield "paused or leaving: no blocks are served"
    if facts["span"] is None:
        return
    alone = facts["blocks_alone"]
    replicas = f", {alone} only here" if alone else f" on {facts['least_replicas']}+ peers"
    state = "" if facts["state"] == "online" else f" ({facts['state']})"
    yield f"blocks {facts['span']}{state}{replicas}"
    if run := facts.get("run"):
        yield f"run {run['name']}: update {run['update']} of {run['num_updates']}"
    yield f"{count_of(facts['sessions'], 'session')}, {facts['sessions_served']:,} served"
    yield f"{facts['tokens_today']:,} tokens today, {facts['tokens_per_second']:.1f}/s"
    yield f"{show_bytes(facts['memory_bytes'])} of memory"
    yield f"{show_bytes(facts['received_bytes'])} in, {show_bytes(facts['sent_bytes'])} out"


@contextlib.asynccontextmanager
async def showing_status(
    read: Callable[[], Figures], is_json: bool, run: RunFigures
) -> AsyncGenerator[None]:
    """Show the status until the end of the block; not where the output is for nobody."""
    terminal = Terminal(sys.stdout)
    if not is_json and not terminal.can_redraw:
        yield
        return
    with StatusLine(terminal) as line:
        async with BackgroundTasks() as tasks:
            tasks.begin(_keep_telling(read, run) if is_json else _keep_showing(read, run, line))
            yield


async def _keep_showing(read: Callable[[], Figures], run: RunFigures, line: StatusLine) -> None:
    status = PeerStatus()
    for number in itertools.count():
        facts = status.update(read(), datetime.date.today(), time.monotonic()) | run.progress
        texts = write_status(facts, shutil.get_terminal_size().columns) or [""]
        line.show(texts[number // _TIMES_EACH % len(texts)])
        await asyncio.sleep(_SECONDS)


async def _keep_telling(read: Callable[[], Figures], run: RunFigures) -> None:
    status = PeerStatus()
    while True:
        await asyncio.sleep(_SECONDS_OF_EVENTS)
        facts = status.update(read(), datetime.date.today(), time.monotonic()) | run.progress
        print_json(PeerEvent("status", facts))
