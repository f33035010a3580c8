"""Shares of the cores of this machine for processes, by control groups of Linux, version 1 or 2."""

from __future__ import annotations

import os
import signal
import time
from contextlib import AbstractContextManager, suppress
from pathlib import Path

from shoal.protocol.errors import UsageError

_PERIOD_MICROSECONDS = 10_000
"""Short: a process that has used its share up waits for the rest of the period."""

_END_SECONDS = 5.0


class CpuQuotas(AbstractContextManager["CpuQuotas"]):
    """Groups of processes, each with a share of the cores. They end with it.

    Raises UsageError where this process may not make any.
    """

    def __init__(self) -> None:
        self._root, self._is_unified = _find_root()
        self._folders: list[Path] = []

    def __exit__(self, *exception: object) -> None:
        for folder in self._folders:
            _remove(folder)

    def make(self, num_cores: float) -> list[str]:
        """Return what runs a command, behind it, with so many cores."""
        folder = self._root / f"shoal-{os.getpid()}-{len(self._folders)}"
        quota = round(num_cores * _PERIOD_MICROSECONDS)
        try:
            folder.mkdir()
            self._folders.append(folder)
            if self._is_unified:
                (folder / "cpu.max").write_text(f"{quota} {_PERIOD_MICROSECONDS}")
            else:
                (folder / "cpu.cfs_period_us").write_text(str(_PERIOD_MICROSECONDS))
                (folder / "cpu.cfs_quota_us").write_text(str(quota))
        except OSError as error:
            raise UsageError(f"cannot limit processes to {num_cores:g} cores: {error}") from error
        return ["sh", "-c", f'echo $$ > {folder}/cgroup.procs && exec "$@"', "sh"]


def _find_root() -> tuple[Path, bool]:
    """Return where groups with quotas are made, and whether that is version 2."""
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    for _, path, kind, options, *_ in mounts:
        if kind == "cgroup" and "cpu" in options.split(","):
            return Path(path), False
    for _, path, kind, *_ in mounts:
        controllers = Path(path) / "cgroup.subtree_control"
        if kind == "cgroup2" and "cpu" in controllers.read_text().split():
            return Path(path), True
    raise UsageError("shares of cores need a control group of Linux with the controller cpu")


def _remove(folder: Path) -> None:
    deadline = time.monotonic() + _END_SECONDS
    while folder.exists() and time.monotonic() < deadline:
        for process in (folder / "cgroup.procs").read_text().split():
            with suppress(ProcessLookupError):
                os.kill(int(process), signal.SIGKILL)
        with suppress(OSError):  # still in use for a moment
            folder.rmdir()
            return
        time.sleep(0.02)
