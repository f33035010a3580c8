"""Whatever a run leaves behind is found and named."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from chaos.leftovers import Leftovers, put_temporary_files_in

pytestmark = pytest.mark.network


@pytest.fixture
def leftovers(tmp_path: Path) -> Leftovers:
    return Leftovers(tmp_path, settle_seconds=0.0)


@contextlib.contextmanager
def waiting_process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process


def test_nothing_is_left(leftovers: Leftovers) -> None:
    leftovers.note_processes()

    assert leftovers.find() == []


def test_process_that_was_seen_is_found_and_ended(leftovers: Leftovers) -> None:
    with waiting_process() as process:
        leftovers.note_processes()
        found = leftovers.find()

        assert f"process {process.pid}" in found
        assert process.wait() == -9


def test_file_in_the_temporary_folder_is_found(leftovers: Leftovers, tmp_path: Path) -> None:
    with put_temporary_files_in(tmp_path), tempfile.NamedTemporaryFile() as file:
        assert f"file {file.name}" in leftovers.find()

    assert leftovers.find() == []
    assert not Path(tempfile.gettempdir()).samefile(tmp_path)


def test_open_descriptor_is_found(leftovers: Leftovers) -> None:
    with Path(__file__).open(encoding="utf-8"):
        assert leftovers.find() == [f"descriptor of {__file__}"]


def test_running_thread_is_found(leftovers: Leftovers) -> None:
    finish = threading.Event()
    thread = threading.Thread(target=finish.wait, name="forgotten")
    thread.start()

    assert leftovers.find() == ["thread forgotten"]
    finish.set()
    thread.join()
