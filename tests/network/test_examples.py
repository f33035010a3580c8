"""The examples and the notebook run from top to bottom, and learn what they say."""

from __future__ import annotations

import importlib
import json
import os
import re
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import warm_python
from training_runs import write_run

from shoal.cli.training.run_file import load_run
from shoal.models.tokenizer_files import read_tokenizer

pytestmark = [pytest.mark.network, pytest.mark.slow]

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
MAX_LINES = 40


def run(script: Path, folder: Path) -> list[str]:
    """Run a script in a folder; return the lines that it prints."""
    process = warm_python.run(
        [sys.executable, "-P", str(script)],
        starts_peers=True,
        cwd=folder,
        env=os.environ | {"MPLBACKEND": "Agg"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout.splitlines()


@pytest.mark.parametrize(
    "name", ["lora.py", "prompt_classifier.py", "story_run.py", "watch_a_swarm.py"]
)
def test_examples_are_short(name: str) -> None:
    assert len((EXAMPLES / name).read_text(encoding="utf-8").splitlines()) <= MAX_LINES


def test_story_run_has_text_for_all_of_its_updates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setattr(sys, "argv", ["story_run.py", str(tmp_path)])
    runpy.run_path(str(EXAMPLES / "story_run.py"), run_name="__main__")

    training = load_run(tmp_path / "run.toml")

    num_rows = training.num_updates * training.parts_per_update * training.rows_per_part
    assert training.corpus.num_rows == num_rows
    assert training.num_held_out_parts == 2 * training.parts_per_update
    names = {file.path for file in training.corpus.tokenizer}
    assert names == {"tokenizer.json", "tokenizer_config.json"}
    assert list(read_tokenizer(training.corpus, tmp_path)) == [
        file.path for file in training.corpus.tokenizer
    ]


def test_training_over_peers_tells_when_a_part_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    example = importlib.import_module("train_over_peers")
    write_run(tmp_path, num_held_out=200)
    whole, lacking = (example.train_alone(tmp_path, left_out) for left_out in (None, (1, 0)))

    assert example.compare(whole, whole) == 0
    assert example.compare(whole, lacking) == example.DIFFERENT == 3
    assert capsys.readouterr().out.endswith("The weights differ.\n")
    assert example.compare(whole, whole._replace(held_out_loss=1.0)) == example.DIFFERENT


@pytest.mark.thorough  # tests/network/test_training.py kills real processes, too
@pytest.mark.parametrize(
    ("arguments", "code", "last"),
    [
        ((), 0, "The weights are equal."),
        (("--without", "3:1"), 3, "The weights differ."),
    ],
)
def test_training_over_peers_comes_to_the_weights_of_one_process(
    tmp_path: Path, arguments: tuple[str, ...], code: int, last: str
) -> None:
    # Not by warm_python, as it forks its processes itself; and without -P, as it imports its mate.
    command = [sys.executable, str(EXAMPLES / "train_over_peers.py"), *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)

    lines = done.stdout.splitlines()
    assert (done.returncode, lines[-1]) == (code, last), done.stderr
    digests = [line.split()[-1] for line in lines[-3:-1]]
    assert (digests[0] == digests[1]) == (code == 0)
    assert sum("killed a peer of stage" in line for line in lines) == 2
    assert any("another peer joined in update" in line for line in lines)
    assert any("transformers reads the model: " in line for line in lines)


def test_watched_swarm_loses_a_peer_and_gets_another(tmp_path: Path) -> None:
    command = [sys.executable, "-P", str(EXAMPLES / "watch_a_swarm.py"), "0.1", "127.0.0.1:0"]
    with warm_python.Popen(
        command, starts_peers=True, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        lines = [process.stdout.readline().decode() for _ in range(3)]
        process.send_signal(signal.SIGINT)
        assert process.stderr.read() == b""

    assert process.returncode == 0
    assert sorted(line.split()[0] for line in lines)[0] == "Killed"
    assert any("http://127.0.0.1:" in line for line in lines)
    assert any(line.endswith("joined, blocks 4:8.\n") for line in lines)


@pytest.mark.thorough  # soft prompts and heads are shown by tests/petals_interface
def test_classifier_is_right_about_sentences_that_it_never_saw(tmp_path: Path) -> None:
    *_, last = run(EXAMPLES / "prompt_classifier.py", tmp_path)

    assert last.startswith("unseen sentences: loss 0.")
    assert int(last.split()[-2].removesuffix("/40")) >= 38


def count_pirates(lines: list[str]) -> int:
    """Return how many lines want what somebody has."""
    found = [
        re.match(r"(<s>)?(\w+) has a (\w+)\. Ahoy! Give me the (\w+), (\w+)!", line)
        for line in lines
    ]
    return sum(bool(one) and one[2] == one[5] and one[3] == one[4] for one in found)


@pytest.mark.thorough  # the notebook is the same, cell by cell
def test_lora_answers_what_it_never_saw_and_peft_opens_it(tmp_path: Path) -> None:
    *_, first, second, third, fourth, fifth, sixth = run(EXAMPLES / "lora.py", tmp_path)

    assert count_pirates([first, second, third, fourth, fifth, sixth]) >= 5
    assert sorted(file.name for file in (tmp_path / "pirate-adapter").iterdir()) == [
        "adapter_config.json", "adapter_model.safetensors"
    ]  # fmt: skip


@pytest.mark.parametrize("num_updates", [1, pytest.param(24, marks=pytest.mark.thorough)])
def test_notebook_runs_from_top_to_bottom(tmp_path: Path, num_updates: int) -> None:
    """With all of its updates it also learns; `first-hour-finetune.md` shows the same, quicker."""
    notebook = json.loads((EXAMPLES / "finetune.ipynb").read_text(encoding="utf-8"))
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    script = tmp_path / "finetune.py"
    source = "\n\n".join(cells)
    assert "num_updates = 24\n" in source
    script.write_text(source.replace("num_updates = 24", f"num_updates = {num_updates}"))
    (tmp_path / "models").symlink_to(EXAMPLES.parent / "models")

    lines = run(script, tmp_path)

    _, *answers, without = lines
    assert len(answers) == 6
    assert num_updates == 1 or count_pirates(answers) >= 5
    assert without.startswith("without: Mia has a kite")
    assert "Ahoy" not in without
    assert (tmp_path / "pirate-adapter" / "adapter_model.safetensors").exists()
    # Saved as it was written: whoever opens it sees a clean page.
    assert not any(cell.get("outputs") for cell in notebook["cells"])
