"""Train a model over four processes, kill two, add one, and compare the weights: `make train-demo`.

Beside the peers, one process trains the same run alone. Both print the SHA-256 of their weights,
and the example ends with 3 unless these are equal. `--seed N` draws the first weights, the order of
the corpus and who is killed when. With `--without U:I`, the process that trains alone leaves part I
of update U out, to show that a single lost part changes the weights.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from story_run import write_run

DIFFERENT = 3
"""The exit code where the weights differ."""

_MOST_SECONDS = 300.0
_NUM_UPDATES = 30


class Peer:
    """A process that trains a stage."""

    def __init__(self, folder: Path, stage: int, *more: str) -> None:
        self.stage = stage
        self.events: dict[str, dict[str, object]] = {}
        """The last event of each name."""
        command = [sys.executable, "-P", "-m", "shoal.cli", "train", str(folder / "run.toml")]
        command += ["--local", "--json", "--stage", str(stage), "--announce-period", "2"]
        command += ["--silence", "5", "--linger", "3", "--end-with-stdin", *more]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            event = json.loads(line)
            self.events[event["event"]] = event

    @property
    def update(self) -> int:
        """How many updates it has applied; -1 before it has joined the run."""
        return int(str(self.events.get("update", {"update": -1})["update"]))

    def wait_for(self, event: str) -> dict[str, object]:
        """Return an event as soon as it has come."""
        deadline = time.monotonic() + _MOST_SECONDS
        while event not in self.events:
            if time.monotonic() > deadline or self.process.poll() is not None:
                raise SystemExit(f"a peer of stage {self.stage} ended without the event {event}")
            time.sleep(0.05)
        return self.events[event]

    def close(self) -> None:
        """End the process, as the end of this one would."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def train_alone(folder: Path, left_out: tuple[int, int] | None) -> str:
    """Train the run in this process; return the digest of the weights."""
    from shoal.cli.training.run_file import load_run
    from shoal.models.token_shards import TokenShards
    from shoal.peer.engine.training.whole_run import WholeRun
    from shoal.protocol.runs.training_run import PartId

    run = load_run(folder / "run.toml")
    whole = WholeRun(run)
    shards = TokenShards.open(run.corpus, folder, whole.vocabulary_size)
    for _ in whole.train(shards, {PartId(*left_out)} if left_out else set()):
        pass
    return whole.compute_weights_digest()


def train_with_kills(folder: Path, rng: random.Random, peers: list[Peer]) -> str:
    """Train the run over peers that come and go; return the digest of the weights."""
    started_at = time.monotonic()
    peers.append(Peer(folder, 0, "--new-swarm", "--out", str(folder / "model")))
    codes = peers[0].wait_for("directory")["join_codes"]
    assert isinstance(codes, dict)
    join = ("--join", str(next(iter(codes.values()))))
    peers += [Peer(folder, stage, *join) for stage in (1, 0, 1)]
    first, *others = peers
    killed = rng.choice(others)
    second = rng.choice([peer for peer in others if peer.stage != killed.stage])
    for update, victim in ((rng.randrange(4, 9), killed), (rng.randrange(19, 24), second)):
        wait_for_update(first, update)
        victim.process.kill()
        print_at(started_at, f"killed a peer of stage {victim.stage} in update {first.update}")
        if victim is killed:
            peers.append(Peer(folder, victim.stage, *join))
            peers[-1].wait_for("update")
            print_at(started_at, f"another peer joined in update {peers[-1].update}")
    digest = str(first.wait_for("trained")["digest"])
    loss = float(str(first.events["update"]["loss"]))
    print_at(started_at, f"{_NUM_UPDATES} updates are over, the last loss was {loss:.3f} nats")
    return digest


def wait_for_update(peer: Peer, update: int) -> None:
    """Wait until a peer has come to an update."""
    deadline = time.monotonic() + _MOST_SECONDS
    while peer.update < update:
        if time.monotonic() > deadline or peer.process.poll() is not None:
            raise SystemExit(f"the run did not come to update {update}")
        time.sleep(0.02)


def print_at(started_at: float, text: str) -> None:
    """Print what has happened, and when."""
    print(f"{time.monotonic() - started_at:5.1f} s  {text}", flush=True)


def read_part(text: str) -> tuple[int, int]:
    """Return a part of the form U:I."""
    update, _, index = text.partition(":")
    return int(update), int(index)


def main() -> int:
    """Run it; return 0, or DIFFERENT."""
    parser = argparse.ArgumentParser(description="Train a model over peers that are killed.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--without", type=read_part, metavar="U:I")
    options = parser.parse_args()
    peers: list[Peer] = []
    with (
        tempfile.TemporaryDirectory() as name,
        ProcessPoolExecutor(1, get_context("spawn")) as pool,
    ):
        folder = Path(name)
        write_run(folder, options.seed, parts=4, length=64)
        use_adamw(folder / "run.toml")
        print(f"Training {_NUM_UPDATES} updates of 4 parts over 2 stages x 2 peers.", flush=True)
        alone: Future[str] = pool.submit(train_alone, folder, options.without)
        try:
            digest = train_with_kills(folder, random.Random(options.seed), peers)
            tell_story(folder / "model")
        finally:
            for peer in peers:
                peer.close()
        print(f"over peers  {digest}\nalone       {alone.result()}")
    if digest != alone.result():
        print("The weights differ.")
        return DIFFERENT
    print("The weights are equal.")
    return 0


def use_adamw(run_file: Path) -> None:
    """Let AdamW update all weights: Muon's products in bfloat16 take most of such short updates."""
    lines = run_file.read_text().splitlines()
    lines = [line for line in lines if not line.startswith("optimizer")]
    adamw = 'optimizer = { name = "adamw", learning_rate = 0.005 }'
    run_file.write_text("\n".join([*lines, adamw, ""]))


def tell_story(folder: Path) -> None:
    """Load the model as any other one, and let it write."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokens = tokenizer("Once", return_tensors="pt")
    text = tokenizer.decode(model.generate(**tokens, max_new_tokens=12, do_sample=False)[0])
    print(f"transformers reads the model: {text!r}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
