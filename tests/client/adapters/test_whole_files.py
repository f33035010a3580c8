"""Files that belong together appear as wholes, or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shoal.client.adapters import whole_files
from shoal.client.adapters.whole_files import write_files


def read_all(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


def test_failure_leaves_the_folder_as_it_was(tmp_path: Path) -> None:
    before = {"one": "old one", "two": "old two"}
    write_files(
        tmp_path / "new", {n: lambda path, t=t: path.write_text(t) for n, t in before.items()}
    )

    def fail(path: Path) -> None:
        path.write_text("a part")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        write_files(tmp_path / "new", {"one": lambda path: path.write_text("new"), "two": fail})

    assert read_all(tmp_path / "new") == before


def test_everything_is_on_the_disk_before_anything_takes_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    flush, replace = whole_files.flush, Path.replace

    def note_flush(path: Path) -> None:
        events.append(f"flush {path.name.split('.')[1] if path != tmp_path else 'folder'}")
        flush(path)

    def note_replace(path: Path, target: Path) -> Path:
        events.append(f"place {target.name}")
        return replace(path, target)

    monkeypatch.setattr(whole_files, "flush", note_flush)
    monkeypatch.setattr(Path, "replace", note_replace)
    write_files(tmp_path, {"one": Path.touch, "two": Path.touch})

    assert events == ["flush one", "flush two", "place one", "place two", "flush folder"]


def test_two_processes_do_not_write_into_the_same_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts: list[Path] = []

    def write(path: Path) -> None:
        parts.append(path)
        path.touch()

    write_files(tmp_path, {"one": write})
    monkeypatch.setattr(os, "getpid", lambda: 7)
    write_files(tmp_path, {"one": write})

    assert len(set(parts)) == 2
    assert read_all(tmp_path) == {"one": ""}


def test_others_may_read_what_they_may_read_of_other_files(tmp_path: Path) -> None:
    def write(path: Path) -> None:
        path.unlink(missing_ok=True)
        path.touch(mode=0o600)  # as safetensors does

    (tmp_path / "other").touch()
    write_files(tmp_path, {"one": write})

    assert (tmp_path / "one").stat().st_mode == (tmp_path / "other").stat().st_mode
