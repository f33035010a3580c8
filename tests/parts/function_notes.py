"""Records which functions of the product run, in every thread of a process.

A function is recorded when one of its lines runs. A coroutine that resumes and goes on counts; one
that resumes only to wait on for another coroutine does not. Bodies of modules and classes are
imports, and generated code, such as the `__init__` of a dataclass, belongs to no file.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import FrameType
from typing import Any

PRODUCT = ("protocol/", "kernels/", "models/", "peer/", "client/", "cli/")
"""The folders that count, relative to the root of a tree."""

_ROOT, _FOLDER = "FUNCTION_NOTES_ROOT", "FUNCTION_NOTES_FOLDER"
_MARK = "mark"

Trace = Callable[[FrameType, str, Any], Any]


@dataclass(frozen=True)
class Note:
    """The first time in one step that a process ran a function for a caller."""

    step: int
    nanoseconds: int
    """All processes of a machine share this clock."""
    file: str
    function: str
    caller: str
    process: int
    thread: int

    @property
    def call(self) -> tuple[str, str, str]:
        return self.file, self.function, self.caller


def prepare(root: Path, folder: Path) -> dict[str, str]:
    """Return an environment in which every Python process records functions of the tree at `root`.

    They write to `folder`.
    """
    (folder / _MARK).write_bytes(bytes(4))
    here = Path(__file__).resolve().parent
    paths = (str(here / "traced"), str(here), os.environ.get("PYTHONPATH", ""))
    python_path = os.pathsep.join(filter(None, paths))
    settings = {_ROOT: str(root), _FOLDER: str(folder)}
    return {**os.environ, "PYTHONPATH": python_path, **settings}


def begin() -> None:
    """Record what this thread runs from now on, and threads that start later."""
    trace = _make_trace(Path(os.environ[_ROOT]), Path(os.environ[_FOLDER]))
    threading.settrace(trace)
    sys.settrace(trace)


def open_mark() -> memoryview:
    """Return the number of the current step in memory that all processes share; 0 is no step."""
    with (Path(os.environ[_FOLDER]) / _MARK).open("r+b") as file:
        return memoryview(mmap.mmap(file.fileno(), 4)).cast("I")


def read_notes(folder: Path) -> Iterator[Note]:
    """Yield the notes of all processes."""
    for file in folder.glob("[0-9]*"):
        for line in file.read_text(encoding="utf-8").splitlines():
            step, nanoseconds, thread, name, function, caller = line.split(" ")
            where = int(file.name), int(thread)
            yield Note(int(step), int(nanoseconds), name, function, caller, *where)


def _make_trace(root: Path, folder: Path) -> Trace:
    """Return what `sys.settrace` takes."""
    mark = open_mark()
    names: dict[str, str] = {}
    noted: dict[tuple[int, int], int] = {}
    notes = os.open(folder / str(os.getpid()), os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def enter(frame: FrameType, event: str, argument: object) -> Trace | None:
        filename = frame.f_code.co_filename
        if filename not in names:
            names[filename] = _find_name(filename, root)
        is_function = frame.f_code.co_flags & CO_OPTIMIZED
        return note if names[filename] and is_function else None

    # Lines count, not calls: a loop that has waited since before the step runs on within it.
    def note(frame: FrameType, event: str, argument: object) -> Trace:
        step, code, back = mark[0], frame.f_code, frame.f_back
        caller = back.f_code if back else code
        # Ids are enough, and fast: functions live as long as their modules.
        if step and event == "line" and noted.get((id(code), id(caller))) != step:
            noted[id(code), id(caller)] = step
            numbers = f"{step} {time.monotonic_ns()} {threading.get_native_id()}"
            line = f"{numbers} {names[code.co_filename]} {code.co_qualname} {caller.co_qualname}\n"
            os.write(notes, line.encode())
        return note

    return enter


def _find_name(filename: str, root: Path) -> str:
    """Return the path of a product file relative to the root, "" for any other file."""
    path = Path(filename).resolve()
    name = path.relative_to(root).as_posix() if path.is_relative_to(root) else ""
    return name if name.startswith(PRODUCT) else ""
