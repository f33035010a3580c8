"""The peer's key file on a real disk: private, whole, and never replaced by accident."""

from __future__ import annotations

import concurrent.futures
import errno
import fcntl
import os
import resource
import socket
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shoal.peer.process.identity_file import hold_identity, load_or_create_identity
from shoal.protocol.errors import UsageError
from shoal.protocol.identity import Identity

NUM_CREATORS = 8


def write_key(path: Path, content: bytes | None = None, mode: int = 0o600) -> None:
    path.write_bytes(Identity(bytes(32)).to_libp2p_private_key() if content is None else content)
    path.chmod(mode)


@contextmanager
def full_disk() -> Iterator[None]:
    """Let no file of this process grow; the nearest thing to a disk without space."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_file_is_made_once_and_read_from_then_on(tmp_path: Path) -> None:
    path = tmp_path / "peer.key"

    first = load_or_create_identity(path)
    second = load_or_create_identity(path)

    assert first.peer_id == second.peer_id
    assert path.read_bytes() == first.to_libp2p_private_key()
    assert os.listdir(path.parent) == [path.name]


@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_new_file_is_for_its_owner_only(tmp_path: Path, umask: int) -> None:
    previous = os.umask(umask)
    try:
        load_or_create_identity(tmp_path / "peer.key")
    finally:
        os.umask(previous)

    assert stat.S_IMODE((tmp_path / "peer.key").stat().st_mode) == 0o600


@pytest.mark.parametrize("mode", [0o600, 0o400])
def test_private_file_is_read(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "peer.key"
    write_key(path, mode=mode)

    assert load_or_create_identity(path).peer_id == Identity(bytes(32)).peer_id


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o601])
def test_file_that_others_may_use_is_refused_and_kept(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "peer.key"
    write_key(path, mode=mode)
    content = path.read_bytes()

    with pytest.raises(UsageError, match=rf"{mode:04o}.*chmod 600"):
        load_or_create_identity(path)

    assert path.read_bytes() == content
    assert stat.S_IMODE(path.stat().st_mode) == mode


GOOD = Identity(bytes(32)).to_libp2p_private_key()


@pytest.mark.parametrize(
    "content",
    [b"", b"my diary", GOOD[:-1], GOOD + b"\n", GOOD[:-1] + b"\0", bytes(68), bytes(5000)],
    ids=["empty", "text", "cut short", "too long", "public key differs", "zeros", "large"],
)
def test_file_that_holds_something_else_is_refused_and_kept(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "peer.key"
    for mode in (0o600, 0o644):  # /etc/passwd is not to be deleted for being public
        write_key(path, content, mode=mode)

        with pytest.raises(UsageError, match="not an identity file"):
            load_or_create_identity(path)

        assert path.read_bytes() == content


def test_error_does_not_show_the_key(tmp_path: Path) -> None:
    path = tmp_path / "peer.key"
    secret = Identity.generate().to_libp2p_private_key()
    write_key(path, secret[:-1])

    with pytest.raises(UsageError) as caught:
        load_or_create_identity(path)

    assert secret[4:36].hex() not in str(caught.value)
    assert repr(secret[4:12])[2:-1] not in str(caught.value)


def test_folder_and_pipe_are_refused_without_waiting_for_a_writer(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe, 0o600)

    for path in (tmp_path, pipe):
        with pytest.raises(UsageError, match="name a file"):
            load_or_create_identity(path)


def test_socket_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the path of a socket has to be short
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket")

        with pytest.raises(UsageError, match="cannot read"):
            load_or_create_identity(Path("socket"))


def test_misspelt_folder_is_refused_and_not_made(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"there is no directory .*/no/such for the identity"):
        load_or_create_identity(tmp_path / "no" / "such" / "peer.key")

    assert os.listdir(tmp_path) == []


def test_bare_file_name_means_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    identity = load_or_create_identity(Path("peer.key"))

    assert load_or_create_identity(tmp_path / "peer.key").peer_id == identity.peer_id


def test_link_to_an_identity_file_is_followed(tmp_path: Path) -> None:
    write_key(tmp_path / "peer.key")
    (tmp_path / "link").symlink_to("peer.key")

    assert load_or_create_identity(tmp_path / "link").peer_id == Identity(bytes(32)).peer_id


def test_identity_is_held_by_one_peer_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "peer.key"

    with hold_identity(path) as identity:
        with pytest.raises(UsageError, match=r"another running peer uses .*peer\.key"):
            hold_identity(path).__enter__()
        content = path.read_bytes()

    with hold_identity(path) as again:
        assert again.peer_id == identity.peer_id
    assert path.read_bytes() == content


def test_file_system_without_locks_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)

    with pytest.raises(UsageError, match=r"cannot lock .*peer\.key: No locks available; keep it"):
        hold_identity(tmp_path / "peer.key").__enter__()


def test_folder_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")

    with pytest.raises(UsageError, match=r"file/peer\.key"):
        load_or_create_identity(tmp_path / "file" / "peer.key")


def test_link_to_nowhere_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    path = tmp_path / "peer.key"
    path.symlink_to(tmp_path / "nowhere")

    with pytest.raises(UsageError, match=r"peer\.key"):
        load_or_create_identity(path)

    assert os.listdir(tmp_path) == [path.name]


def test_full_disk_leaves_no_partial_file(tmp_path: Path) -> None:
    with full_disk(), pytest.raises(UsageError, match="cannot write"):
        load_or_create_identity(tmp_path / "peer.key")

    assert os.listdir(tmp_path) == []
    load_or_create_identity(tmp_path / "peer.key")


@pytest.mark.parametrize("attempt", range(3))
def test_creators_that_race_end_with_one_identity(tmp_path: Path, attempt: int) -> None:
    path = tmp_path / "peer.key"
    start = threading.Barrier(NUM_CREATORS)

    def create() -> str:
        start.wait()
        return load_or_create_identity(path).peer_id

    with concurrent.futures.ThreadPoolExecutor(NUM_CREATORS) as threads:
        futures = [threads.submit(create) for _ in range(NUM_CREATORS)]
        peer_ids = {future.result() for future in futures}

    assert peer_ids == {load_or_create_identity(path).peer_id}
    assert os.listdir(tmp_path) == [path.name]
