"""Files that belong together, written so that nobody ever finds half of one."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path

Write = Callable[[Path], object]
"""Writes one file where it is told to."""


def write_files(folder: Path, writes: Mapping[str, Write]) -> None:
    """Write files of a folder by their names: all are on the disk before one takes its place.

    Readers find each as it was or as it is now. A machine that stops while they take their
    places, in the order given, may leave some old ones. Raises what writing raises; then the
    folder is as it was.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # Named after the process: another one may save to the same folder.
    parts = {name: folder / f".{name}.{os.getpid()}.part" for name in writes}
    try:
        for name, write in writes.items():
            parts[name].touch()
            mode = parts[name].stat().st_mode
            write(parts[name])
            parts[name].chmod(mode)  # safetensors lets nobody else read what it writes
            flush(parts[name])
        for name, part in parts.items():
            part.replace(folder / name)
    finally:
        for part in parts.values():
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
    flush(folder)


def flush(path: Path) -> None:
    """Have the disk take a file, or the names in a folder, before anything relies on it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
