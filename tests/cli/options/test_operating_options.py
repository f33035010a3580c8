"""What the options about the owner's control of a peer become."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.cli.main import _parse
from shoal.cli.options.operating_options import read_operator_config
from shoal.peer.operating.operator_config import OperatorConfig, TcpAccess
from shoal.peer.operating.schedule import Hours, Schedule
from shoal.protocol.errors import UsageError
from shoal.protocol.net.tcp.tls import make_tls_identity

TOKEN = "0123456789abcdef"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    identity = make_tls_identity()
    other = make_tls_identity()
    files = {
        "certificate": identity.certificate_pem,
        "key": identity.private_key_pem,
        "other": other.private_key_pem,
        "token": f"{TOKEN}\n".encode(),
        "short": b"secret",
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
        (tmp_path / name).chmod(0o600)
    return tmp_path


def read(folder: Path, *words: str, **names: str) -> OperatorConfig:
    options = [f"--operator-{option}={folder / name}" for option, name in names.items()]
    return read_operator_config(_parse(["serve", "m", "--new-swarm", *words, *options]))


def test_tools_of_this_user_reach_a_peer_and_no_others_unless_told(folder: Path) -> None:
    assert read(folder) == OperatorConfig()
    assert not read(folder, "--no-operator").has_socket


def test_owner_says_when_and_how_much(folder: Path) -> None:
    words = ["--hours", "22:00-07:00", "--pause-when-busy", "0.5", "--upload", "2M"]

    schedule = read(folder, *words, "--download", "4M").schedule

    assert schedule == Schedule((Hours(1320, 420),), False, 0.5, 2 * 2**20, 4 * 2**20)


def test_tcp_access_has_what_the_files_hold(folder: Path) -> None:
    config = read(
        folder, "--operator", "[::1]:8490", certificate="certificate", key="key", token="token"
    )

    assert config.has_socket
    assert isinstance(config.tcp, TcpAccess)
    assert (config.tcp.address, config.tcp.token) == ("[::1]:8490", TOKEN)
    assert TOKEN not in repr(config)


@pytest.mark.parametrize(
    ("words", "names", "said"),
    [
        (["--operator", "127.0.0.1:1"], {}, "TLS with a token only"),
        ([], {"token": "token"}, "need --operator HOST:PORT"),
        (["--operator", "h:1"], {"token": "short"}, "is no token: use 16 characters"),
        (["--operator", "h:1"], {"key": "other"}, "are not a TLS certificate and its key"),
        (["--operator", "h:1"], {"key": "nowhere"}, "cannot read the operator's key"),
    ],
)
def test_operators_without_what_protects_the_peer_are_refused(
    words: list[str], names: dict[str, str], said: str, folder: Path
) -> None:
    defaults = {"certificate": "certificate", "key": "key", "token": "token"} if words else {}
    given = {**defaults, **names} if names else {}

    with pytest.raises(UsageError, match=said):
        read(folder, *words, **given)


def test_secrets_that_other_users_may_read_are_refused(folder: Path) -> None:
    (folder / "token").chmod(0o644)

    with pytest.raises(UsageError, match="chmod 600"):
        read(folder, "--operator", "h:1", certificate="certificate", key="key", token="token")
