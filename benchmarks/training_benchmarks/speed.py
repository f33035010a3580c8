"""Speed of training over peers beside that of plain PyTorch.

    make bench BENCHMARKS=training_benchmarks.speed ARGS="--hidden 512 --updates 4"
    make bench BENCHMARKS=training_benchmarks.speed ARGS="--hidden 512 --updates 4 --recompute"
    make bench BENCHMARKS=training_benchmarks.speed ARGS="--stages 4"

Compared are the tokens per second of two stages or `--stages`, each on one peer with one thread,
of an ordinary loop with two threads, and of DDP over gloo on two ranks with one thread each. Peers
are processes; the first update does not count. With `--recompute` they keep no graphs of passes, as
on machines with little memory, and compute each forward pass before the last stage twice.

`shoal train-plan` predicts the same from a few passes through one block. It knows neither cores
that several peers share nor recomputation, so only two stages that keep graphs have a target.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from measuring.program import run_program
from measuring.report import TargetFigure, at_least, at_most
from shoal.cli.benchmarking.figure import Figure, describe_machine
from shoal.peer.engine.training.run_plan import measure_tokens_per_second, plan_run
from shoal.protocol.runs.training_run import TrainingRun
from training_benchmarks.members import MemberSettings, RunSizes, start_members, write_run
from training_benchmarks.plain_training import train_distributed, train_plainly

_TARGETS = {128: 0.7, 512: 0.85}
"""Of the ratio to plain PyTorch with two stages, by hidden size."""

_RECOMPUTING_TARGETS = {512: 0.65}
"""The same, where graphs of passes are not kept."""

_MOST_OFF = 1.25
"""By what factor the predicted speed may be above or below the measured one."""

_LOOPBACK_MEGABITS = 10_000.0


def compute_rate(run: TrainingRun, times: Sequence[float]) -> float:
    """Return the tokens per second between the first update and the last one."""
    return run.tokens_per_update * (len(times) - 1) / (times[-1] - times[0])


def predict_rate(run: TrainingRun, num_peers: int) -> float:
    """Return the tokens per second that `shoal train-plan` predicts, with a thread for each peer.

    It measures this machine, where nothing else may run meanwhile.
    """
    torch.set_num_threads(1)  # of all that is measured, not only of passes
    alone = measure_tokens_per_second(run, num_threads=1)
    return plan_run(run).expect(num_peers, _LOOPBACK_MEGABITS, alone).tokens_per_second


def measure(sizes: RunSizes, keeps_graphs: bool) -> list[Figure]:
    """Measure the run, and what it is compared with."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        run = write_run(folder, sizes)
        plain = compute_rate(run, list(train_plainly(run, folder, 2)))
        distributed = compute_rate(run, train_distributed(run, folder))
        predicted = predict_rate(run, sizes.num_stages)
        settings = MemberSettings(name, 0, keeps_graphs=keeps_graphs)
        first, *_ = start_members(settings, stack, 1, sizes.num_stages)
        first.wait_for("trained")
        updates = first.list_events("update")
        speed = compute_rate(run, [event.at for event in updates if event.facts["update"]])
    targets = _TARGETS if keeps_graphs else _RECOMPUTING_TARGETS
    target = targets.get(sizes.hidden_size, 0.0) if sizes.num_stages == 2 else 0.0
    is_planned = sizes.num_stages == 2 and keeps_graphs
    off = Figure("prediction off by a factor of", max(predicted / speed, speed / predicted), "x")
    return [
        Figure(f"hidden size {sizes.hidden_size}: plain PyTorch, 2 threads", plain, "tok/s"),
        Figure("DDP over gloo, 2 ranks, 1 thread each", distributed, "tok/s"),
        Figure(f"{sizes.num_stages} stages x 1 peer, 1 thread each", speed, "tok/s"),
        TargetFigure("ratio to plain PyTorch", speed / plain, "x", at_least(target)),
        Figure("ratio to DDP", speed / distributed, "x"),
        Figure("predicted by shoal train-plan", predicted, "tok/s"),
        TargetFigure(off.name, off.value, off.unit, at_most(_MOST_OFF)) if is_planned else off,
    ]


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--updates", type=int, default=6)
    parser.add_argument("--parts", type=int, default=16)
    parser.add_argument("--recompute", action="store_true")
    options = parser.parse_args()
    print(describe_machine(), flush=True)
    sizes = RunSizes(options.updates, options.parts, options.hidden, num_stages=options.stages)
    for figure in measure(sizes, not options.recompute):
        print(figure.to_line())


if __name__ == "__main__":
    run_program(main)
