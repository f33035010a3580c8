"""The line that tells the owner of a peer whether it is useful."""

from __future__ import annotations

import datetime
from typing import Any

import pytest
from announcements import MODEL, identity_of
from screens import Screen

from shoal.cli.terminal.peer_status import PeerStatus, write_status
from shoal.cli.terminal.terminal import CleanStream, StatusLine, Terminal
from shoal.peer.engine.compute_thread import ComputeCounts
from shoal.peer.operating.figures import Figures, Replicas
from shoal.peer.streams.stream_host import ServiceCounts
from shoal.protocol.records.announcements import PeerState
from shoal.protocol.spans import Span

TODAY = datetime.date(2026, 11, 27)
MEASURED = {"sessions": 2, "weight_bytes": 2**30, "kv_used_bytes": 2**29}


@pytest.fixture(autouse=True)
def _plain_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "40")


def make_figures(**changes: Any) -> Figures:
    usual: dict[str, Any] = {
        "peer_id": identity_of(1).peer_id,
        "model_id": MODEL,
        "state": PeerState.ONLINE,
        "span": Span(2, 6),
        "num_blocks": 8,
        "replicas": Replicas(2, 0),
        "num_announcements": 3,
        "loop_lag_seconds": 0.0,
        "loop_lag_max_seconds": 0.0,
        "measured": MEASURED,
        "service": ServiceCounts(),
        "compute": ComputeCounts(),
    }
    return Figures(**(usual | changes))


def test_tokens_are_counted_by_day_and_speed_over_the_last_seconds() -> None:
    figures, status = make_figures(), PeerStatus()
    facts = dict[str, Any]()
    for second in range(0, 31, 2):
        figures.compute.num_decode_tokens += 20 if second > 20 else 4
        facts = status.update(figures, TODAY, float(second))

    assert (facts["tokens_today"], facts["tokens_per_second"]) == (11 * 4 + 5 * 20, 10.0)
    tomorrow = TODAY + datetime.timedelta(days=1)
    facts = status.update(figures, tomorrow, 32.0)
    assert (facts["tokens_today"], facts["tokens_per_second"]) == (0, 8.0)
    figures.compute.num_prefill_tokens += 600
    facts = status.update(figures, tomorrow, 92.0)  # a minute later, as in events
    assert (facts["tokens_today"], facts["tokens_per_second"]) == (600, 10.0)


def test_line_says_who_depends_on_the_peer_and_what_it_takes() -> None:
    figures = make_figures(state=PeerState.DRAINING, replicas=Replicas(1, 3))
    figures.service.sent_bytes["sessions"] = 2**21
    figures.service.sent_bytes["pushes"] = 2**20

    (text,) = write_status(PeerStatus().update(figures, TODAY, 0.0), 200)

    assert text.startswith("blocks 2:6 (draining), 3 only here | 2 sessions, 0 served | 0 tokens ")
    assert text.endswith("| 1.5 GiB of memory | 0 MiB in, 3 MiB out")
    loading = make_figures(span=None, replicas=None, measured={})
    assert write_status(PeerStatus().update(loading, TODAY, 0.0), 200) == []


def test_line_stays_below_what_is_printed_and_is_gone_at_the_end() -> None:
    screen = Screen()
    terminal = Terminal(screen)

    with StatusLine(terminal) as line:
        line.show("busy")
        Terminal(screen).print("An event.")
        CleanStream(screen).write("A warning.\n")
        line.show("x" * 50)

    erase, busy = "\r\x1b[K", "\rbusy\x1b[K"
    expected = busy + erase + "An event.\n" + busy + erase + "A warning.\n" + busy
    assert screen.text == expected + f"\r{'x' * 39}\x1b[K" + erase
    terminal.print("Later.")
    assert screen.text.endswith(erase + "Later.\n")


def test_line_waits_for_the_end_of_a_line_that_others_draw_over() -> None:
    screen = Screen()
    terminal = Terminal(screen)

    with StatusLine(terminal) as line:
        terminal.redraw("Loading block 1 of 2")
        line.show("busy")
        terminal.redraw("Loading block 2 of 2\n")

    loading = "\rLoading block 1 of 2\rLoading block 2 of 2\n"
    assert screen.text == loading + "\rbusy\x1b[K" + "\r\x1b[K"


@pytest.mark.parametrize("text", ["", "busy"])
def test_nothing_is_drawn_where_no_line_can_be_drawn_over(text: str) -> None:
    screen = Screen(is_terminal=False)
    terminal = Terminal(screen)

    with StatusLine(terminal) as line:
        line.show(text)
        terminal.print("An event.")

    assert screen.text == "An event.\n"


def test_status_tells_how_far_the_run_has_come() -> None:
    run = {"name": "stories", "update": 3, "num_updates": 30, "loss": 4.5}

    (text,) = write_status(PeerStatus().update(make_figures(), TODAY, 0.0) | {"run": run}, 200)

    assert "| run stories: update 3 of 30 |" in text


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_all_of_the_status_is_shown_in_terminals_of_any_width(columns: int) -> None:
    facts = PeerStatus().update(make_figures(), TODAY, 0.0)

    lines = write_status(facts, columns)

    assert all(len(line) < columns for line in lines)
    assert " | ".join(lines) == write_status(facts, 200)[0]
