"""Held-out losses of a run in int8 mode beside those of plain PyTorch, for several seeds.

    make bench BENCHMARKS=training_benchmarks.int8_losses
    make bench BENCHMARKS=training_benchmarks.int8_losses ARGS="--seeds 3 --results losses.json"

Two stages with two peers each train in one process, over a network in memory. The plain loop has
the same initial weights, parts and optimizer. Printed are the held-out losses of both in nats per
token, and their relative difference; the losses of other seeds show how far runs differ anyway. Two
trainings run at once, with one thread each. `--results FILE` keeps each result, and a call with the
same options goes on from there.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM, LlamaConfig

from measuring.program import run_program
from measuring.report import TargetFigure, at_most
from measuring.side_by_side import compute_side_by_side
from shoal.cli.benchmarking.figure import describe_machine
from shoal.models.token_shards import TokenShards
from shoal.peer.engine.training.whole_run import WholeRun
from shoal.peer.process.config import PeerEvent, ignore
from shoal.peer.runs.run_peer import RunPeer, open_run
from shoal.peer.runs.run_resources import RunPeerConfig, make_compute
from shoal.peer.streams.service import JoinedPeer
from shoal.protocol.identity import Identity
from shoal.protocol.net.clock import SystemClock
from shoal.protocol.net.memory.loopback import LoopbackNetwork
from shoal.protocol.net.memory.memory_directory import MemoryDirectoryStore
from shoal.protocol.net.memory.memory_network import MemoryNetwork
from shoal.protocol.runs.run_record import sign_run
from shoal.protocol.runs.training_run import PartId, TrainingRun
from training_benchmarks.losses import tell_progress, train_plainly, write_run

_NUM_PEERS = 4
_HELD_OUT_PARTS = 16
_INT8, _PLAIN = "int8", "plain"
_LINE = "{:>6} {:>12} {:>12} {:>12}"


async def _train_int8(
    run: TrainingRun, folder: Path, note: Callable[[int], None]
) -> dict[str, Tensor]:
    """Return the weights at the end of a run over peers of stage 0 and 1."""
    network, store, clock = LoopbackNetwork(), MemoryDirectoryStore(), SystemClock()
    weights = asyncio.get_running_loop().create_future()
    over = asyncio.Event()

    def report(event: PeerEvent) -> None:
        if event.name == "update":
            note(int(str(event.facts["update"])))

    record = sign_run(Identity.generate(), run)

    async def serve(number: int) -> None:
        config = RunPeerConfig(record, folder, (number % 2,), number == 0, pause_seconds=0.02)
        host = MemoryNetwork(network, store, clock, f"peer{number}")
        told = report if number == 0 else ignore
        async with (
            open_run(config, clock, compute=compute) as resources,
            JoinedPeer.join(host, Identity.generate(), clock, told) as joined,
            RunPeer.join(joined, resources, clock, told) as peer,
        ):

            async def until() -> None:
                await peer.loop.is_over.wait()
                if number == 0:
                    weights.set_result((await peer.loop.fetch_weights())[0])
                    over.set()
                await over.wait()

            await peer.serve(until())

    with ExitStack() as stack:
        compute = make_compute(stack)  # one for all: torch's settings belong to the process
        async with asyncio.TaskGroup() as tasks:
            for number in range(_NUM_PEERS):
                tasks.create_task(serve(number))
    return weights.result()


def _measure_held_out(run: TrainingRun, shards: TokenShards, weights: dict[str, Tensor]) -> float:
    """Return the loss on parts behind those of the last update."""
    model: Any = AutoModelForCausalLM.from_config(LlamaConfig(**run.model))
    model.load_state_dict(weights, strict=False)
    model.eval()
    losses = list[float]()
    with torch.inference_mode():
        for index in range(_HELD_OUT_PARTS):
            update, rest = divmod(index, run.parts_per_update)
            tokens, labels = shards.read_part(run, PartId(run.num_updates + update, rest))
            logits = model(tokens, use_cache=False).logits
            losses.append(functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).item())
    return statistics.mean(losses)


def _train(options: argparse.Namespace, mode: str, seed: int) -> float:
    """Return the held-out loss of one training."""
    torch.set_num_threads(1)
    note = partial(tell_progress, f"seed {seed}, {mode}", options.updates)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run, shards = write_run(
            folder, options.optimizer, options.updates, options.parts,
            num_held_out=_HELD_OUT_PARTS, seed=seed, mode="int8", num_blocks=options.blocks,
        )  # fmt: skip
        if mode == _INT8:
            weights = asyncio.run(_train_int8(run, folder, note))
        else:
            start = {key: weight.clone() for key, weight in WholeRun(run).read_weights().items()}
            _, weights = train_plainly(run, shards, start, note=note)
        return _measure_held_out(run, shards, weights)


class _Results:
    """Held-out losses by mode and seed, in a file where one is named."""

    def __init__(self, file: Path | None, setting: str) -> None:
        self._file = file
        self._setting = setting
        self._all: dict[str, dict[str, float]] = {}
        """By setting: one file may hold those of several."""
        if file is not None and file.exists():
            self._all = json.loads(file.read_text())
        self._losses = self._all.setdefault(setting, {})

    def find(self, mode: str, seed: int) -> float | None:
        """Return a loss if it is there."""
        return self._losses.get(f"{mode} {seed}")

    def keep(self, mode: str, seed: int, loss: float) -> None:
        """Add a loss, and write the file."""
        self._losses[f"{mode} {seed}"] = loss
        if self._file is not None:
            self._file.write_text(json.dumps(self._all, indent=1))


def main() -> None:
    """Train in both ways with each seed, and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--updates", type=int, default=100)
    parser.add_argument("--parts", type=int, default=4)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--optimizer", default="adamw", choices=["adamw", "muon"])
    parser.add_argument("--results", type=Path, metavar="FILE")
    options = parser.parse_args()
    setting = (
        f"{options.updates} updates of {options.parts} parts of 4 x 128 tokens, "
        f"{options.blocks} blocks, {options.optimizer}"
    )
    print(f"{describe_machine()}\n{setting}\n", flush=True)
    results = _Results(options.results, setting)
    jobs = {
        (mode, seed): partial(_train, options, mode, seed)
        for seed in range(options.seeds)
        for mode in (_INT8, _PLAIN)  # the longer one first
        if results.find(mode, seed) is None
    }
    for (mode, seed), loss in compute_side_by_side(jobs, 2):
        results.keep(mode, seed, loss)
    _print_table(results, options.seeds)


def _print_table(results: _Results, num_seeds: int) -> None:
    print(_LINE.format("seed", "plain", "int8", "difference"))
    plain_losses, differences = list[float](), list[float]()
    for seed in range(num_seeds):
        plain, int8 = results.find(_PLAIN, seed), results.find(_INT8, seed)
        assert plain is not None
        assert int8 is not None
        plain_losses.append(plain)
        differences.append(100 * (int8 - plain) / plain)
        print(_LINE.format(seed, f"{plain:.4f}", f"{int8:.4f}", f"{differences[-1]:+.2f} %"))
    spread = (max(plain_losses) - min(plain_losses)) / statistics.mean(plain_losses)
    print(f"\nplain losses of the seeds differ by {100 * spread:.2f} %")
    figure = TargetFigure(
        "int8: loss above the plain one, at most", max(differences), "%", at_most(0.5)
    )
    print(figure.to_line())


if __name__ == "__main__":
    run_program(main)
