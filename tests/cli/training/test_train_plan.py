"""`shoal train-plan` tells what a run needs, and `shoal train` what it lacks, before joining."""

import json
from pathlib import Path

import pytest
from training_runs import MODEL, write_run

from shoal.cli.main import main


def test_plan_is_printed_for_people_and_programs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(write_run(tmp_path))

    assert main(["train-plan", file, "--tokens-per-second", "1000"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert main(["train-plan", file, "--peers", "3", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)

    assert all(len(line) <= 80 for line in lines)
    assert lines[5].endswith("left: room for a peer of 2 of the 2 stages.")
    assert lines[-11].startswith("Expected where one peer would train 1,000 tokens/s")
    assert [line.split()[:2] for line in lines[-3:]] == [
        ["8", each] for each in ("20", "100", "1,000")
    ]
    assert [stage["span"] for stage in facts["stages"]] == ["0:2", "2:4"]
    assert [each["megabits_per_second"] for each in facts["speeds"]] == [20, 100, 1000]
    assert [each["num_members"] for each in facts["traffic"]] == [2, 1]
    assert facts["tokens_per_second_of_one_peer"] > 0


def test_too_few_peers_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(write_run(tmp_path))

    assert main(["train-plan", file, "--peers", "1", "--tokens-per-second", "1"]) == 2

    assert "the run has 2 stages, and needs as many peers at least" in capsys.readouterr().err


def test_too_little_memory_is_told_before_joining(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_run(tmp_path)
    large = MODEL | {"hidden_size": 2**16, "intermediate_size": 2**18}
    (tmp_path / "config.json").write_text(json.dumps(large))

    assert main(["train", str(file), "--new-swarm", "--local", "--stage", "1"]) == 2

    captured = capsys.readouterr()
    assert captured.out == ""
    said = " ".join(captured.err.split())
    assert "stage 1 of the run, blocks 2:4, takes" in said
    assert "G of memory, and this machine has" in said


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("train-plan",), "one block of the model takes"),
        (("train", "--out", "out"), "training in one process takes"),
    ],
)
def test_too_little_memory_of_this_machine_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], complaint: str
) -> None:
    file = write_run(tmp_path)
    large = MODEL | {"hidden_size": 2**16, "intermediate_size": 2**18}
    (tmp_path / "config.json").write_text(json.dumps(large))

    assert main([*arguments, str(file)]) == 2

    assert complaint in " ".join(capsys.readouterr().err.split())


def test_plan_needs_no_corpus_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, folder = str(write_run(tmp_path)), tmp_path / "corpus"
    folder.mkdir()
    options = ("--corpus", str(folder), "--tokens-per-second", "1")

    assert main(["train-plan", file, *options, "--json"]) == 0
    assert not json.loads(capsys.readouterr().out)["has_corpus"]
    (tmp_path / "0.bin").rename(folder / "0.bin")
    assert main(["train-plan", file, *options]) == 2
    assert "cannot read tokenizer file" in " ".join(capsys.readouterr().err.split())
