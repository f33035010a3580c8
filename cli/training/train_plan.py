"""`shoal train-plan`: memory, bytes and expected speed of a training run, before anyone joins."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...protocol.runs.training_run import TrainingRun
from ..options.quantities import count_of, parse_count, parse_positive, parse_threads
from ..terminal.heavy_imports import importing_much
from ..terminal.interrupts import quitting_at_once
from ..terminal.reporter import Reporter
from ..terminal.terminal import Terminal
from .run_choice import choose_corpus_folder, open_corpus
from .run_file import load_run

if TYPE_CHECKING:
    from ...peer.engine.training.run_plan import RunPlan, SpeedPlan, StagePlan

_MEGABITS = (20, 100, 1000)
_MEMORY = "{:>5}  {:>8}  {:>8}  {:>9}  {:>9}  {:>11}  {:>8}  {:>8}"
_MEMORY_COLUMNS = (
    "stage", "blocks", "weights", "optimizer", "gradients", "activations", "copies", "together",
)  # fmt: skip
_BYTES = "{:>5}  {:>5}  {:>5}  {:>18}  {:>18}"
_SPEED = "{:>5}  {:>7}  {:>11}  {:>12}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `shoal train-plan`."""
    parser.add_argument("run_file", metavar="RUN", type=Path, help="run file (TOML)")
    parser.add_argument(
        "--peers", type=parse_count, action="append", metavar="N",
        help="number of peers to plan for; may be repeated (default: one, two and four for each "
        "stage)",
    )  # fmt: skip
    parser.add_argument(
        "--tokens-per-second", type=parse_positive, metavar="SPEED",
        help="speed at which one peer would train the whole model (default: measured here)",
    )  # fmt: skip
    parser.add_argument(
        "--corpus", type=Path, metavar="FOLDER",
        help="folder of the corpus shards, which are checked where they are there (default: that "
        "of the run file)",
    )  # fmt: skip
    parser.add_argument(
        "--threads", type=parse_threads, default=1, help="compute threads of a peer (default: 1)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(options: argparse.Namespace) -> int:
    """Print what a run needs."""
    training = load_run(options.run_file)
    reporter = Reporter(Terminal(sys.stdout), Terminal(sys.stderr), options.json)
    with reporter.showing(lambda: "Planning"):
        with quitting_at_once(options.json), importing_much():
            from torch import set_num_threads

            from ...peer.engine.training.run_plan import measure_tokens_per_second, plan_run
            from ...peer.hosting.hosted_model import read_free_bytes

        set_num_threads(options.threads)  # of all that is measured, not only of passes
        plan, free_bytes = plan_run(training), read_free_bytes()
        is_corpus_here = _has_files(training, choose_corpus_folder(options))
        if is_corpus_here:
            open_corpus(options, training)  # raises what `shoal train` would
        numbers = options.peers or [len(plan.stages) * times for times in (1, 2, 4)]
        speed: float = options.tokens_per_second or measure_tokens_per_second(
            training, options.threads, free_bytes
        )
    expected = [plan.expect(number, each, speed) for number in numbers for each in _MEGABITS]
    traffic = [_describe_traffic(plan, number) for number in numbers]
    lines = [
        *_list_memory(training, plan.stages, free_bytes),
        "",
        *_list_traffic(numbers, traffic),
        "",
        *_list_speeds(speed, expected),
    ]
    if not is_corpus_here:
        folder = choose_corpus_folder(options)
        lines += ["", f"The corpus is not in {folder}, and was not checked: give --corpus FOLDER."]
    stages = [
        {**dataclasses.asdict(one), "span": str(one.span), "memory_bytes": one.memory_bytes}
        for one in plan.stages
    ]
    reporter.tell(
        "plan", lines, name=training.name, tokens_per_update=training.tokens_per_update,
        tokens_per_second_of_one_peer=round(speed, 1), stages=stages,
        traffic=[each for one in traffic for each in one],
        speeds=[dataclasses.asdict(each) for each in expected], has_corpus=is_corpus_here,
        free_bytes=free_bytes,
    )  # fmt: skip
    return 0


def _has_files(training: TrainingRun, folder: Path) -> bool:
    """Return whether any file of the corpus is there: a plan needs none, but none may be wrong."""
    corpus = training.corpus
    files = (*corpus.shards, *corpus.held_out, *corpus.tokenizer)
    return any((folder / file.path).exists() for file in files)


def _describe_traffic(plan: RunPlan, num_peers: int) -> list[dict[str, Any]]:
    members = plan.count_members(num_peers)
    return [
        {
            "num_peers": num_peers,
            "stage": stage,
            "num_members": count,
            "activation_bytes": round(plan.count_activation_bytes(stage, count)),
            "averaging_bytes": round(plan.count_averaging_bytes(stage, members)),
        }
        for stage, count in enumerate(members)
    ]


def _list_memory(
    training: TrainingRun, stages: tuple[StagePlan, ...], free_bytes: int
) -> list[str]:
    from ...peer.engine.training.run_plan import show_bytes

    num_fitting = sum(stage.memory_bytes <= free_bytes for stage in stages)
    rows = [
        _MEMORY.format(
            index, str(stage.span), *map(show_bytes, (
                stage.weight_bytes + stage.cast_bytes, stage.optimizer_bytes,
                stage.gradient_bytes + stage.sum_bytes, stage.activation_bytes, stage.copy_bytes,
                stage.memory_bytes,
            ))
        )
        for index, stage in enumerate(stages)
    ]  # fmt: skip
    return [
        f"Memory of a peer, for {count_of(training.tokens_per_update, 'token')} in an update.",
        "Graphs of passes take up to half of what a machine has left beside it.",
        _MEMORY.format(*_MEMORY_COLUMNS),
        *rows,
        f"This machine has {show_bytes(free_bytes)} left: room for a peer of "
        f"{num_fitting} of the {count_of(len(stages), 'stage')}.",
    ]


def _list_traffic(numbers: list[int], traffic: list[list[dict[str, Any]]]) -> list[str]:
    from ...peer.engine.training.run_plan import show_bytes

    rows = [
        _BYTES.format(
            number, str(one["stage"]), str(one["num_members"]),
            show_bytes(one["activation_bytes"]), show_bytes(one["averaging_bytes"]),
        )
        for number, stages in zip(numbers, traffic, strict=True)
        for one in stages
    ]  # fmt: skip
    return [
        "A peer sends in each update, and gets as much:",
        _BYTES.format("peers", "stage", "of it", "activations", "averaging"),
        *rows,
    ]


def _list_speeds(speed: float, expected: list[SpeedPlan]) -> list[str]:
    rows = [
        _SPEED.format(
            each.num_peers, f"{each.megabits_per_second:,}", f"{each.tokens_per_second:,.0f}",
            each.bound,
        )
        for each in expected
    ]  # fmt: skip
    return [
        f"Expected where one peer would train {speed:,.0f} tokens/s of the whole model:",
        _SPEED.format("peers", "Mbit/s", "tokens/s", "bound by"),
        *rows,
    ]
