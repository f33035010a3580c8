"""`shoal models`, against real processes that serve two models in one private swarm."""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import warm_python
from announcements import NOW, make_announcement
from peer_events import read_event
from screens import Screen

from shoal.cli.commands.models import _show
from shoal.cli.main import main
from shoal.cli.terminal.terminal import Terminal
from shoal.client.doctor.served_models import ServedModel
from shoal.peer.local_swarm.swarm import LocalSwarm
from shoal.protocol.membership.join_code import JoinCode
from shoal.protocol.membership.membership import Role, make_owner
from shoal.protocol.records.swarm_view import SwarmView

pytestmark = [pytest.mark.network, pytest.mark.slow]

OWNER = make_owner(bytes(range(16)))


@pytest.fixture(scope="module")
def code(byte_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The code of a swarm that serves a model on two peers, and a half of another one."""
    other = shutil.copytree(byte_model, tmp_path_factory.mktemp("models") / "other-model")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-5}))
    joining = ("--join", str(JoinCode(OWNER.as_role(Role.SERVE))))
    with LocalSwarm(byte_model, [(0, 2), (2, 4)], weights="fp32", serve_arguments=joining) as swarm:
        initial_peers = tuple(swarm.initial_peers)
        command = (
            *("serve", str(other), "--blocks", "0:2", "--weights", "fp32", "--local", "--json"),
            *("--join", str(JoinCode(OWNER.as_role(Role.SERVE), initial_peers))),
        )
        with warm_python.Popen(
            [sys.executable, "-P", "-m", "shoal.cli", *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            bufsize=0,
        ) as peer:
            try:
                read_event(peer, "online")
                yield str(JoinCode(OWNER.as_role(Role.USE), initial_peers))
            finally:
                with contextlib.suppress(ProcessLookupError):
                    peer.send_signal(signal.SIGTERM)


def test_models_of_a_swarm_are_listed_with_what_is_missing_and_how_to_use_them(
    code: str, byte_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["models", "--join", code, "--json"]) == 0

    whole, half = json.loads(capsys.readouterr().out)["models"]
    assert (whole["num_blocks"], whole["missing"], whole["replicas"]) == (4, [], 1)
    assert (whole["peers"], whole["silent_peers"]) == (2, 0)
    assert whole["tokens_per_second"] > 0
    assert whole["model"] == byte_model.name
    begin = f"shoal generate {byte_model.name} "
    assert whole["command"].startswith(begin)
    assert whole["command"].endswith("--join shoal:…")
    assert (half["model"], half["missing"], half["replicas"]) == ("other-model", ["2:4"], 0)
    assert (half["tokens_per_second"], half["command"]) == (None, None)


def test_models_are_shown_as_a_table(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "--join", code]) == 0

    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["model", "id", "blocks", "peers", "replicas", "tokens/s"]
    assert "all 4" in lines[1]
    assert "4, without 2:4" in lines[2]
    assert lines[4].startswith(" shoal generate ")
    assert all(len(line) <= 80 for line in lines[:3])


def test_how_many_of_very_many_peers_were_asked_is_said() -> None:
    answered = make_announcement(1)
    view = SwarmView.from_announcements(answered.model_id, [answered], NOW)
    screen, options = Screen(), argparse.Namespace(initial_peers=None, join=None)

    _show([ServedModel(view, 63, 6, None)], options, Terminal(screen))

    assert f"{answered.model_id[:8]}: 64 of 70 asked" in screen.text.splitlines()
