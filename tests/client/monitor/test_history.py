"""The history of a swarm on disk: what it keeps, for how long, and which files it refuses."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from announcements import MODEL, NOW, identity_of, make_announcement
from watched_swarms import read

from shoal.client.monitor.canary import CanaryRun
from shoal.client.monitor.history import DepthChange, History, list_held_out
from shoal.client.monitor.replica_depth import DepthArea, list_areas
from shoal.client.monitor.state import (
    Event,
    EventKind,
    SwarmState,
    reduce_failure,
    reduce_forgetting,
    reduce_reading,
)
from shoal.protocol.errors import UsageError
from shoal.protocol.ids import ModelId
from shoal.protocol.records.announcements import TrainingProgress
from shoal.protocol.spans import Span

DAY = 24 * 3600.0
LARGE = ModelId("b" * 32)
HALF = read(make_announcement(1))
FULL = read(make_announcement(1), make_announcement(2, span=Span(4, 8)), state=HALF)
HALF_DEPTHS, FULL_DEPTHS = bytes([1] * 4 + [0] * 4), bytes([1] * 8)


def make_event(at: float, number: int = 1) -> Event:
    peer_id = identity_of(number).peer_id
    return Event(at, EventKind.JOINED, MODEL, peer_id, Span(0, 4), "it came")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "folder" / "monitor.sqlite"


def test_events_and_changes_of_depth_are_kept(path: Path) -> None:
    history = History(path, DAY, NOW)
    events = [make_event(NOW + 1), make_event(NOW + 2, 2)]

    history.take(HALF, events[:1], NOW + 1)
    history.take(HALF, (), NOW + 2)
    history.take(FULL, events[1:], NOW + 3)

    assert history.list_events(10) == events[::-1]
    assert history.list_events(1) == events[1:]
    changes = [DepthChange(NOW + 1, HALF_DEPTHS), DepthChange(NOW + 3, FULL_DEPTHS)]
    assert history.list_depths(MODEL, NOW) == changes
    assert history.list_depths(MODEL, NOW + 2) == [changes[0]._replace(at=NOW + 2), changes[1]]
    history.close()


def test_time_without_a_monitor_is_unknown(path: Path) -> None:
    history = History(path, DAY, NOW)
    history.take(FULL, (), NOW)
    history.take(FULL, (), NOW + 60)  # nothing has changed, but somebody watches
    history.close()

    history = History(path, DAY, NOW + 1000)
    history.take(FULL, (), NOW + 1010)

    depths = [DepthChange(NOW, FULL_DEPTHS), DepthChange(NOW + 60, b"")]
    assert history.list_depths(MODEL, NOW) == [*depths, DepthChange(NOW + 1010, FULL_DEPTHS)]
    history.close()


def test_time_without_a_directory_is_unknown(path: Path) -> None:
    history = History(path, DAY, NOW)

    history.take(FULL, (), NOW)
    history.take(reduce_failure(FULL, "nobody answers")[0], (), NOW + 5)

    assert history.list_depths(MODEL, NOW)[-1] == DepthChange(NOW + 5, b"")
    history.close()


def test_time_is_unknown_in_which_a_model_is_not_watched_or_its_peers_are_not_dialled(
    path: Path,
) -> None:
    history = History(path, DAY, NOW)
    announced, _ = reduce_reading(SwarmState(), MODEL, [make_announcement(1)], NOW)

    history.take(announced, (), NOW)
    assert history.list_depths(MODEL, NOW) == []
    history.take(FULL, (), NOW + 1)
    history.take(reduce_forgetting(FULL, MODEL)[0], (), NOW + 2)

    depths = [DepthChange(NOW + 1, FULL_DEPTHS), DepthChange(NOW + 2, b"")]
    assert history.list_depths(MODEL, NOW) == depths
    history.close()


def test_old_rows_go_and_what_held_then_stays(path: Path) -> None:
    history = History(path, 100.0, NOW)
    history.take(HALF, [make_event(NOW)], NOW)
    history.take(FULL, (), NOW + 10)

    for seconds in range(60, 660, 60):
        history.take(FULL, [make_event(NOW + seconds)], NOW + seconds)

    assert history.list_events(10) == [make_event(NOW + at) for at in (600, 540)]
    assert history.list_depths(MODEL, NOW) == [DepthChange(NOW + 10, FULL_DEPTHS)]
    history.close()


def test_time_in_which_the_monitor_stood_still_is_unknown(path: Path) -> None:
    history = History(path, DAY, NOW)

    history.take(FULL, (), NOW)
    history.take(FULL, (), NOW + 1000)

    depths = [DepthChange(NOW, b""), DepthChange(NOW + 1000, FULL_DEPTHS)]
    assert history.list_depths(MODEL, NOW)[1:] == depths
    history.close()


def test_file_that_another_monitor_uses_is_refused(path: Path) -> None:
    history = History(path, DAY, NOW)

    with pytest.raises(UsageError, match="another monitor uses the history"):
        History(path, DAY, NOW)

    history.take(FULL, [make_event(NOW)], NOW)
    assert history.list_events(10) == [make_event(NOW)]
    history.close()


def test_history_survives_a_kill(path: Path) -> None:
    program = f"""
import sys
sys.path[:0] = {sys.path!r}
from pathlib import Path
from test_history import *
history = History(Path({str(path)!r}), DAY, NOW)
history.take(FULL, [make_event(NOW)], NOW)
print("written", flush=True)
sys.stdin.read()
"""
    here = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=here
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"written\n"
        process.send_signal(signal.SIGKILL)

    history = History(path, DAY, NOW + 5)

    assert history.list_events(10) == [make_event(NOW)]
    history.close()


def test_files_of_others_are_refused_and_left_as_they_are(path: Path) -> None:
    path.parent.mkdir()
    database = sqlite3.connect(path)
    database.execute("CREATE TABLE mine (text)")
    database.close()

    with pytest.raises(UsageError, match=r"another program's; move .* away, or name another file"):
        History(path, DAY, NOW)

    database = sqlite3.connect(path)
    assert database.execute("SELECT name FROM sqlite_master").fetchall() == [("mine",)]
    database.close()


def test_file_of_another_version_is_refused(path: Path) -> None:
    History(path, DAY, NOW).close()
    database = sqlite3.connect(path)
    database.execute("PRAGMA user_version = 99")
    database.close()

    with pytest.raises(UsageError, match="of another version of shoal"):
        History(path, DAY, NOW)


def test_events_of_kinds_that_a_later_version_adds_are_left_out(path: Path) -> None:
    with closing(History(path, DAY, NOW)) as history:
        history.take(FULL, [make_event(NOW), make_event(NOW + 1)], NOW)
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("UPDATE events SET kind = 'other' WHERE at = ?", (NOW,))

    with closing(History(path, DAY, NOW)) as history:
        assert history.list_events(10) == [make_event(NOW + 1)]


@pytest.mark.parametrize("content", [b"no database" * 400, None], ids=["text", "cut short"])
def test_damaged_file_is_refused(path: Path, content: bytes | None) -> None:
    history = History(path, DAY, NOW)
    for number in range(200):
        history.take(FULL, [make_event(NOW + number)] * 10, NOW + number)
    history.close()
    path.write_bytes(path.read_bytes()[:9000] if content is None else content)

    with pytest.raises(UsageError, match=r"the history (is damaged|cannot be read)"):
        History(path, DAY, NOW)


def test_full_disk_is_told_once_and_the_monitor_goes_on(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    history = History(path, DAY, NOW)
    num_pages = history._database.execute("PRAGMA page_count").fetchone()[0]
    history._database.execute(f"PRAGMA max_page_count = {num_pages}")

    for number in range(3):
        history.take(FULL, [make_event(NOW + number)] * 500, NOW + number)

    assert [record.message for record in caplog.records] == [
        "the history cannot be written: database or disk is full"
    ]
    assert history.list_events(10) == []
    assert history.error == caplog.records[0].message
    history._database.execute("PRAGMA max_page_count = 10000")
    history.take(FULL, [make_event(NOW + 9)], NOW + 9)
    assert (history.list_events(10), history.error) == ([make_event(NOW + 9)], "")
    assert history.list_depths(MODEL, NOW) == [DepthChange(NOW + 9, FULL_DEPTHS)]
    history.close()


def test_models_of_many_blocks_leave_others_their_share(path: Path) -> None:
    history = History(path, DAY, NOW)
    large = make_announcement(3, model_id=LARGE, num_blocks=4096, span=Span(0, 4096))
    state = read(large, state=FULL, model_id=LARGE)
    gone, _ = reduce_forgetting(state, LARGE)
    history.take(FULL, (), NOW)
    history._database.executemany(
        "INSERT INTO depths VALUES (?, ?, zeroblob(4096))",
        ((NOW + number / 1000, LARGE) for number in range(20_000)),
    )

    for seconds in range(60, 660, 60):
        history.take(state if seconds % 120 else gone, (), NOW + seconds)

    num_bytes = "SELECT sum(length(depths)) FROM depths"
    assert 2**23 < history._database.execute(num_bytes).fetchone()[0] <= 2**25
    assert history.list_depths(MODEL, NOW) == [DepthChange(NOW, FULL_DEPTHS)]
    newest = [change.depths for change in history.list_depths(LARGE, NOW)[-2:]]
    assert newest == [bytes([1]) * 4096, b""]
    history.close()


def test_runs_of_canaries_are_kept_beside_the_rows_of_older_files(path: Path) -> None:
    History(path, DAY, NOW).close()
    with closing(sqlite3.connect(path)) as database:
        database.execute("DROP TABLE canaries")
    history = History(path, DAY, NOW)
    failed = CanaryRun(NOW, MODEL, "no peer serves blocks 4:8")
    runs = [failed, CanaryRun(NOW + 1, MODEL, "", 0.5, 9.0, "text"), CanaryRun(NOW + 2, MODEL)]

    history.take(FULL, (), NOW + 2, [("a", run) for run in runs] + [("b", failed)])

    assert history.list_canary_runs("a", NOW) == runs
    assert history.load_canary("a").first_text == "text"
    assert history.load_canary("b").first_text is None
    history.close()


def test_too_many_changes_are_drawn_with_the_least_depth_of_each_time() -> None:
    changes = [DepthChange(float(at), bytes([at % 3, 2])) for at in range(300)]

    areas = list_areas(changes, 300.0, max_areas=50)

    assert len(areas) <= 50
    assert DepthArea(0, 1, 0.0, 300.0, 0) in areas
    assert max(area.until for area in areas) == 300.0


def test_unknown_times_are_not_drawn() -> None:
    changes = [DepthChange(0.0, b"\x02"), DepthChange(5.0, b""), DepthChange(7.0, b"\x02")]

    areas = list_areas(changes, 9.0, max_areas=10)

    assert areas == [DepthArea(0, 1, 0.0, 5.0, 2), DepthArea(0, 1, 7.0, 9.0, 2)]


def test_losses_of_each_new_update_of_a_run_are_kept(path: Path) -> None:
    def tell(update: int, loss: float, held_out_loss: float | None = None) -> SwarmState:
        progress = TrainingProgress(update, 400, loss, held_out_loss)
        return read(make_announcement(training=progress))

    history = History(path, DAY, NOW)
    told = [(0, 0.0), (3, 5.5), (3, 5.5), (4, 5.25), (4, 5.25, 5.75), (3, 5.5), (6, 5.0, 5.75)]
    for number, progress in enumerate(told):
        history.take(tell(*progress), (), NOW + number)

    losses = history.list_losses(MODEL, NOW)
    assert losses == [(3, 5.5, None), (4, 5.25, None), (4, 5.25, 5.75), (6, 5.0, 5.75)]
    assert list_held_out(losses) == [(4, 5.75)]
    assert history.list_losses(MODEL, NOW + 5) == [(6, 5.0, 5.75)]
    history.close()


def test_losses_are_kept_beside_the_rows_of_older_files(path: Path) -> None:
    History(path, DAY, NOW).close()
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("ALTER TABLE losses DROP COLUMN held_out_loss")
        database.execute("INSERT INTO losses VALUES (?, ?, 3, 5.5)", (NOW, MODEL))

    history = History(path, DAY, NOW)
    told = read(make_announcement(training=TrainingProgress(4, 400, 5.25, 5.75)))
    history.take(told, (), NOW + 1)

    assert history.list_losses(MODEL, NOW) == [(3, 5.5, None), (4, 5.25, 5.75)]
    history.close()
