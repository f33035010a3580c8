"""`shoal finetune` and `shoal generate --adapter`: a run from data to text, on real processes."""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import warm_python
from safetensors.torch import load_file

from shoal.cli.commands import finetune
from shoal.cli.main import main
from shoal.cli.options.bundled_model import BUNDLED_NAME, find_model
from shoal.cli.options.join_options import Joining
from shoal.client.finetuning.finetune_run import RunConfig
from shoal.peer.local_swarm.swarm import LocalSwarm
from shoal.protocol.errors import RouteError
from shoal.protocol.spans import Span

CLOSED = "/ip4/127.0.0.1/tcp/1/p2p/12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"
PROGRAM = [sys.executable, "-P", "-m", "shoal.cli"]


@pytest.fixture(scope="module")
def swarm(byte_model: Path) -> Iterator[LocalSwarm]:
    """Two peers, one for each half of the blocks."""
    with LocalSwarm(byte_model, spans=[(0, 2), (2, 4)], weights="fp32") as swarm:
        yield swarm


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Twenty texts of few letters."""
    path = tmp_path / "data.jsonl"
    texts = [{"prompt": f"{number % 4} says", "completion": " aha"} for number in range(20)]
    path.write_text("".join(json.dumps(text) + "\n" for text in texts))
    return path


def name_run(model: str | Path, data: Path, out: Path, *more: str, peer: str = CLOSED) -> list[str]:
    command = ["finetune", str(model), "--data", str(data), "--out", str(out), *more]
    return [*command, "--initial-peers", peer]


def read_events(output: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.splitlines()]


def fail(command: list[str], capsys: pytest.CaptureFixture[str], code: int = 2) -> str:
    """Run a command that fails; return what it says."""
    assert main(command) == code
    output = capsys.readouterr()
    assert output.out == ""
    assert len(output.err.splitlines()) == 1
    return output.err


def test_without_a_swarm_one_is_told_how_to_start_one(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SHOAL_JOIN", raising=False)
    command = ["finetune", "shoal-stories", "--data", str(data), "--out", str(tmp_path / "out")]

    sentence = fail(command, capsys)

    assert "--join CODE, the code that `shoal serve shoal-stories --new-swarm` printed" in sentence
    assert "`shoal swarm shoal-stories --peers 2` in another terminal" in sentence


def test_data_that_is_wrong_is_named_before_a_swarm_is_joined(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And before anything is imported: or else this model without a tokenizer would be named."""
    data = tmp_path / "data.jsonl"
    data.write_text('{"text": "fine"}\n{"text": 3}\n')
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")

    sentence = fail(name_run(tmp_path / "model", data, tmp_path / "out"), capsys)

    assert sentence == f"shoal finetune: {data}:2: `text` must be a string, not 3\n"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (
            ["--max-length", "513"],
            "texts of 513 tokens are not possible: this model takes 2 to 512",
        ),
        (["--max-length", "1"], "texts of 1 tokens are not possible"),
        (
            ["--method", "ptune", "--max-length", "500"],
            "this model takes 2 to 496 next to a soft prompt of this length",
        ),
        (
            ["--method", "ptune", "--pre-seq-len", "9999"],
            "--pre-seq-len 9999 leaves no room for text: the model has 512 positions",
        ),
        (["--resume"], "there is no checkpoint in"),
        (
            ["--method", "ptune", "--rank", "4"],
            "--rank is for --method lora, not ptune; leave it out",
        ),
        (["--pre-seq-len", "4"], "is for --method ptune or deep_ptune, not lora"),
    ],
)
def test_settings_that_cannot_be_are_named(
    byte_model: Path,
    data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    more: list[str],
    sentence: str,
) -> None:
    assert sentence in fail(name_run(byte_model, data, tmp_path / "out", *more), capsys)


def test_folder_in_which_another_run_is_at_work_is_refused(
    byte_model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    held = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        sentence = fail(name_run(byte_model, data, tmp_path), capsys)
    finally:
        os.close(held)

    assert f"another run is using {tmp_path}; wait for it" in sentence


def test_folder_that_takes_nothing_is_named_before_a_swarm_is_joined(
    byte_model: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sentence = fail(name_run(byte_model, data, data / "out"), capsys)

    assert sentence == f"shoal finetune: cannot write to {data}/out: Not a directory\n"


def test_folder_of_a_run_that_does_not_begin_is_not_left_empty(
    byte_model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "runs" / "out"

    fail(name_run(byte_model, data, out), capsys, code=1)  # nobody listens there

    assert not out.parent.exists()


@pytest.mark.parametrize(
    ("updates", "rows", "asked", "expected"),
    [
        (15, 8, None, [
            "15 updates may be too few; use more --epochs or a smaller --batch-size"
        ]),
        (1, 1, None, ["1 update may be too few; use more --epochs"]),
        (15, 8, 15, []),
        (30, 8, None, []),
    ],
)  # fmt: skip
def test_few_updates_are_said_to_be_few_unless_they_were_asked_for(
    updates: int, rows: int, asked: int | None, expected: list[str]
) -> None:
    options, config = argparse.Namespace(updates=asked), RunConfig(updates, 1e-3, rows)
    assert finetune._describe_few_updates(options, config) == expected


def test_blocks_that_nobody_serves_come_with_advice() -> None:
    error = RouteError("no peer accepts passes for blocks 4:8: refused", [Span(4, 8)])
    options = argparse.Namespace(model="my model", join="@own.code")

    advised = finetune._advise(error, options, Joining("", (), None, ()))

    assert str(advised) == (
        "no peer accepts passes for blocks 4:8: refused; start peers for them with `shoal serve "
        "'my model' --blocks 4:8 --join @own.code`, or increase --wait"
    )
    assert advised.missing == (Span(4, 8),)


@pytest.mark.parametrize("name", ["checkpoint-000003", "adapter_model.safetensors"])
def test_folder_that_holds_a_run_is_not_written_over(
    byte_model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    (tmp_path / "out" / name).mkdir(parents=True)

    sentence = fail(name_run(byte_model, data, tmp_path / "out"), capsys)

    assert "out already holds a run; continue it with --resume" in sentence


def test_out_that_is_a_file_is_refused(
    byte_model: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "is a file; --out takes a folder" in fail(name_run(byte_model, data, data), capsys)


@pytest.fixture(scope="module")
def story_swarm() -> Iterator[LocalSwarm]:
    """Two peers for the bundled model."""
    with LocalSwarm(find_model(), spans=[(0, 4), (4, 8)]) as swarm:
        yield swarm


@pytest.mark.network
@pytest.mark.slow
def test_run_learns_and_its_result_generates(
    story_swarm: LocalSwarm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of deep prompts; `test_finetune_for_peft.py` does the same with LoRA."""
    out, peer, data = tmp_path / "out", story_swarm.initial_peers[0], tmp_path / "data.csv"
    rows = [f"{name} has a kite., Ahoy!" for name in ("Ella", "Mia", "Tom", "Finn")] * 5
    data.write_text("\n".join(["prompt,completion", *rows]))
    options = ["--method", "deep_ptune", "--updates", "20", "--learning-rate", "0.1"]
    options += ["--eval", "0.2", "--batch-size", "4"]

    assert main([*name_run(BUNDLED_NAME, data, out, *options, peer=peer), "--json"]) == 0
    output = capsys.readouterr()
    begun, *events, finished = read_events(output.out)

    assert output.err == ""
    assert (begun["event"], begun["texts"], begun["evaluation_texts"]) == ("begun", 16, 4)
    updates = [event for event in events if event["event"] == "updated"]
    assert [event["update"] for event in updates] == list(range(1, 21))
    assert [hop["span"] for hop in updates[-1]["hops"]] == ["0:4", "4:8"]
    saved = [event for event in events if event["event"] == "saved"]
    assert [event["update"] for event in saved] == list(range(0, 21, 2))
    assert saved[-1]["evaluation_loss"] < 0.5 * saved[0]["evaluation_loss"]
    assert finished["evaluation_loss"] == saved[-1]["evaluation_loss"]
    assert (out / "losses.png").read_bytes().startswith(b"\x89PNG")
    assert len((out / "losses.csv").read_text().splitlines()) == 22
    assert finished["use"].startswith(
        f'shoal generate shoal-stories "Ella has a kite." --adapter {out} --initial-peers /ip4/'
    )

    command = ["generate", BUNDLED_NAME, "Mia has a kite.", "--max-new-tokens", "8", "--json"]
    texts = []
    for more in ([], ["--adapter", str(out)]):
        assert main([*command, *more, "--initial-peers", peer]) == 0
        texts.append(json.loads(capsys.readouterr().out)["text"])
    assert "Ahoy" not in texts[0]
    assert texts[1] == " Ahoy!"


@pytest.mark.network
@pytest.mark.slow
def test_run_with_its_optimizer_at_peers_learns(
    swarm: LocalSwarm,
    byte_model: Path,
    data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = ["--updates", "3", "--rank", "2", "--optimizer", "peers", "--json"]
    command = name_run(byte_model, data, tmp_path, *options, peer=swarm.initial_peers[0])

    assert main(command) == 0

    events = read_events(capsys.readouterr().out)
    learned = load_file(tmp_path / "adapter_model.safetensors")
    assert len([event["loss"] for event in events if event["event"] == "updated"]) == 3
    assert all(matrix.any() for name, matrix in learned.items() if "lora_B" in name)


@pytest.mark.network
@pytest.mark.slow
def test_interrupted_run_goes_on_where_it_stopped(
    swarm: LocalSwarm, byte_model: Path, data: Path, tmp_path: Path
) -> None:
    options = ["--method", "ptune", "--updates", "8", "--json"]
    peer = swarm.initial_peers[0]
    whole = warm_python.run(
        [*PROGRAM, *name_run(byte_model, data, tmp_path / "whole", *options, peer=peer)],
        capture_output=True,
        text=True,
    )
    command = [*PROGRAM, *name_run(byte_model, data, tmp_path / "parts", *options, peer=peer)]

    with warm_python.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as first:
        assert first.stdout is not None
        lines = [first.stdout.readline()]
        while json.loads(lines[-1])["event"] != "updated":
            lines.append(first.stdout.readline())
        first.send_signal(signal.SIGINT)
        rest, errors = first.communicate(timeout=120)
    stopped = read_events(rest)[-1]
    # All else is as it was. So little decay changes no numbers, and is told nevertheless.
    more = ["--resume", "--weight-decay", "1e-12", "--json"]
    again = name_run(byte_model, data, tmp_path / "parts", *more, peer=peer)
    second = warm_python.run([*PROGRAM, *again], capture_output=True, text=True)

    assert (first.returncode, errors) == (130, "")
    assert stopped["event"] == "stopped"
    begun, *events = read_events(second.stdout)
    assert begun["updates_done"] == stopped["update"]
    assert begun["method"] == "ptune"
    assert begun["notices"][-1] == "The weight decay was 0.0; it is now 1e-12."
    losses = {event["update"]: event["loss"] for event in events if event["event"] == "updated"}
    expected = {
        event["update"]: event["loss"]
        for event in read_events(whole.stdout)
        if event["event"] == "updated"
    }
    assert min(losses) == stopped["update"] + 1
    assert max(losses) == 8
    # Peers compute in 32 bits, though not in the same order each time.
    assert losses == pytest.approx({number: expected[number] for number in losses}, rel=1e-4)


@pytest.mark.network
@pytest.mark.slow
@pytest.mark.thorough
def test_run_that_loses_its_last_peer_keeps_what_it_learned(
    byte_model: Path, data: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    with LocalSwarm(byte_model, spans=[(0, 4)], weights="fp32") as swarm:
        options = ["--method", "ptune", "--updates", "500", "--wait", "1", "--json"]
        (address,) = swarm.initial_peers
        command = name_run(byte_model, data, out, *options, peer=address)
        with warm_python.Popen(
            [*PROGRAM, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            while json.loads(process.stdout.readline())["event"] != "updated":
                pass
            swarm.peers[0].kill()
            rest, errors = process.communicate(timeout=120)

    *_, stopped, error = read_events(rest)
    assert process.returncode == 1
    assert (stopped["event"], error["kind"]) == ("stopped", "RouteError")
    assert f"--blocks 0:4 --initial-peers {address}`, or increase --wait" in error["error"]
    assert len(errors.splitlines()) == 1
    assert (out / f"checkpoint-{stopped['update']:06}" / "state.json").exists()
