"""The live view of a swarm on the terminal: `shoal top`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding
from textual.widgets import DataTable, Footer, Static

from ...client.monitor.description import Description, EventRow
from ...client.monitor.monitor import Monitor
from ..options.quantities import count_of
from ..terminal.terminal import clean
from .health_table import COLOURS, PEER_COLUMNS, make_row

_COLUMNS = ("model", *PEER_COLUMNS, "for")
_SORTS = (None, 2, 3)
"""Columns to sort by in turn; None: by model and block, those that serve first."""

_NUM_EVENTS = 5
_ENDING_CHARACTERS = 6
_REFRESH_SECONDS = 1.0


class LiveScreen(App[None]):
    """Watches a swarm and shows it until its user quits."""

    CSS = """
    Static { padding: 0 1; height: auto; }
    DataTable { height: 1fr; }
    """
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar = [
        Binding("q", "quit", "Quit"),
        Binding("ctrl+c", "quit", "Quit", show=False, priority=True),
        Binding("s", "sort", "Sort by another column"),
    ]

    def __init__(self, monitor: Monitor, addresses: Sequence[str]) -> None:
        super().__init__()
        self._monitor = monitor
        self._addresses = addresses
        self._sorting = 0
        self._columns: tuple[str, ...] = ()
        self._shown_rows: list[tuple[str, ...]] = []

    def compose(self) -> ComposeResult:
        """Make the parts of the screen, from the top."""
        yield Static(id="health")
        yield DataTable(cursor_type="row", zebra_stripes=True)
        yield Static(id="events")
        yield Footer()

    def on_mount(self) -> None:
        """Begin to watch, and to show what is known."""
        self.run_worker(partial(self._monitor.run, self._addresses))
        self.set_interval(_REFRESH_SECONDS, self.refresh_swarm)
        self.refresh_swarm()

    def action_sort(self) -> None:
        """Sort the peers by the next column."""
        self._sorting = (self._sorting + 1) % len(_SORTS)
        self.refresh_swarm()

    def refresh_swarm(self) -> None:
        """Show what is known now."""
        described = self._monitor.describe()
        health = Text(described.health.upper(), f"bold {COLOURS[described.health]}")
        self.query_one("#health", Static).update(
            Text.assemble(
                health, "  ", clean(described.sentence), "\n", _describe_models(described)
            )
        )
        events = [_describe_event(event) for event in described.events[:_NUM_EVENTS]]
        self.query_one("#events", Static).update(Text("\n".join(events) or "No events yet."))
        self._show_peers(described)

    def _show_peers(self, described: Description) -> None:
        """Fill the table; the model has no column where there is only one, named above."""
        columns = _COLUMNS
        rows = [
            (
                clean(model.name or model.model_id[:8]),
                *make_row(peer),
                _show_duration(described.taken_at - peer.since),
            )
            for model in described.models
            for peer in model.peers
        ]
        column = _SORTS[self._sorting]
        if column is not None:
            rows.sort(key=lambda row: row[column])
        if len(described.models) <= 1:
            columns, rows = columns[1:], [row[1:] for row in rows]
        if (columns, rows) == (self._columns, self._shown_rows):
            return
        table = self.query_one(DataTable)
        cursor = table.cursor_row
        table.clear(columns=columns != self._columns)
        if columns != self._columns:
            table.add_columns(*columns)
        self._columns, self._shown_rows = columns, rows
        for row in rows:
            table.add_row(*map(Text, row))
        table.move_cursor(row=min(cursor, max(0, len(rows) - 1)))


def _describe_models(described: Description) -> str:
    lines = list[str]()
    for model in described.models:
        spans = [("missing", model.missing), ("single", model.single)]
        words = [f"{word} {', '.join(found)}" for word, found in spans if found]
        facts = [f"{model.num_blocks} blocks", count_of(model.num_serving, "peer"), *words]
        lines.append(clean(f"{model.name or model.model_id[:8]}: {'; '.join(facts)}"))
    return "\n".join(lines)


def _describe_event(event: EventRow) -> str:
    at = time.strftime("%H:%M:%S", time.localtime(event.at))
    words = f"{at}  …{event.peer_id[-_ENDING_CHARACTERS:]}  {event.kind}  {event.span}"
    return clean(f"{words}  {event.detail}")


def _show_duration(seconds: float) -> str:
    minutes = int(seconds // 60)
    if minutes < 1:
        return f"{max(0, int(seconds))} s"
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h"
