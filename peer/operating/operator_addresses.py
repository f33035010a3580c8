"""Where the peers of a user listen for the user's tools: Unix sockets, named after the peers."""

import os
import re
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

from ...protocol.errors import UsageError

_NAME = re.compile(r"[A-Za-z0-9_][\w.-]{0,63}", re.ASCII)

_MOST_PATH_BYTES = 107
"""Of a Unix socket on Linux."""


def find_folder() -> Path:
    """Return the folder of the sockets: in the user's runtime folder, where the system has one."""
    runtime = Path(os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.getuid()}")
    if runtime.is_dir() and os.access(runtime, os.W_OK):
        return runtime / "shoal"
    return Path("~/.cache/shoal/run").expanduser()


def is_socket_name(name: str) -> bool:
    """Return whether a name can be one of a file, and needs no quotes in a shell.

    >>> is_socket_name("lab-2"), is_socket_name("../lab"), is_socket_name("Ann's laptop")
    (True, False, False)
    """
    return _NAME.fullmatch(name) is not None


def claim_socket(name: str) -> Path:
    """Return where a peer of this name may listen; what a dead one has left there is removed.

    Raises UsageError where another peer listens, or others may use the folder.
    """
    assert is_socket_name(name)
    folder = find_folder()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        state = folder.stat()
    except OSError as error:
        raise UsageError(f"cannot use the folder {folder}: {error.strerror}") from error
    if state.st_uid != os.getuid() or stat.S_IMODE(state.st_mode) & 0o077:
        raise UsageError(
            f"other users of this machine may use the folder {folder}; run `chmod 700 {folder}`, "
            "or remove it"
        )
    path = folder / f"{name}.sock"
    if len(os.fsencode(path)) > _MOST_PATH_BYTES:
        raise UsageError(f"the path {path} is too long for a socket: choose a shorter --name")
    if is_listening(path):
        raise UsageError(f"another peer on this machine has the name {name}: choose another --name")
    path.unlink(missing_ok=True)
    return path


def list_sockets() -> Iterator[tuple[str, Path]]:
    """Yield the names of the user's peers that run on this machine, and where they listen."""
    for path in sorted(find_folder().glob("*.sock")):
        if is_listening(path):
            yield path.stem, path


def is_listening(path: Path) -> bool:
    """Return whether a process listens at a socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(os.fspath(path))
        except OSError:
            return False
        return True
