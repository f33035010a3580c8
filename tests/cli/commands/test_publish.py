"""What `shoal publish` refuses and shows; test_swarm_commands.py has it publish."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any, cast

import pytest
from screens import Screen

from shoal.cli.commands import publish
from shoal.cli.main import _parse, main
from shoal.cli.terminal.reporter import Reporter
from shoal.cli.terminal.terminal import Terminal
from shoal.protocol.errors import RouteError
from shoal.protocol.membership.join_code import JoinCode
from shoal.protocol.membership.membership import make_owner

CLOSED = "/ip4/127.0.0.1/tcp/1/p2p/12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"
DIGEST = "03382acf" * 8


def tell_published(reporter: Reporter, *joining: str, is_complete: bool = True) -> None:
    options = _parse(["publish", "shoal-stories", "my-adapter", *joining])
    publish._report_published(reporter, options, DIGEST, is_complete)


def report_to(screen: Screen, is_json: bool = False) -> Reporter:
    return Reporter(Terminal(screen), Terminal(screen), is_json)


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        ([], "there is no folder {}; DIR must be a folder with a LoRA adapter"),
        (["tuning.json"], "{} holds prompts (ptune, deep_ptune), which cannot be published"),
        (["config.json"], "{} holds no adapter: DIR must be a folder"),
    ],
)
def test_folder_without_an_adapter_is_refused_before_anything_is_joined(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], files: list[str], sentence: str
) -> None:
    folder = tmp_path / "my-adapter"
    for file in files:
        folder.mkdir()
        (folder / file).write_text("{}")

    assert main(["publish", "no/such/model", str(folder), "--initial-peers", CLOSED]) == 2

    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith(f"shoal publish: {sentence.format(folder)}")
    assert output.err.count("\n") == 1


def test_file_is_refused_as_such(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    file = str(tmp_path / "adapter_config.json")

    assert main(["publish", "no/such/model", file, "--initial-peers", CLOSED]) == 2

    assert "adapter_config.json is a file; DIR must be a folder" in capsys.readouterr().err


@pytest.mark.slow
def test_swarm_that_nobody_is_in_is_one_line(
    byte_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")

    assert main(["publish", str(byte_model), str(tmp_path), "--initial-peers", CLOSED]) == 1

    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("shoal publish: no initial peer can be reached")
    assert output.err.count("\n") == 1


class ModelOfAnEmptySwarm:
    """A peer joins it after a second call."""

    num_calls = 0

    def publish_adapter(self, adapter: Any) -> str:
        self.num_calls += 1
        if self.num_calls < 2:
            raise RouteError("no peer serves blocks 0:8")
        return DIGEST


@pytest.mark.slow
def test_it_waits_for_the_first_peer_if_it_is_told_to() -> None:
    models: list[Any] = [ModelOfAnEmptySwarm(), ModelOfAnEmptySwarm()]

    assert publish._publish(models[0], cast("Any", None), 20.0) == DIGEST
    with pytest.raises(RouteError, match="no peer serves blocks 0:8"):
        publish._publish(models[1], cast("Any", None), 0.0)


def test_it_tells_how_others_use_it_in_a_terminal() -> None:
    screen = Screen()

    tell_published(report_to(screen), "--join", "@own.code")

    lines = screen.text.replace("\x1b[1m", "").splitlines()
    command = f'shoal generate shoal-stories "Once upon a time" --adapter {DIGEST} --join @own.code'
    assert [line for line in lines if len(line) > 80] == [f"  {command}"]
    assert "active_adapter=DIGEST" in screen.text
    assert "Press Ctrl-C to withdraw it.\n" in screen.text


def test_it_tells_when_it_cannot_be_used_yet_and_needs_no_option() -> None:
    screen = Screen()

    tell_published(report_to(screen), is_complete=False)

    assert "peers for all blocks have it" in screen.text
    assert f" --adapter {DIGEST}\n" in screen.text


def test_it_tells_programs_the_whole_command_and_no_secret() -> None:
    screen = Screen(is_terminal=False)
    reporter = report_to(screen, is_json=True)

    tell_published(reporter, "--join", str(JoinCode(make_owner(bytes(16)))))
    reporter.warn("no peer keeps it")
    publish._report_withdrawn(reporter, DIGEST)

    use = f'shoal generate shoal-stories "Once upon a time" --adapter {DIGEST} --join shoal:…'
    assert [json.loads(line) for line in screen.text.splitlines()] == [
        {
            "event": "published",
            "digest": DIGEST,
            "adapter": "my-adapter",
            "use": use,
            "is_complete": True,
        },
        {"event": "warning", "text": "no peer keeps it"},
        {"event": "withdrawn", "digest": DIGEST},
    ]


def test_warnings_of_the_client_are_sentences_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    screen = Screen()
    monkeypatch.setenv("NO_COLOR", "1")
    reporter, logger = report_to(screen), logging.getLogger("shoal.client.any")

    with publish._telling_warnings(reporter.warn):
        for _ in range(2):
            logger.warning("%d could not be told", 3)
    logger.warning("afterwards")

    assert screen.text == "3 could not be told.\n"
    assert [record.getMessage() for record in caplog.records] == ["afterwards"]
