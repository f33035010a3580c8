"""A run over real processes, of which one is killed and one leaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Any

import processes
import pytest
import torch
import warm_python
from training_runs import VOCABULARY, train_alone, write_run
from transformers import AutoModelForCausalLM, AutoTokenizer

from shoal.cli.main import main
from shoal.cli.options.bundled_model import find_model
from shoal.cli.training.run_file import load_run
from shoal.models.token_shards import TokenShards
from shoal.peer.engine.training.span_state import digest_tensors
from shoal.peer.process.identity_file import load_or_create_identity

pytestmark = [pytest.mark.network, pytest.mark.slow]

LONELY = "Could not renew the announcement, trying again: no node of the directory keeps our"

NUM_UPDATES = 30


class RunProcess:
    """A process that takes part in a run. Ends with the stack."""

    def __init__(self, stack: ExitStack, *words: str) -> None:
        command = [sys.executable, "-P", "-m", "shoal.cli", *words, "--json", "--local"]
        command += ["--announce-period", "1", "--linger", "60"]
        self.process: Any = stack.enter_context(
            warm_python.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
        stack.callback(self.process.kill)

    def wait_for(self, name: str, **facts: object) -> dict[str, Any]:
        """Read events until one has this name and these facts."""
        for line in self.process.stdout:
            event = json.loads(line)
            if event["event"] == name and event.items() >= facts.items():
                return event
        raise AssertionError(f"no {name}: {self.process.stderr.read()}")


class TrainingPeer(RunProcess):
    """A `shoal train` process."""

    def __init__(self, stack: ExitStack, run: Path | str, stage: int, *more: str) -> None:
        super().__init__(stack, "train", str(run), "--stage", str(stage), *more)


class SideTrainingPeer(RunProcess):
    """A `shoal serve` process that trains as well."""

    def __init__(self, stack: ExitStack, blocks: str, run: str, *more: str) -> None:
        words = ["serve", "shoal-stories", "--blocks", blocks, "--weights", "fp32"]
        words += ["--kv-memory", "64M", "--training-memory", "0", "--no-operator"]
        super().__init__(stack, *words, "--train", run, *more)


def read_metric(url: str, name: str) -> float:
    """Return the value of a metric, by its name with its labels."""
    with urllib.request.urlopen(url, timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return float(dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))[name])


def list_identities(folder: Path, *names: str) -> dict[str, tuple[str, str]]:
    """Make key files; return the options that name them."""
    paths = {name: folder / name for name in names}
    for path in paths.values():
        load_or_create_identity(path)
    return {name: ("--identity", str(path)) for name, path in paths.items()}


def test_run_goes_on_after_a_kill_and_a_leave_and_comes_to_the_weights_of_one_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_file, out = write_run(tmp_path, num_updates=NUM_UPDATES), tmp_path / "out"
    owner, *keys = list_identities(tmp_path, "owner", "killed", "leaving", "last").values()
    admits = [("--admit", load_or_create_identity(Path(path)).peer_id) for _, path in keys]
    with ExitStack() as stack:
        founder = TrainingPeer(
            stack, run_file, 0, "--new-swarm", "--out", str(out), "--metrics", "0", *owner,
            *chain(*admits),
        )  # fmt: skip
        (code,) = founder.wait_for("directory")["join_codes"].values()
        url = founder.wait_for("metrics")["url"]
        join = ("--join", code)
        killed = TrainingPeer(stack, run_file, 0, *join, *keys[0])
        killed.wait_for("update", update=0)  # it has joined before the run can begin
        by_name = (*join, "--corpus", str(tmp_path))
        leaving = TrainingPeer(stack, run_file, 1, *join, *keys[1])
        last = TrainingPeer(stack, "test", 1, *by_name, *keys[2])
        founder.wait_for("update", update=1)
        killed.process.kill()
        leaving.wait_for("online")
        leaving.process.terminate()
        trained = founder.wait_for("trained")
        last.wait_for("trained")
        assert read_metric(url, "shoal_peer_run_update") == NUM_UPDATES
        assert read_metric(url, 'shoal_peer_run_events_total{kind="member_left"}') >= 1
        for direction in ("received", "sent"):
            assert read_metric(url, f'shoal_peer_{direction}_bytes_total{{purpose="runs"}}') > 0

        exported = tmp_path / "exported"
        assert main(["export", "test", str(exported), *join, *owner, "--json"]) == 0
        (event,) = map(json.loads, capsys.readouterr().out.splitlines())
        assert event["lacks_files"] == ["tokenizer.json", "tokenizer_config.json"]
        corpus = ("--corpus", str(tmp_path))
        assert main(["export", "test", str(exported), *join, *owner, *corpus, "--json"]) == 0
        (event,) = map(json.loads, capsys.readouterr().out.splitlines())
        assert not event["lacks_files"]
        assert (event["update"], event["digest"]) == (NUM_UPDATES, trained["digest"])
        for command in (["export", "test", str(exported), *join], ["train", "test", *by_name]):
            assert main(command) == 2
            assert "does not admit this peer, 12D3Koo" in " ".join(capsys.readouterr().err.split())

        words = ["--weights", "fp32", "--kv-memory", "64M", "--no-operator", *join]
        serving = RunProcess(stack, "serve", str(exported), *words)
        serving.wait_for("online")
        words = ["generate", str(exported), "w1 w2", *join, "--max-new-tokens", "8", "--json"]
        assert main(words) == 0
        generated = json.loads(capsys.readouterr().out.splitlines()[-1])["text"]

        for peer in (founder, last, serving):
            peer.process.terminate()
        for peer in (founder, leaving, last, serving):
            _, errors = peer.process.communicate()
            assert peer.process.returncode == 0, errors
            # A peer whose mates have just gone may say that, and nothing else.
            assert all(LONELY in line for line in errors.splitlines()), errors
        assert killed.process.wait() == -signal.SIGKILL

    run = load_run(run_file)
    alone = train_alone(run, TokenShards.open(run.corpus, tmp_path, VOCABULARY))
    assert trained["digest"] == alone
    for folder in (out, exported):
        model: Any = AutoModelForCausalLM.from_pretrained(folder)
        weights = {name: weight.detach() for name, weight in model.named_parameters()}
        assert digest_tensors(weights) == trained["digest"]
        tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        assert tokenizer("w1 w2").input_ids == [1, 2]
        ids = model.generate(torch.tensor([[1, 2]]), max_new_tokens=8, do_sample=False)[0, 2:]
        assert generated.split() == tokenizer.decode(ids).split()


@pytest.mark.thorough
def test_stopped_process_is_left_out_and_comes_back_to_the_same_weights(tmp_path: Path) -> None:
    run_file = write_run(tmp_path, num_updates=NUM_UPDATES)
    with ExitStack() as stack:
        founder = TrainingPeer(stack, run_file, 0, "--new-swarm", "--out", str(tmp_path / "out"))
        (code,) = founder.wait_for("directory")["join_codes"].values()
        stopped, *others = (
            TrainingPeer(stack, run_file, stage, "--join", code) for stage in (0, 1, 1)
        )
        for peer in (stopped, *others):
            peer.wait_for("update")  # it is a member
        founder.wait_for("update", update=1)
        processes.stop(stopped.process.pid)
        founder.wait_for("member_left", stage=0)
        trained = founder.wait_for("trained")
        os.kill(stopped.process.pid, signal.SIGCONT)
        stopped.wait_for("update", update=NUM_UPDATES)
        stopped.wait_for("trained")
        for peer in (founder, stopped, *others):
            peer.process.terminate()
            _, errors = peer.process.communicate()
            assert peer.process.returncode == 0, errors

    run = load_run(run_file)
    alone = train_alone(run, TokenShards.open(run.corpus, tmp_path, VOCABULARY))
    assert trained["digest"] == alone


def test_peers_that_serve_train_a_run_as_well(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_file = write_run(tmp_path, num_updates=NUM_UPDATES)
    prompt = "Once upon a time"
    with ExitStack() as stack:
        words = ["--new-swarm", "--stage", "0", "--metrics", "0"]
        founder = SideTrainingPeer(stack, "0:4", str(run_file), *words)
        (code,) = founder.wait_for("directory")["join_codes"].values()
        url = founder.wait_for("metrics")["url"]
        join = ("--join", code)
        other = SideTrainingPeer(stack, "4:8", "test", *join, "--corpus", str(tmp_path))
        waiting = SideTrainingPeer(stack, "0:1", "another", *join, "--corpus", str(tmp_path))
        founder.wait_for("update", update=1)
        words = ["generate", "shoal-stories", prompt, *join, "--max-new-tokens", "8"]
        assert main([*words, "--json"]) == 0
        text = json.loads(capsys.readouterr().out.splitlines()[-1])["text"]
        for peer in (founder, other):
            peer.wait_for("trained")
        assert read_metric(url, "shoal_peer_run_update") == NUM_UPDATES
        assert read_metric(url, 'shoal_peer_received_bytes_total{purpose="runs"}') > 0
        assert main(["export", "test", str(tmp_path / "out"), *join, "--json"]) == 0
        (exported,) = map(json.loads, capsys.readouterr().out.splitlines())
        shown = "a peer that shows the run another; `shoal monitor --once` lists those there are"
        waiting.wait_for("waiting_for", what=shown)
        waiting.wait_for("online", span="0:1")  # it serves meanwhile
        for peer in (founder, other, waiting):
            peer.process.terminate()
        for peer in (founder, other, waiting):
            _, errors = peer.process.communicate()
            assert peer.process.returncode == 0, errors

    model: Any = AutoModelForCausalLM.from_pretrained(find_model(), dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(find_model())
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    expected = model.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :]
    assert text == tokenizer.decode(expected)
    run = load_run(run_file)
    alone = train_alone(run, TokenShards.open(run.corpus, tmp_path, VOCABULARY))
    assert (exported["update"], exported["digest"]) == (NUM_UPDATES, alone)


def test_run_that_fails_ends_with_exit_code_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_file = write_run(tmp_path, num_updates=NUM_UPDATES)
    text = run_file.read_text().replace("stage_borders = [2]\n", "")
    too_high = "learning_rate = 10.0\nweight_decay = 10.0"  # all weights grow 99 times per update
    run_file.write_text(text.replace("learning_rate = 0.01", too_high))

    assert main(["train", str(run_file), "--new-swarm", "--local", "--linger", "0"]) == 1

    said = " ".join(capsys.readouterr().err.split())
    assert "the run has stopped: the loss or gradients of part" in said
