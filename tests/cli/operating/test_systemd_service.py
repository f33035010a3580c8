"""A peer as a service of systemd."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from shoal.cli.main import main
from shoal.cli.operating.systemd_service import notify_systemd
from shoal.peer.process.config import PeerEvent, ignore

PEER = "/ip4/192.0.2.1/tcp/1/p2p/12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home whose path a unit has to escape."""
    folder = tmp_path / 'half $HOME of 50% "x"'
    folder.mkdir()
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.chdir(folder)
    return folder


def test_unit_runs_the_same_peer_at_each_start(
    own_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["serve", "m", "--initial-peers", PEER, "--name", "lab", "--drain", "70"]

    assert main([*words, "--install-service"]) == 0

    unit = own_home / ".config/systemd/user/shoal-lab.service"
    text = unit.read_text()
    assert unit.stat().st_mode & 0o777 == 0o600
    assert (
        f'"shoal.cli" "serve" "m" "--initial-peers" "{PEER}" "--name" "lab" "--drain" "70"' in text
    )
    assert '"--identity" "/' in text
    assert '/half $$HOME of 50%% \\"x\\"/.local/state/shoal/lab.key"\n' in text
    assert "--install-service" not in text.partition("[Unit]")[2]
    assert "TimeoutStopSec=100\n" in text
    printed = capsys.readouterr().out
    assert printed.startswith(f"Wrote {unit}.\n")
    assert "enable --now shoal-lab" in printed
    assert main([*words, "--install-service"]) == 0
    assert capsys.readouterr().out.startswith(f"Replaced {unit}.\n")
    if shutil.which("systemd-analyze"):
        found = subprocess.run(
            ["systemd-analyze", "verify", "--user", unit],
            env={**os.environ, "XDG_RUNTIME_DIR": str(own_home)},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert found.returncode == 0
        assert "shoal" not in found.stderr  # it has something to say of other units


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--new-swarm"], "give the service --join in place of --new-swarm"),
        (["--initial-peers", PEER, "--blocks", "4:0"], "--blocks"),
        (["--initial-peers", PEER, "--name", "a\x07b"], "without"),
    ],
)
def test_what_could_not_start_is_not_installed(
    words: list[str], said: str, own_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "m", *words, "--install-service"]) == 2

    assert said in capsys.readouterr().err
    assert not list(own_home.rglob("*.service"))


def test_systemd_hears_when_a_peer_is_ready_and_when_it_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = str(tmp_path / "notify")
    heard = list[PeerEvent]()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(address)
        systemd.settimeout(10)
        monkeypatch.setenv("NOTIFY_SOCKET", address)
        report: Any = notify_systemd(heard.append)
        for name in ("started", "online", "left"):
            report(PeerEvent(name))

        assert systemd.recv(100) == b"READY=1\nSTATUS=online"
        assert systemd.recv(100) == b"STOPPING=1"
    report(PeerEvent("online"))  # systemd is gone
    assert len(heard) == 4


def test_without_systemd_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)

    assert notify_systemd(ignore) is ignore
