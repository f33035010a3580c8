"""Tell weights apart by all of their bytes, check downloaded ones, and remember the answers.

The fingerprint becomes part of the model id, and peers of one id are chained into one pipeline.
Two fine-tunes may differ in a single tensor, so every byte counts, also for a client that needs
the embeddings only. That takes about a second per gigabyte and core (SHA-256 is the fastest of
the standard library wherever the processor helps with it), once: the digests of large files are
kept in a small file in the user's cache directory.
"""

import contextlib
import hashlib
import json
import logging
import os
import re
import stat
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

from ...protocol.errors import ModelError

_logger = logging.getLogger(__name__)

CACHE_DIRECTORY = Path("~/.cache/shoal")
CACHE_FILE = "checkpoint-digests.json"

MIN_CACHED_BYTES = 64 * 2**20
"""Smaller files are read anew each time: it takes less than a tenth of a second."""

MAX_CACHED_FILES = 1000
"""The oldest ones are forgotten first; a checkpoint has up to some two hundred files."""

_MAX_CACHE_BYTES = 8 * 2**20
_NUM_READERS = 4  # hashing leaves the interpreter's lock alone
_SHA256 = re.compile(r"[0-9a-f]{64}")


def compute_fingerprint(paths: Sequence[Path], cache_directory: Path = CACHE_DIRECTORY) -> str:
    """Return 40 hex digits of the contents of these files, in this order.

    Names, folders and times have no say. Raises OSError when a file cannot be read.
    """
    cache = _DigestCache(cache_directory)
    with ThreadPoolExecutor(_NUM_READERS) as readers:
        digests = list(readers.map(cache.compute_digest, paths))
    cache.save()
    return hashlib.sha256("".join(digests).encode()).hexdigest()[:40]


def check_download(path: Path, cache_directory: Path = CACHE_DIRECTORY) -> None:
    """Raise ModelError unless a file of the Hub's cache has the content that the Hub promised.

    The Hub's client names a large file by the SHA-256 that the Hub gave, and checks its length only
    when it arrives. Afterwards a disk or another user may have changed it. Small files have other
    names, from which nothing follows. Raises OSError when the file cannot be read.
    """
    promised = path.resolve().name
    if _SHA256.fullmatch(promised):
        cache = _DigestCache(cache_directory)
        if cache.compute_digest(path) != promised:
            raise ModelError(
                f"{path.name} does not have the SHA-256 that the Hub gave for it; delete "
                f"{path.resolve()} and repeat the command, which downloads it again"
            )
        cache.save()


class _DigestCache:
    """SHA-256 digests of files, valid while path, size, times and inode are what they were.

    The cache is a hint: one that is missing, damaged, not ours or not writable costs time only.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._known = _read_entries(directory)
        self._new: dict[str, str] = {}

    def compute_digest(self, path: Path) -> str:
        """Return the SHA-256 of a file as 64 hex digits, from memory where that is safe."""
        resolved = path.resolve()
        with resolved.open("rb") as file:
            state = _describe_state(file.fileno())
            known_state, _, digest = self._known.get(str(resolved), "").rpartition(" ")
            if known_state == state and _SHA256.fullmatch(digest):
                return digest
            num_bytes = os.fstat(file.fileno()).st_size
            if num_bytes >= MIN_CACHED_BYTES:
                _logger.info("computing the digest of %s, which is cached for the next start", path)
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            is_unchanged = _describe_state(file.fileno()) == state
        if is_unchanged and num_bytes >= MIN_CACHED_BYTES:
            self._new[str(resolved)] = f"{state} {digest}"
        return digest

    def save(self) -> None:
        """Add what was read to the file, as one atomic replacement."""
        if not self._new:
            return
        # Others may have added theirs meanwhile. Entries lost to a race are only read again.
        entries = {**_read_entries(self._directory), **self._new}
        newest = dict(list(entries.items())[-MAX_CACHED_FILES:])
        try:
            directory = self._directory.expanduser()
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_atomically(directory / CACHE_FILE, json.dumps(newest).encode())
        except (OSError, RuntimeError) as error:  # RuntimeError: a user without a home
            _logger.debug("the digests of this checkpoint cannot be cached: %s", error)


def _describe_state(descriptor: int) -> str:
    # The change time cannot be set back, as the modification time can, by tools that copy it.
    state = os.fstat(descriptor)
    return f"{state.st_size} {state.st_mtime_ns} {state.st_ctime_ns} {state.st_ino}"


def _read_entries(directory: Path) -> dict[str, str]:
    """Return what the cache file holds: path -> state and digest; nothing if in any doubt."""
    try:
        path = directory.expanduser() / CACHE_FILE
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            state = os.fstat(descriptor)
            is_ours = state.st_uid == os.geteuid() and not state.st_mode & 0o022
            if not stat.S_ISREG(state.st_mode) or not is_ours:
                return {}
            content = json.loads(file.read(_MAX_CACHE_BYTES))
    except (OSError, ValueError, RecursionError, RuntimeError):
        return {}
    if not isinstance(content, dict):
        return {}
    entries = cast(Mapping[str, object], content)
    return {path: entry for path, entry in entries.items() if isinstance(entry, str)}


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file that only its user may read; readers find all of it or the old one."""
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # mode 0600
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
