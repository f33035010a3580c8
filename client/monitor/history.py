"""The history of a swarm in one SQLite file: events, replica depths, canaries, losses of runs.

Bounded by age, rows and bytes. A file survives the end of its monitor at any moment: it is written
in transactions, to a write-ahead log.
"""

from __future__ import annotations

import json
import logging
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from ...protocol.errors import UsageError
from ...protocol.ids import ModelId, PeerId
from ...protocol.records.announcements import TrainingProgress
from ...protocol.spans import Span
from .canary import CanaryRun, CanaryState
from .state import Event, EventKind, Health, SwarmState

_logger = logging.getLogger(__name__)

_VERSION = 1
_APPLICATION = 0x73686F61  # "shoa", where SQLite keeps what a file is for
_MAX_EVENTS = 200_000
_MAX_DEPTH_BYTES = 64 * 2**20
"""Of changes of depth, a byte for each block; every model may have the same share."""

_ROW_BYTES = 64
"""Of a change beside its blocks."""

_MAX_DETAIL_CHARACTERS = 300

_ALIVE_SECONDS = 30.0
"""How often it is noted that the monitor still watches."""

_PRUNE_SECONDS = 600.0

_SCHEMA = f"""
CREATE TABLE events (at REAL, kind TEXT, model_id TEXT, peer_id TEXT, start INT, stop INT,
    detail TEXT);
CREATE INDEX events_at ON events (at);
CREATE TABLE depths (at REAL, model_id TEXT, depths BLOB);
CREATE INDEX depths_at ON depths (model_id, at);
CREATE TABLE watching (until REAL);
PRAGMA user_version = {_VERSION};
PRAGMA application_id = {_APPLICATION};
"""


_CANARIES = """
CREATE TABLE IF NOT EXISTS canaries (at REAL, name TEXT, model_id TEXT, error TEXT,
    first_token_seconds REAL, tokens_per_second REAL, text TEXT, hops TEXT);
CREATE INDEX IF NOT EXISTS canaries_at ON canaries (name, at);
"""
"""A table that files of the same version may lack."""

_LOSSES = """
CREATE TABLE IF NOT EXISTS losses (at REAL, model_id TEXT, num_updates INT, loss REAL);
CREATE INDEX IF NOT EXISTS losses_at ON losses (model_id, at);
"""
"""Another one: how far training runs have come."""

_HELD_OUT_LOSSES = "ALTER TABLE losses ADD COLUMN held_out_loss REAL"
"""Fails where the table has the column already."""


class DepthChange(NamedTuple):
    """The replicas of each block from a time on; no blocks while nobody watched."""

    at: float
    depths: bytes


class RunLoss(NamedTuple):
    """What a training run tells after an update."""

    update: int
    loss: float
    held_out_loss: float | None
    """Where it was measured last."""


def list_held_out(losses: Iterable[RunLoss]) -> list[tuple[int, float]]:
    """Return each held-out loss at the first update that was told with it.

    >>> list_held_out([RunLoss(3, 5.5, None), RunLoss(4, 5.4, 5.8), RunLoss(6, 5.2, 5.8)])
    [(4, 5.8)]
    """
    first: dict[float, int] = {}
    for one in losses:
        if one.held_out_loss is not None:
            first.setdefault(one.held_out_loss, one.update)
    return [(update, loss) for loss, update in first.items()]


class History:
    """Keeps what happened for `keep_seconds`; opened by one monitor at a time.

    A disk that takes no more is told once, and the monitor goes on without. Any thread may use it,
    one at a time.
    """

    def __init__(self, path: Path | None, keep_seconds: float, now: float) -> None:
        """Open the file, or memory where there is no path.

        Raises UsageError for a file that is none of ours, of another version or damaged.
        """
        self._keep_seconds = keep_seconds
        self._last_depths: dict[ModelId, bytes] = {}
        self._last_progress: dict[ModelId, TrainingProgress] = {}
        self.error = ""
        """Why it cannot be written or read now; empty while it can."""
        self._pruned_at = self._noted_at = now
        self._database = _open(path)
        try:
            self._database.executescript(_CANARIES + _LOSSES)
            with suppress(sqlite3.OperationalError):
                self._database.execute(_HELD_OUT_LOSSES)
            rows = self._database.execute("SELECT until FROM watching").fetchone()
            with self._database:
                for model_id, depths in self._list_latest():
                    if depths and rows:
                        self._add_depths(model_id, min(rows[0], now), b"")
                self._note_watching(now)
        except sqlite3.Error as error:
            self._database.close()
            raise UsageError(f"the history cannot be written: {error}") from error

    def close(self) -> None:
        """Close the file; safe to call twice."""
        self._database.close()

    def take(
        self,
        state: SwarmState,
        events: Sequence[Event],
        now: float,
        runs: Sequence[tuple[str, CanaryRun]] = (),
    ) -> None:
        """Keep what has happened, the depths that have changed, the new losses of training runs,
        and runs of canaries by name.
        """
        changed = dict[ModelId, bytes]()
        if now - self._noted_at > 3 * _ALIVE_SECONDS:  # this process stood still
            self._forget_depths(self._noted_at)
        for model_id in state.models.keys() | self._last_depths.keys():
            depths = _list_depths(state, model_id)
            if self._last_depths.get(model_id, b"") != depths:
                changed[model_id] = depths
        is_time = now - self._noted_at >= _ALIVE_SECONDS
        progress = self._list_progress(state)
        if not (changed or events or runs or progress or is_time):
            return
        try:
            with self._database:
                self._add_runs(runs)
                self._database.executemany(
                    "INSERT INTO losses VALUES (?, ?, ?, ?, ?)",
                    (
                        (now, model_id, run.update, run.loss, run.held_out_loss)
                        for model_id, run in progress.items()
                    ),
                )
                self._write(changed, events, now)
        except sqlite3.Error as error:
            self._note_failure(f"the history cannot be written: {error}")
            return
        self.error = ""
        self._last_progress |= progress
        self._last_depths |= changed
        self._last_depths = {one: depths for one, depths in self._last_depths.items() if depths}

    def _list_progress(self, state: SwarmState) -> dict[ModelId, TrainingProgress]:
        """Return the training runs that have come further, or measured their held-out loss."""
        last = self._last_progress
        self._last_progress = {one: last[one] for one in last if one in state.models}
        return {
            model_id: model.training
            for model_id, model in state.models.items()
            if model.training is not None and _is_news(model.training, last.get(model_id))
        }

    def _note_failure(self, error: str) -> None:
        if not self.error:
            _logger.warning("%s", error)
        self.error = error

    def _forget_depths(self, at: float) -> None:
        """Note that nothing is known from a time on."""
        with suppress(sqlite3.Error), self._database:
            for model_id, depths in self._last_depths.items():
                if depths:
                    self._add_depths(model_id, at, b"")
        self._last_depths.clear()

    def _write(self, changed: Mapping[ModelId, bytes], events: Iterable[Event], now: float) -> None:
        for model_id, depths in changed.items():
            self._add_depths(model_id, now, depths)
        self._database.executemany(
            "INSERT INTO events VALUES (?, ?, ?, ?, ?, ?, ?)",
            (
                (
                    one.at, str(one.kind), one.model_id, one.peer_id, one.span.start,
                    one.span.stop, one.detail[:_MAX_DETAIL_CHARACTERS],
                )
                for one in events
            ),
        )  # fmt: skip
        self._note_watching(now)
        if now - self._pruned_at >= _PRUNE_SECONDS:
            self._pruned_at = now
            self._prune(now - self._keep_seconds)

    def _add_runs(self, runs: Iterable[tuple[str, CanaryRun]]) -> None:
        self._database.executemany(
            "INSERT INTO canaries VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (
                (
                    run.at, name, run.model_id, run.error[:_MAX_DETAIL_CHARACTERS],
                    run.first_token_seconds, run.tokens_per_second, run.text,
                    json.dumps(list(map(asdict, run.hops))),
                )
                for name, run in runs
            ),
        )  # fmt: skip

    def load_canary(self, name: str) -> CanaryState:
        """Return the state of a canary that has not run yet, with its first text, if it is kept."""
        row = self._database.execute(
            "SELECT text FROM canaries WHERE name = ? AND error = '' ORDER BY at LIMIT 1", (name,)
        ).fetchone()
        return CanaryState(name, row[0] if row else None)

    def list_canary_runs(self, name: str, since: float) -> list[CanaryRun]:
        """Return the runs of a canary from `since` on, without hops; none if the disk fails."""
        rows = self._read(
            "SELECT at, model_id, error, first_token_seconds, tokens_per_second, text FROM"
            " canaries WHERE name = ? AND at >= ? ORDER BY at",
            name,
            since,
        )
        return [CanaryRun(at, ModelId(model_id), *others) for at, model_id, *others in rows]

    def _add_depths(self, model_id: ModelId, at: float, depths: bytes) -> None:
        self._database.execute("INSERT INTO depths VALUES (?, ?, ?)", (at, model_id, depths))

    def _note_watching(self, now: float) -> None:
        self._noted_at = now
        self._database.execute("DELETE FROM watching")
        self._database.execute("INSERT INTO watching VALUES (?)", (now,))

    def _prune(self, oldest: float) -> None:
        """Delete what is older, but for the depths that held then; and what is too much."""
        execute = self._database.execute
        execute("DELETE FROM events WHERE at < ?", (oldest,))
        execute("DELETE FROM canaries WHERE at < ?", (oldest,))
        execute("DELETE FROM losses WHERE at < ?", (oldest,))
        execute(
            "DELETE FROM depths WHERE EXISTS (SELECT 1 FROM depths AS later WHERE later.model_id"
            " = depths.model_id AND later.at > depths.at AND later.at <= ?)",
            (oldest,),
        )
        execute(
            "DELETE FROM events WHERE rowid <= (SELECT max(rowid) FROM events) - ?", (_MAX_EVENTS,)
        )
        execute(
            "DELETE FROM losses WHERE rowid <= (SELECT max(rowid) FROM losses) - ?", (_MAX_EVENTS,)
        )
        execute(
            "DELETE FROM depths WHERE rowid IN (SELECT row FROM (SELECT rowid AS row,"
            " sum(length(depths) + ?1) OVER (PARTITION BY model_id ORDER BY at DESC) AS total"
            " FROM depths) WHERE total > ?2 / (SELECT count(DISTINCT model_id) FROM depths))",
            (_ROW_BYTES, _MAX_DEPTH_BYTES),
        )

    def _list_latest(self) -> list[tuple[ModelId, bytes]]:
        rows = self._database.execute("SELECT model_id, depths, max(at) FROM depths GROUP BY 1")
        return [(ModelId(model_id), bytes(depths)) for model_id, depths, _ in rows]

    def list_events(self, num_events: int) -> list[Event]:
        """Return the newest events first, of the kinds that this version knows."""
        rows = self._database.execute(
            "SELECT * FROM events WHERE kind IN (SELECT value FROM json_each(?))"
            " ORDER BY at DESC, rowid DESC LIMIT ?",
            (json.dumps(list(EventKind)), num_events),
        )
        return [
            Event(at, EventKind(kind), ModelId(model), PeerId(peer), Span(start, stop), detail)
            for at, kind, model, peer, start, stop, detail in rows
        ]

    def list_depths(self, model_id: ModelId, since: float) -> list[DepthChange]:
        """Return the changes of a model's depths from `since` on, the first one what held then;
        none if the disk fails.
        """
        rows = self._read(
            "SELECT max(?2, at), depths FROM depths WHERE model_id = ?1 AND at >= coalesce((SELECT"
            " max(at) FROM depths WHERE model_id = ?1 AND at <= ?2), ?2) ORDER BY at, rowid",
            model_id,
            since,
        )
        return [DepthChange(at, bytes(depths)) for at, depths in rows]

    def list_losses(self, model_id: ModelId, since: float) -> list[RunLoss]:
        """Return what a training run has told from `since` on; nothing if the disk fails."""
        rows = self._read(
            "SELECT num_updates, loss, held_out_loss FROM losses"
            " WHERE model_id = ? AND at >= ? ORDER BY at, rowid",
            model_id,
            since,
        )
        return [RunLoss(*row) for row in rows]

    def _read(self, query: str, *values: object) -> list[Any]:
        """Return rows; none if the disk fails."""
        try:
            return self._database.execute(query, values).fetchall()
        except sqlite3.Error as error:
            self._note_failure(f"the history cannot be read: {error}")
            return []


def _is_news(now: TrainingProgress, before: TrainingProgress | None) -> bool:
    """Return whether a run has told something new; others of its peers may be behind."""
    if before is None or now.update != before.update:
        return now.update > (before.update if before else 0)
    return now.held_out_loss != before.held_out_loss


def _list_depths(state: SwarmState, model_id: ModelId) -> bytes:
    """Return the replicas of each block; nothing while they are not known."""
    model = state.models.get(model_id)
    if state.error or model is None or model.health is Health.UNKNOWN:
        return b""
    return bytes(min(depth, 255) for depth in model.depths)


def _open(path: Path | None) -> sqlite3.Connection:
    advice = f"move {path} away, or name another file with --history"
    try:
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
        database = sqlite3.connect(path or ":memory:", timeout=2.0, check_same_thread=False)
    except (OSError, sqlite3.Error) as error:
        raise UsageError(f"the history cannot be opened: {error}; {advice}") from error
    try:
        database.execute("PRAGMA locking_mode = EXCLUSIVE")
        if not database.execute("SELECT 1 FROM sqlite_master").fetchone():
            database.executescript(f"BEGIN; {_SCHEMA} COMMIT;")
        version = database.execute("PRAGMA user_version").fetchone()[0]
        application = database.execute("PRAGMA application_id").fetchone()[0]
        problem = database.execute("PRAGMA quick_check(1)").fetchone()[0]
        if application == _APPLICATION:
            database.execute("PRAGMA journal_mode = WAL")
            database.execute("PRAGMA synchronous = NORMAL")
    except sqlite3.DatabaseError as error:
        database.close()
        if "locked" in str(error):
            raise UsageError(
                f"another monitor uses the history {path}; name another file with --history"
            ) from error
        raise UsageError(f"the history cannot be read: {error}; {advice}") from error
    if application != _APPLICATION or version != _VERSION or problem != "ok":
        database.close()
        what = "of another version of shoal" if application == _APPLICATION else "another program's"
        what = "damaged" if problem != "ok" else what
        raise UsageError(f"the history is {what}; {advice}")
    return database
