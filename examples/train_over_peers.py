"""Train a model over four processes, kill two, add one, and compare the weights: `make train-demo`.

Beside the peers, one process trains the same run alone. Both print the SHA-256 of their weights and
the loss on held-out text, and the example ends with 3 unless these are equal. `--seed N` draws the
first weights, the order of the corpus and who is killed when. With `--without U:I`, the process
that trains alone leaves part I of update U out, to show that a single lost part changes the
weights.
"""

import argparse
import json
import os
import random
import sys
import tempfile
import threading
import time
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

DIFFERENT = 3
"""The exit code where the weights differ."""

_MOST_SECONDS = 300.0
_NUM_UPDATES = 30

_PROCESSES = get_context("forkserver")
"""Processes that are forked from one that has imported torch and transformers, which takes each of
them seconds of a core otherwise."""

_IMPORTED = [
    "shoal.cli.training.train",
    "shoal.peer.runs.run_peer",
    "shoal.peer.engine.training.whole_run",
    "shoal.protocol.net.dht.hivemind_directory",
    "shoal.protocol.net.tcp.tcp_transport",
    "transformers.convert_slow_tokenizer",
    "transformers.generation.utils",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.llama.modeling_llama",
]


class Trained(NamedTuple):
    """What came of a training."""

    digest: str
    """Of the weights."""
    held_out_loss: float


class Peer:
    """A process that trains a stage: `shoal train`."""

    def __init__(self, folder: Path, stage: int, *more: str) -> None:
        self.stage = stage
        self.events: dict[str, dict[str, object]] = {}
        """The last event of each name."""
        arguments = ["train", str(folder / "run.toml"), "--local", "--json"]
        arguments += ["--stage", str(stage), "--announce-period", "2", "--silence", "5"]
        arguments += ["--linger", "3", "--end-with-stdin", *more]
        its_stdin, self._stdin = _PROCESSES.Pipe(duplex=False)
        self._stdout, its_stdout = _PROCESSES.Pipe(duplex=False)
        self.process = _PROCESSES.Process(target=run_shoal, args=(arguments, its_stdin, its_stdout))
        self.process.start()
        its_stdin.close()
        its_stdout.close()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        with open(self._stdout.fileno(), closefd=False) as lines:
            for line in lines:
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
            if time.monotonic() > deadline or not self.process.is_alive():
                raise SystemExit(f"a peer of stage {self.stage} ended without the event {event}")
            time.sleep(0.05)
        return self.events[event]

    def close(self) -> None:
        """End the process, as the end of this one would."""
        self._stdin.close()
        self.process.join()


def run_shoal(arguments: list[str], stdin: Connection, stdout: Connection) -> None:
    """Be the process of a command line, with these streams."""
    from shoal.cli.main import main as run_command

    os.dup2(stdin.fileno(), 0)
    os.dup2(stdout.fileno(), 1)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.exit(run_command(arguments))


def write_stories(folder: Path, seed: int) -> None:
    """Write the run and its corpus."""
    from story_run import write_run

    write_run(folder, seed, parts=4, length=32)


def train_alone(folder: Path, left_out: tuple[int, int] | None) -> Trained:
    """Train the run in this process."""
    from shoal.cli.training.run_file import load_run
    from shoal.models.token_shards import TokenShards
    from shoal.peer.engine.training.whole_run import WholeRun
    from shoal.protocol.runs.training_run import PartId

    run = load_run(folder / "run.toml")
    whole = WholeRun(run)
    shards = TokenShards.open(run.corpus, folder, whole.vocabulary_size)
    for _ in whole.train(shards, {PartId(*left_out)} if left_out else set()):
        pass
    return Trained(whole.compute_weights_digest(), whole.measure_held_out_loss(shards))


def train_with_kills(
    started_at: float, folder: Path, rng: random.Random, peers: list[Peer]
) -> Trained:
    """Train the run over peers that come and go."""
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
    told = first.wait_for("held_out")
    held_out_loss, entropy = float(str(told["loss"])), float(str(told["entropy"]))
    print_at(started_at, f"{held_out_loss:.3f} nats on held-out text; the limit is {entropy:.3f}")
    return Trained(digest, held_out_loss)


def wait_for_update(peer: Peer, update: int) -> None:
    """Wait until a peer has come to an update."""
    deadline = time.monotonic() + _MOST_SECONDS
    while peer.update < update:
        if time.monotonic() > deadline or not peer.process.is_alive():
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
    # No threads of numpy, and no CUDA, in the process that others are forked from; and one thread
    # of torch in each, as they share the cores.
    os.environ |= {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    _PROCESSES.set_forkserver_preload(_IMPORTED)
    started_at = time.monotonic()
    peers: list[Peer] = []
    with tempfile.TemporaryDirectory() as name, ProcessPoolExecutor(2, _PROCESSES) as pool:
        folder = Path(name)
        pool.submit(write_stories, folder, options.seed).result()
        print_at(started_at, f"training {_NUM_UPDATES} updates of 4 parts over 2 stages x 2 peers")
        alone: Future[Trained] = pool.submit(train_alone, folder, options.without)
        try:
            trained = train_with_kills(started_at, folder, random.Random(options.seed), peers)
            print(pool.submit(tell_story, folder / "model").result(), flush=True)
        finally:
            for peer in peers:
                peer.close()
        return compare(trained, alone.result())


def compare(over_peers: Trained, alone: Trained) -> int:
    """Print both digests; return the exit code."""
    print(f"over peers  {over_peers.digest}\nalone       {alone.digest}")
    if over_peers.digest != alone.digest:
        print("The weights differ.")
        return DIFFERENT
    if over_peers != alone:
        print(f"The weights are equal, but alone the held-out loss is {alone.held_out_loss}.")
        return DIFFERENT
    print("The weights are equal, and so are the losses on held-out text.")
    return 0


def tell_story(folder: Path) -> str:
    """Load the model as any other one, and let it write."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokens = tokenizer("Once", return_tensors="pt")
    text = tokenizer.decode(model.generate(**tokens, max_new_tokens=12, do_sample=False)[0])
    return f"transformers reads the model: {text!r}"


if __name__ == "__main__":
    sys.exit(main())
