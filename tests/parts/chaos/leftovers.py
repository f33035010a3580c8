"""What a run leaves behind in the system, which should be nothing."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from processes import is_running, kill_if_running

_SETTLE_SECONDS = 20.0
"""How long processes may take to notice that who started them is gone; and the same for threads."""

_POLL_SECONDS = 0.2

_SOCKET = re.compile(rb"/unix(/[^\0]+\.sock)")
"""Where p2pd is told to listen, in its command line."""


class Leftovers:
    """Compares this process with what it was when this object was made."""

    def __init__(self, folder: Path, settle_seconds: float = _SETTLE_SECONDS) -> None:
        self._folder = folder
        self._settle_seconds = settle_seconds
        self._descriptors = _list_descriptors()
        self._threads = set(threading.enumerate())
        self._known = _list_descendants(os.getpid())
        self._processes: dict[int, str] = {}
        self._sockets: set[Path] = set()

    def note_processes(self) -> None:
        """Remember every process that descends from this one; a killed one loses its children."""
        for pid in _list_descendants(os.getpid()) - self._known:
            self._processes[pid] = _find_start(pid)
            with contextlib.suppress(OSError):
                command = Path(f"/proc/{pid}/cmdline").read_bytes()
                self._sockets |= {Path(os.fsdecode(path)) for path in _SOCKET.findall(command)}

    def find(self) -> list[str]:
        """Wait until nothing is left, and return what is, in words; ends processes that are."""
        deadline = time.monotonic() + self._settle_seconds
        while (left := self._look()) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        for pid in self._list_running():
            kill_if_running(pid)
        for socket in self._sockets:
            socket.unlink(missing_ok=True)
        return left

    def _look(self) -> list[str]:
        gc.collect()
        processes = [f"process {pid}" for pid in self._list_running()]
        threads = [f"thread {t.name}" for t in threading.enumerate() if t not in self._threads]
        files = [f"file {path}" for path in sorted(self._folder.rglob("*"))]
        sockets = [f"socket {path}" for path in sorted(self._sockets) if path.exists()]
        opened = _list_descriptors()
        kept = [
            f"descriptor of {target}"
            for number, target in opened.items()
            if self._descriptors.get(number) != target
        ]
        return processes + threads + files + sockets + kept

    def _list_running(self) -> list[int]:
        """Return who is still there, without strangers that got the number of one that is gone."""
        known = self._processes.items()
        return [pid for pid, start in known if is_running(pid) and _find_start(pid) == start]


@contextlib.contextmanager
def put_temporary_files_in(folder: Path) -> Iterator[None]:
    """Have this process and all that it starts make temporary files in a folder, inside."""
    before = os.environ.get("TMPDIR"), tempfile.tempdir
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
    try:
        yield
    finally:
        tempfile.tempdir = before[1]
        if before[0] is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = before[0]


def _list_descriptors() -> dict[int, str]:
    found: dict[int, str] = {}
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found[int(entry.name)] = os.readlink(entry)
    return {number: target for number, target in found.items() if "/proc/" not in target}


def _find_start(pid: int) -> str:
    """Return when a process began, in the clock ticks of proc(5); "" when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def _list_descendants(ancestor: int) -> set[int]:
    children: dict[int, set[int]] = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(file.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, set()).add(int(file.parent.name))
    found: set[int] = set()
    waiting = {ancestor}
    while waiting:
        waiting = set().union(*(children.get(pid, set()) for pid in waiting)) - found
        found |= waiting
    return found
