"""`shoal train`: a run file becomes a model that transformers loads; wrong files are named."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from training_runs import write_run
from transformers import AutoModelForCausalLM

from shoal.cli.main import main
from shoal.cli.training.run_file import load_run
from shoal.peer.engine.training.span_state import digest_tensors
from shoal.protocol.identity import Identity


def test_run_becomes_a_model_of_transformers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = write_run(tmp_path), tmp_path / "out"

    assert main(["train", str(file), "--out", str(out), "--json"]) == 0

    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [event["event"] for event in events] == ["run", "update", "update", "trained"]
    assert events[0]["stages"] == ["0:2", "2:4"]
    assert 0 < events[2]["loss"] < 20
    model = AutoModelForCausalLM.from_pretrained(out)
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    assert digest_tensors(weights) == events[-1]["digest"]
    losses = [str(event["loss"]) for event in events[1:3]]
    _, _, *rows = (out / "losses.csv").read_text().splitlines()
    assert rows == [f"1,{losses[0]},", f"2,{losses[1]},"]
    assert (out / "losses.png").read_bytes().startswith(b"\x89PNG")


def test_held_out_loss_is_told_and_drawn_beside_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = write_run(tmp_path, num_held_out=200), tmp_path / "out"
    text = file.read_text()
    file.write_text("held_out_every = 1\n" + text.replace("[corpus]", "[corpus]\nentropy = 4.5"))

    assert main(["train", str(file), "--out", str(out), "--json"]) == 0

    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    names = [event["event"] for event in events]
    assert names == ["run", "update", "held_out", "update", "held_out", "trained"]
    held_out = [event["loss"] for event in events if event["event"] == "held_out"]
    assert [event["entropy"] for event in events if event["event"] == "held_out"] == [4.5, 4.5]
    assert events[-1]["held_out_loss"] == held_out[1] != held_out[0]
    rows = [line.split(",") for line in (out / "losses.csv").read_text().splitlines()]
    assert [row[2] for row in rows] == ["evaluation_loss", "", *map(str, held_out)]

    file.write_text(text)
    assert main(["train", str(file), "--out", str(out)]) == 0
    *_, told, _, _ = capsys.readouterr().out.splitlines()
    assert told == f"Held-out loss: {held_out[1]:.4f} nats per token."


def test_same_run_has_the_same_digest_and_prints_a_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_run(tmp_path)

    for name in ("one", "other"):
        assert main(["train", str(file), "--out", str(tmp_path / name)]) == 0

    lines = capsys.readouterr().out.splitlines()
    digests = [line for line in lines if line.startswith("SHA-256 of its weights: ")]
    assert len(digests) == 2
    assert len(set(digests)) == 1
    assert lines[0].startswith("Run test: 2 stages")
    assert lines[1] == "2 updates of 2 parts of 2 x 16 tokens"
    assert all(len(line) <= 80 for line in lines if not line.startswith(("SHA", "Model")))


def test_metrics_are_refused_where_nobody_else_trains(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", str(write_run(tmp_path)), "--out", str(tmp_path / "out"), "--metrics", "0"]

    assert main(words) == 2

    assert "--metrics" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "before", "after", "complaint"),
    [
        ("run.toml", b'name = "test"', b"name = ", "run.toml is no TOML file"),
        ("run.toml", b"seed = 7", b"seed = 7\nsed = 1", "sed: a run has no such"),
        ("run.toml", b"[2]", b"[9]", "no stage can begin with block 9"),
        ("run.toml", b"config.json", b"none.json", "none.json: No such file"),
        ("run.toml", b"0.bin", b"9.bin", "9.bin: No such file"),
        ("run.toml", b"held-out.bin", b"8.bin", "8.bin: No such file"),
        ("config.json", b'"llama"', b'"\xff"', "config.json is no text in UTF-8"),
        ("config.json", b'"llama"', b'"llama', "run file: model: "),
        ("config.json", b'"llama"', b'"llama', "config.json is no JSON file"),
        (
            "config.json",
            b'"llama"',
            b'"llama", "deep": ' + b"[" * 10**5,
            "is no JSON file: maximum",
        ),
        ("config.json", b'"llama"', b'"llama", "big": ' + b"9" * 5000, "is no JSON file: Exceeds"),
        ("run.toml", b"seed = 7", b"seed = " + b"9" * 5000, "is no TOML file: Exceeds the limit"),
        ("run.toml", b"config.json", b"con\\u0000fig", "null byte"),
        ("run.toml", b"config.json", b".", "it is no regular file"),
        ("run.toml", b"seed = 7", b"seed = 7\n#" + b"#" * 2**23, "has more than 8388608 bytes"),
        ("run.toml", b"[optimizer]", b'[optimizer]\nname = "adamw8bit"', "needs bitsandbytes: pip"),
        ("config.json", b"64", b"12", "corpus.sequence_length: the model has 12 positions"),
        ("config.json", b"48", b"0", "intermediate_size must be at least 1, got 0"),
        ("config.json", b"96", b"70", "the vocabulary of the model ends at 69"),
        ("tokenizer.json", b"w1", b"v1", "tokenizer.json is not the one of the run"),
        ("0.bin", b"\x00", b"\x01", "0.bin is not the one of the run: its SHA-256 differs"),
    ],
)
def test_wrong_files_are_told_in_one_sentence_by_all_commands(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    before: bytes,
    after: bytes,
    complaint: str,
) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    file, spoilt = str(write_run(tmp_path, num_held_out=200)), tmp_path / name
    content = spoilt.read_bytes()
    spoilt.write_bytes(content.replace(before, after, 1))
    assert spoilt.read_bytes() != content

    for command in (
        ("train", file, "--out", str(tmp_path / "out")),
        ("train", file, "--new-swarm", "--local"),
        ("train-plan", file),
    ):
        assert main(command) == 2

        captured = capsys.readouterr()
        assert complaint in " ".join(captured.err.split())
        assert captured.out == ""  # no join code: nobody has joined
    assert not (tmp_path / "out").exists()


DEAD = ("--initial-peers", f"/ip4/127.0.0.1/tcp/1/p2p/{Identity(bytes(32)).peer_id}")
FOUND = ("train", "run.toml", "--new-swarm", "--local")


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("train", "run.toml", "--out", "run.toml/x"), "run.toml/x can be no folder: "),
        (("train", "run.toml", "--out", "x" * 300), "can be no folder: File name too long"),
        (("train", "run.toml", "--out", "x", "--stage", "0"), "--stage is for a peer that trains"),
        ((*FOUND, "--out", "run.toml/x"), "run.toml/x can be no folder: "),
        ((*FOUND, "--admit", "nobody"), "'nobody' is not the peer id"),
        (("export", "test", "run.toml/x", *DEAD), "run.toml/x can be no folder: "),
        (("export", "run.toml", "x", *DEAD), "RUN is the name or the id of a run, not 'run.toml'"),
    ],
)
def test_wrong_options_are_told_before_anything_happens(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    complaint: str,
) -> None:
    write_run(tmp_path)
    monkeypatch.chdir(tmp_path)
    files = sorted(tmp_path.iterdir())

    assert main(words) == 2

    captured = capsys.readouterr()
    assert complaint in " ".join(captured.err.split())
    assert captured.out == ""
    assert sorted(tmp_path.iterdir()) == files


def test_peer_that_serves_refuses_a_wrong_corpus_though_nobody_shows_the_run(
    tmp_path: Path, tiny_models: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    file, model = str(write_run(tmp_path)), str(tiny_models.get().directory)
    (tmp_path / "0.bin").unlink()

    assert main(["serve", model, "--train", file, "--new-run", *DEAD]) == 2

    assert "0.bin: No such file" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("command", [("train", "--out", "out"), ("train-plan",)])
def test_what_is_no_file_is_neither_read_nor_waited_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: tuple[str, ...]
) -> None:
    pipe = tmp_path / "run.toml"
    os.mkfifo(pipe)

    for path in (pipe, Path("/dev/zero")):
        assert main([*command, str(path)]) == 2
        assert f"cannot read {path}: it is no regular file" in " ".join(
            capsys.readouterr().err.split()
        )


def test_byte_order_marks_of_windows_are_passed_over(tmp_path: Path) -> None:
    file = write_run(tmp_path)
    for one in (file, tmp_path / "config.json"):
        one.write_bytes(b"\xef\xbb\xbf" + one.read_bytes().replace(b"\n", b"\r\n"))

    assert load_run(file).name == "test"
