"""Trains all stages of a run in this process."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ...peer.process.config import PeerEvent
from ...protocol.net.clock import SystemClock
from ...protocol.runs.training_run import TrainingRun
from ..options.quantities import count_of
from ..terminal.heavy_imports import importing_much
from ..terminal.interrupts import quitting_at_once
from ..terminal.reporter import Reporter
from ..terminal.terminal import Terminal
from .model_folder import describe_held_out_loss, keep_writing, write_losses, write_model
from .run_choice import open_corpus
from .run_file import load_run

if TYPE_CHECKING:
    from ...peer.engine.training.whole_run import WholeRun

_HEADING = "  update      loss  gradient norm  tokens/s"
_LINE = "{:>8}  {:>8.4f}  {:>13.4f}  {:>8.0f}"


def train_alone(options: argparse.Namespace, out: Path) -> int:
    """Train the run of a run file from its first update to its last, and save the model."""
    training = load_run(options.run_file)
    reporter = Reporter(Terminal(sys.stdout), Terminal(sys.stderr), options.json)
    progress = "Loading"
    with reporter.showing(lambda: progress):
        with quitting_at_once(options.json), importing_much():
            from torch import set_num_threads

            from ...peer.engine.training.run_plan import plan_run
            from ...peer.engine.training.whole_run import WholeRun
            from ...peer.hosting.hosted_model import read_free_bytes

        set_num_threads(options.run_threads)  # of sums and digests too, not only of passes
        plan_run(training).check_alone(read_free_bytes())
        shards = open_corpus(options, training)
        whole = WholeRun(training, options.run_threads)
        out.mkdir(parents=True, exist_ok=True)  # an error now, not after hours
        _tell_start(reporter, training, whole)
        progress = "Training"
        started_at = time.monotonic()
        losses, held_out = dict[int, float](), dict[int, float]()
        for update in whole.train(shards):
            now = time.monotonic()
            speed = training.tokens_per_update / (now - started_at)
            started_at = now
            number, norm = update.number + 1, update.gradient_norm
            losses[number] = update.loss
            reporter.tell(
                "update", [_LINE.format(number, update.loss, norm, speed)], update=number,
                loss=update.loss, gradient_norm=norm, tokens_per_second=round(speed, 1),
            )  # fmt: skip
            if training.has_held_out_loss(number):
                held_out[number] = loss = whole.measure_held_out_loss(shards)
                _tell_held_out(reporter, training, number, loss)
                started_at = time.monotonic()
        weights, files = whole.read_weights(), shards.tokenizer
        write = partial(write_model, out, training, whole.architecture, weights, files)
        for each in write, partial(write_losses, out, training, losses, held_out):
            asyncio.run(keep_writing(each, SystemClock(), partial(_tell_wait, reporter)))
    digest = whole.compute_weights_digest()
    lines = [f"Model: {out}", f"SHA-256 of its weights: {digest}"]
    reporter.tell(
        "trained", lines, model=str(out), digest=digest,
        held_out_loss=held_out.get(training.num_updates),
    )  # fmt: skip
    return 0


def _tell_held_out(reporter: Reporter, training: TrainingRun, update: int, loss: float) -> None:
    entropy = training.corpus.entropy
    lines = [describe_held_out_loss(loss, entropy)]
    reporter.tell("held_out", lines, update=update, loss=loss, entropy=entropy)


def _tell_wait(reporter: Reporter, event: PeerEvent) -> None:
    reporter.tell(event.name, [f"Waiting for {event.facts['what']}."], **event.facts)


def _tell_start(reporter: Reporter, training: TrainingRun, whole: WholeRun) -> None:
    stages = [str(stage.span) for stage in whole.stages]
    part = f"{training.rows_per_part} x {training.corpus.sequence_length} tokens"
    lines = [
        f"Run {training.name}: {count_of(len(stages), 'stage')} of blocks {', '.join(stages)}",
        f"{count_of(training.num_updates, 'update')} of "
        f"{count_of(training.parts_per_update, 'part')} of {part}",
        "",
        _HEADING,
    ]
    reporter.tell("run", lines, name=training.name, stages=stages, num_updates=training.num_updates)
