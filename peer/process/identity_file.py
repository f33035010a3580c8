"""The file that holds a peer's private key: readable by its owner only, created whole."""

import contextlib
import fcntl
import os
import shlex
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ...protocol.errors import RemoteProtocolError, UsageError
from ...protocol.identity import Identity, make_in_use_error

_MAX_FILE_BYTES = 1024


@contextlib.contextmanager
def hold_identity(path: Path | None) -> Iterator[Identity]:
    """Load or create an identity and let nobody else on this machine hold it meanwhile.

    Without a path it is a fresh one that ends with the process.

    Two peers of one identity would answer for each other and take each other's connections. The
    lock ends with the process at the latest. Raises UsageError when another one has it.
    """
    if path is None:
        yield Identity.generate()
        return
    identity = load_or_create_identity(path)
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise make_in_use_error(f"in {path}") from error
        except OSError as error:
            raise UsageError(
                f"cannot lock the identity file {path}: {error.strerror}; keep it on a file system "
                "with locks"
            ) from error
        yield identity


def load_or_create_identity(path: Path) -> Identity:
    """Return the identity kept in a file, making a fresh one when the file is not there.

    Raises UsageError when others may use the file, or when it holds something else.
    """
    try:
        return _load(path)
    except FileNotFoundError:
        return _create(path)
    except OSError as error:
        raise UsageError(f"cannot read the identity file {path}: {error.strerror}") from error


def _load(path: Path) -> Identity:
    # Not blocking, or opening a named pipe would wait for somebody to write into it.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            raise UsageError(f"{path} is not an identity file: name a file, or none that exists")
        content = os.read(descriptor, _MAX_FILE_BYTES)
    finally:
        os.close(descriptor)
    try:
        identity = Identity.from_libp2p_private_key(content)
    except (RemoteProtocolError, ValueError) as error:
        raise UsageError(f"{path} is not an identity file: {error}") from error
    check_private(path, mode, "identity file")  # of keys only: others need /etc/passwd
    return identity


def check_private(path: Path, mode: int, what: str) -> None:
    """Raise UsageError if other users of this machine may use a file with a secret.

    Pipes and terminals, which shells pass by a name in /dev/fd, are none.
    """
    if stat.S_ISREG(mode) and mode & 0o077:
        raise UsageError(
            f"other users of this machine may use the {what} {path} "
            f"(mode {stat.S_IMODE(mode):04o}); run `chmod 600 {shlex.quote(str(path))}`"
        )


def _create(path: Path) -> Identity:
    """Write a new identity; two processes that race for one path end with one of them."""
    if not path.parent.is_dir():  # a misspelt path must not give the peer a new identity
        raise UsageError(
            f"there is no directory {path.parent} for the identity file; make it first"
        )
    identity = Identity.generate()
    try:
        descriptor, partial = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(identity.to_libp2p_private_key())
                file.flush()
                os.fsync(file.fileno())
            with contextlib.suppress(FileExistsError):
                os.link(partial, path)
        finally:
            os.unlink(partial)
        return _load(path)
    except OSError as error:
        raise UsageError(f"cannot write the identity file {path}: {error.strerror}") from error
