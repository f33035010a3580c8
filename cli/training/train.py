"""`shoal train`: train a model from scratch, all of its stages in this process."""

import argparse
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ...protocol.errors import UsageError
from ...protocol.runs.training_run import TrainingRun
from ..options.quantities import count_of
from ..terminal.heavy_imports import importing_much
from ..terminal.interrupts import quitting_at_once
from ..terminal.reporter import Reporter
from ..terminal.terminal import Terminal
from .run_file import load_run

if TYPE_CHECKING:
    from torch import Tensor

    from ...peer.engine.training.whole_run import WholeRun

_LINE = "{:>8}  {:>8}  {:>13}  {:>8}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `shoal train`."""
    parser.add_argument("run_file", metavar="RUN", type=Path, help="run file (TOML)")
    parser.add_argument(
        "--out", required=True, type=Path, metavar="FOLDER",
        help="output folder for the model, in transformers' format",
    )  # fmt: skip
    parser.add_argument(
        "--corpus", type=Path, metavar="FOLDER",
        help="folder of the corpus shards (default: that of the run file)",
    )  # fmt: skip
    parser.add_argument("--threads", type=int, default=1, help="compute threads (default: 1)")
    parser.add_argument("--json", action="store_true", help="print one JSON object per event")


def run(options: argparse.Namespace) -> int:
    """Train a run from its first update to its last, and save the model."""
    training = load_run(options.run_file)
    if options.threads < 1:
        raise UsageError(f"--threads must be at least 1, not {options.threads}")
    if options.out.exists() and not options.out.is_dir():
        raise UsageError(f"{options.out} is no folder")
    reporter = Reporter(Terminal(sys.stdout), Terminal(sys.stderr), options.json)
    progress = "Loading"
    with reporter.showing(lambda: progress):
        with quitting_at_once(options.json), importing_much():
            from ...models.token_shards import TokenShards
            from ...peer.engine.training.whole_run import WholeRun

        whole = WholeRun(training, options.threads)
        folder = options.corpus or options.run_file.parent
        shards = TokenShards.open(training.corpus, folder, whole.vocabulary_size)
        options.out.mkdir(parents=True, exist_ok=True)  # an error now, not after hours
        _tell_start(reporter, training, whole)
        progress = "Training"
        started_at = time.monotonic()
        for update in whole.train(shards):
            now = time.monotonic()
            speed = training.tokens_per_update / (now - started_at)
            started_at = now
            cells = (
                f"{update.number + 1}",
                f"{update.loss:.4f}",
                f"{update.gradient_norm:.4f}",
                f"{speed:.0f}",
            )
            reporter.tell(
                "update", [_LINE.format(*cells)], update=update.number + 1, loss=update.loss,
                gradient_norm=update.gradient_norm, tokens_per_second=round(speed, 1),
            )  # fmt: skip
        _save(whole, training, options.out)
    digest = whole.compute_weights_digest()
    lines = [f"Model: {options.out}", f"SHA-256 of its weights: {digest}"]
    reporter.tell("trained", lines, model=str(options.out), digest=digest)
    return 0


def _tell_start(reporter: Reporter, training: TrainingRun, whole: "WholeRun") -> None:
    stages = [str(stage.span) for stage in whole.stages]
    part = f"{training.rows_per_part} x {training.corpus.sequence_length} tokens"
    lines = [
        f"Run {training.name}, id {training.run_id[:16]}…: {count_of(len(stages), 'stage')} of "
        f"blocks {', '.join(stages)}",
        f"{count_of(training.num_updates, 'update')} of "
        f"{count_of(training.parts_per_update, 'part')} of {part}",
        "",
        _LINE.format("update", "loss", "gradient norm", "tokens/s"),
    ]
    reporter.tell(
        "run", lines, run_id=training.run_id, stages=stages, num_updates=training.num_updates
    )


def _save(whole: "WholeRun", training: TrainingRun, folder: Path) -> None:
    from safetensors.torch import save_file

    from ...client.adapters.whole_files import write_files

    weights: Mapping[str, Tensor] = whole.read_weights()
    config = {"architectures": [whole.architecture], **training.model, "dtype": "float32"}
    write_files(
        folder,
        {
            "model.safetensors": lambda path: save_file(
                {name: weight.contiguous() for name, weight in weights.items()},
                path,
                metadata={"format": "pt"},
            ),
            "config.json": lambda path: path.write_text(json.dumps(config, indent=2) + "\n"),
        },
    )
