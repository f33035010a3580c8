"""`shoal peers --identity`: the id of a peer before it runs, which others have to be told."""

import json
from pathlib import Path

import pytest

from shoal.cli.main import main
from shoal.peer.process.identity_file import load_or_create_identity


def test_id_of_a_peer_is_told_before_it_first_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "peer.key"

    assert main(["peers", "--identity", str(path)]) == 0
    printed = capsys.readouterr().out
    assert main(["peers", "--identity", str(path), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)

    peer_id = load_or_create_identity(path).peer_id
    assert (printed, shown) == (f"{peer_id}\n", {"peer_id": peer_id})


def test_file_of_something_else_is_no_identity(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "peer.key"
    path.write_text("a letter")

    assert main(["peers", "--identity", str(path)]) == 2

    assert "is not an identity file" in capsys.readouterr().err
    assert path.read_text() == "a letter"
