"""The sockets of a user's peers on one machine."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from shoal.peer.operating.operator_addresses import (
    claim_socket,
    find_folder,
    is_socket_name,
    list_sockets,
)
from shoal.protocol.errors import UsageError


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "shoal"


def listen(path: Path) -> socket.socket:
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listening.bind(os.fspath(path))
    listening.listen()
    return listening


def test_socket_of_a_dead_peer_is_replaced_and_not_listed() -> None:
    listen(claim_socket("lab")).close()
    assert dict(list_sockets()) == {}

    with listen(claim_socket("lab")) as living:
        assert dict(list_sockets()) == {"lab": Path(living.getsockname())}
        with pytest.raises(UsageError, match="another peer on this machine has the name lab"):
            claim_socket("lab")


@pytest.mark.parametrize(
    "name", ["", "../lab", "a/b", ".lab", "x" * 65, "\x1b[31m", "-rf", "lab\n"]
)
def test_name_that_would_be_no_plain_file_there_is_none_of_a_socket(name: str) -> None:
    assert not is_socket_name(name)


def test_folder_that_others_may_use_is_refused(runtime: Path) -> None:
    runtime.mkdir(mode=0o755)
    with pytest.raises(UsageError, match="run `chmod 700"):
        claim_socket("lab")


def test_without_a_runtime_folder_sockets_are_in_the_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "missing"))
    assert find_folder() == Path("~/.cache/shoal/run").expanduser()
