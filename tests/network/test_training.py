"""A run over real processes, of which one is killed and one leaves."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import warm_python
from training_runs import write_run
from transformers import AutoModelForCausalLM

from shoal.cli.training.run_file import load_run
from shoal.models.token_shards import TokenShards
from shoal.peer.engine.training.trainable_span import digest_tensors
from shoal.peer.engine.training.whole_run import WholeRun

pytestmark = [pytest.mark.network, pytest.mark.slow]

NUM_UPDATES = 30


class TrainingPeer:
    """A `shoal train` process. Ends with the stack."""

    def __init__(self, stack: ExitStack, run: Path | str, stage: int, *more: str) -> None:
        command = [sys.executable, "-P", "-m", "shoal.cli", "train", str(run), "--json"]
        command += ["--local", "--stage", str(stage), "--announce-period", "1", "--linger", "2"]
        self.process: Any = stack.enter_context(
            warm_python.Popen(
                [*command, *more], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        )
        stack.callback(self.process.kill)

    def wait_for(self, name: str, **facts: object) -> dict[str, Any]:
        """Read events until one has this name and these facts."""
        for line in self.process.stdout:
            event = json.loads(line)
            if event["event"] == name and event.items() >= facts.items():
                return event
        raise AssertionError(f"no {name}: {self.process.stderr.read()}")


def train_alone(run_file: Path) -> str:
    """Return the digest of the weights that one process comes to."""
    run = load_run(run_file)
    whole = WholeRun(run)
    for _ in whole.train(TokenShards.open(run.corpus, run_file.parent, whole.vocabulary_size)):
        pass
    return whole.compute_weights_digest()


def test_run_goes_on_after_a_kill_and_a_leave_and_comes_to_the_weights_of_one_process(
    tmp_path: Path,
) -> None:
    run_file, out = write_run(tmp_path, num_updates=NUM_UPDATES), tmp_path / "out"
    with ExitStack() as stack:
        founder = TrainingPeer(stack, run_file, 0, "--new-swarm", "--out", str(out))
        (code,) = founder.wait_for("directory")["join_codes"].values()
        killed = TrainingPeer(stack, run_file, 0, "--join", code)
        killed.wait_for("update", update=0)  # it has joined before the run can begin
        by_name = ("--join", code, "--corpus", str(tmp_path))
        others = [
            TrainingPeer(stack, run_file, 1, "--join", code),
            TrainingPeer(stack, "test", 1, *by_name),
        ]
        founder.wait_for("update", update=1)
        killed.process.kill()
        others[0].wait_for("online")
        others[0].process.terminate()
        trained = founder.wait_for("trained")
        for peer in (founder, *others):
            _, errors = peer.process.communicate()
            assert (peer.process.returncode, errors) == (0, "")
        assert killed.process.wait() == -signal.SIGKILL

    assert trained["digest"] == train_alone(run_file)
    model = AutoModelForCausalLM.from_pretrained(out)
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    assert digest_tensors(weights) == trained["digest"]
