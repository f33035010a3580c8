"""The file that holds a peer's private key: readable by its owner only, created whole."""

import os
import stat
from pathlib import Path

from ..protocol.errors import RemoteProtocolError, UsageError
from ..protocol.identity import Identity

_MAX_FILE_BYTES = 1024


def load_or_create_identity(path: Path) -> Identity:
    """Return the identity kept in a file, making a fresh one when the file is not there.

    Raises UsageError when others may read the file, or when it holds something else.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return _create(path)
    except OSError as error:
        raise UsageError(f"cannot read the identity file {path}: {error.strerror}") from error
    with os.fdopen(descriptor, "rb") as file:
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
        if mode & 0o077:
            raise UsageError(
                f"others may read the identity file {path} (mode {mode:04o}): chmod 600 it, or "
                "delete it to get a new identity"
            )
        content = file.read(_MAX_FILE_BYTES)
    try:
        return Identity.from_libp2p_private_key(content)
    except (RemoteProtocolError, ValueError) as error:
        raise UsageError(f"{path} is not an identity file: {error}") from error


def _create(path: Path) -> Identity:
    """Write a new identity; two processes that race for one path end with one of them."""
    identity = Identity.generate()
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(identity.to_libp2p_private_key())
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(partial, path)
        except FileExistsError:
            return load_or_create_identity(path)
        finally:
            os.unlink(partial)
    except OSError as error:
        raise UsageError(f"cannot write the identity file {path}: {error.strerror}") from error
    return identity
