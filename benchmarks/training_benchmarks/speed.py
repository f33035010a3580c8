"""Training from scratch over peers: beside plain PyTorch, and while peers are killed.

    make bench BENCHMARKS=training_benchmarks.speed ARGS="speed --hidden 512"
    make bench BENCHMARKS=training_benchmarks.speed ARGS="speed --stages 4"
    make bench BENCHMARKS=training_benchmarks.speed ARGS="kills --replicas 3 --updates 200"

`speed` compares tokens per second of two stages or `--stages`, each on one peer with one thread,
with those of an ordinary loop with two threads, and of DDP over gloo on two ranks. `kills` kills a
peer every 20 s, starts it again and compares the SHA-256 of the weights with that of one process.
Peers are processes of `shoal train`.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from measuring.report import TargetFigure, at_least
from shoal.cli.benchmarking.figure import Figure, describe_machine
from shoal.cli.training.run_file import load_run
from shoal.models.token_shards import TokenShards, write_shard
from shoal.peer.engine.training.whole_run import WholeRun
from shoal.protocol.runs.training_run import TrainingRun
from training_benchmarks.plain_training import train_distributed, train_plainly

_BUNDLED = Path(__file__).parents[2] / "models" / "shoal-stories" / "config.json"
_HEAD_DIM = 32
_ROWS, _TOKENS = 4, 128
_KILL_SECONDS = 20.0
_MOST_SECONDS = 3600.0
_TARGETS = {128: 0.7, 512: 0.85}
"""Of the ratio to plain PyTorch, by hidden size."""

_RUN = """name = "benchmark"
seed = 0
model = "config.json"
stage_borders = {borders}
num_updates = {updates}
parts_per_update = {parts}
rows_per_part = {rows}
corpus.sequence_length = {tokens}
corpus.shards = [{{ path = "tokens.bin", num_tokens = {num_tokens}, sha256 = "{sha256}" }}]
optimizer = {{ name = "adamw", learning_rate = 0.001 }}
"""


class Peer:
    """A process that trains a stage, and what it has told."""

    def __init__(self, folder: Path, stage: int, *more: str) -> None:
        self.stage = stage
        self.events: list[tuple[float, dict[str, Any]]] = []
        """Each with the time at which it came."""
        command = [sys.executable, "-P", "-m", "shoal.cli", "train", str(folder / "run.toml")]
        command += ["--local", "--json", "--stage", str(stage)]
        command += ["--silence", "5", "--linger", "3", "--end-with-stdin", *more]
        command += ["--out", tempfile.mkdtemp(dir=folder)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.events.append((time.perf_counter(), json.loads(line)))

    def list_events(self, name: str) -> list[tuple[float, dict[str, Any]]]:
        """Return the events of a name so far."""
        return [(when, event) for when, event in [*self.events] if event["event"] == name]

    def wait_for(self, name: str) -> dict[str, Any]:
        """Return the first event of a name as soon as it has come."""
        deadline = time.perf_counter() + _MOST_SECONDS
        while not (found := self.list_events(name)):
            if self.process.poll() is not None or time.perf_counter() > deadline:
                raise SystemExit(f"a peer of stage {self.stage} ended without the event {name}")
            time.sleep(0.05)
        return found[0][1]

    def close(self) -> None:
        """End the process as the end of this one would."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def write_run(
    folder: Path, hidden_size: int, updates: int, parts: int, stages: int = 2
) -> TrainingRun:
    """Write a run of the bundled architecture with another hidden size, over random tokens."""
    config = json.loads(_BUNDLED.read_text())
    num_heads = hidden_size // _HEAD_DIM
    config |= {"hidden_size": hidden_size, "intermediate_size": 3 * hidden_size}
    config |= {"num_attention_heads": num_heads, "num_key_value_heads": num_heads // 2}
    (folder / "config.json").write_text(json.dumps(config))
    num_tokens = min(updates, 20) * parts * _ROWS * _TOKENS + 1
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(config["vocab_size"], (num_tokens,), generator=generator).tolist()
    shard = write_shard(folder / "tokens.bin", tokens, config["vocab_size"]).model_dump()
    num_blocks = config["num_hidden_layers"]
    borders = [num_blocks * stage // stages for stage in range(1, stages)]
    sizes = {"updates": updates, "parts": parts, "rows": _ROWS, "tokens": _TOKENS}
    (folder / "run.toml").write_text(_RUN.format(borders=borders, **sizes, **shard))
    return load_run(folder / "run.toml")


def start_peers(folder: Path, replicas: int, stack: ExitStack, num_stages: int = 2) -> list[Peer]:
    """Start the peers of all stages; return them, the one that began the run first."""

    def start(stage: int, *join: str) -> Peer:
        peer = Peer(folder, stage, *join)
        stack.callback(peer.close)
        return peer

    first = start(0, "--new-swarm")
    code = next(iter(first.wait_for("directory")["join_codes"].values()))
    stages = [stage for _ in range(replicas) for stage in range(num_stages)]
    return [first, *(start(stage, "--join", code) for stage in stages[1:])]


def compute_rate(run: TrainingRun, times: list[float]) -> float:
    """Return the tokens per second between the first update and the last one."""
    return run.tokens_per_update * (len(times) - 1) / (times[-1] - times[0])


def measure_speed(hidden_size: int, updates: int, parts: int, stages: int) -> list[Figure]:
    """Measure the run, and plain PyTorch."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        run = write_run(folder, hidden_size, updates, parts, stages)
        plain = compute_rate(run, list(train_plainly(run, folder, 2)))
        distributed = compute_rate(run, train_distributed(run, folder))
        first, *_ = start_peers(folder, 1, stack, stages)
        first.wait_for("trained")
        times = [when for when, event in first.list_events("update") if event["update"]]
        speed = compute_rate(run, times)
    name = f"hidden size {hidden_size}: plain PyTorch, 2 threads"
    target = at_least(_TARGETS.get(hidden_size, 0.0) if stages == 2 else 0.0)
    return [
        Figure(name, plain, "tok/s"),
        Figure("DDP over gloo, 2 ranks, 1 thread each", distributed, "tok/s"),
        Figure(f"{stages} stages x 1 peer, 1 thread each", speed, "tok/s"),
        TargetFigure("ratio to plain PyTorch", speed / plain, "x", target),
        Figure("ratio to DDP", speed / distributed, "x"),
    ]


def measure_kills(replicas: int, updates: int, parts: int, seed: int) -> list[Figure]:
    """Kill a peer every 20 s until the run is over; compare the digests of its weights."""
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        run = write_run(folder, 128, updates, parts)
        peers = start_peers(folder, replicas, stack)
        code = next(iter(peers[0].wait_for("directory")["join_codes"].values()))
        num_kills, next_kill = 0, time.perf_counter() + _KILL_SECONDS
        while not any(peer.list_events("trained") for peer in peers):
            time.sleep(0.1)
            training = [peer for peer in peers if peer.list_events("update")]
            stages = [peer.stage for peer in training]
            spare = [peer for peer in training if stages.count(peer.stage) > 1]
            if time.perf_counter() < next_kill or not spare:
                continue
            victim = rng.choice(spare)
            victim.process.kill()
            peers[peers.index(victim)] = peer = Peer(folder, victim.stage, "--join", code)
            stack.callback(peer.close)
            num_kills, next_kill = num_kills + 1, time.perf_counter() + _KILL_SECONDS
        # One that was started again just now may have come too late.
        members = [peer for peer in peers if peer.list_events("update")]
        digests = {peer.wait_for("trained")["digest"] for peer in members}
        whole = WholeRun(run)
        for _ in whole.train(TokenShards.open(run.corpus, folder, whole.vocabulary_size)):
            pass
    is_equal = digests == {whole.compute_weights_digest()}
    name = f"2 stages x {replicas} peers, {updates} updates: kills"
    return [
        Figure(name, num_kills, ""),
        TargetFigure("weights equal those of one process", float(is_equal), "", at_least(1)),
    ]


def main() -> None:
    """Measure one of both."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("part", choices=["speed", "kills"])
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--updates", type=int, default=6)
    parser.add_argument("--parts", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(describe_machine())
    if options.part == "speed":
        figures = measure_speed(options.hidden, options.updates, options.parts, options.stages)
    else:
        figures = measure_kills(options.replicas, options.updates, options.parts, options.seed)
    for figure in figures:
        print(figure.to_line())


if __name__ == "__main__":
    main()
