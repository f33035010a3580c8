"""Writes a trained model as transformers reads it, and the plot of its losses."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ...client.adapters.whole_files import write_files
from ...models.tokenizer_files import read_tokenizer
from ...peer.process.config import Report, Waits
from ...protocol.errors import UsageError
from ...protocol.net.clock import Clock
from ...protocol.net.retry import Backoff, Retry
from ...protocol.runs.training_run import TrainingRun
from ..finetuning.loss_plot import draw_losses, save_losses

if TYPE_CHECKING:
    from torch import Tensor

_PAUSES = Backoff(first_seconds=1.0, longest_seconds=30.0)


def check_folder(folder: Path) -> None:
    """Raise UsageError unless files can be written into a folder, which need not be there yet.

    So that this is told before a run, and not behind it; nothing is made.
    """
    try:
        there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    except OSError as error:
        raise UsageError(f"{folder} can be no folder: {error.strerror}") from error
    if not there.is_dir():
        raise UsageError(f"{folder} can be no folder: {there} is a file")
    if not os.access(there, os.W_OK | os.X_OK):
        raise UsageError(f"cannot write into {there}: choose another folder than {folder}")


def find_tokenizer(training: TrainingRun, folder: Path | None) -> dict[str, bytes]:
    """Return the files of a run's tokenizer from the folder of its corpus; none without a folder.

    Raises UsageError where one is not that of the run.
    """
    return {} if folder is None else read_tokenizer(training.corpus, folder)


def write_model(
    folder: Path,
    training: TrainingRun,
    architecture: str,
    weights: Mapping[str, Tensor],
    tokenizer: Mapping[str, bytes],
) -> None:
    """Write weights, configuration and tokenizer into a folder; no file is ever there in part.

    `architecture` is the name of the model's class in transformers. Raises OSError.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    from ...models.shells.shell_opening import UNSAFE_FIELDS

    # Whoever wrote the run must not choose code that transformers downloads with this folder.
    model = {name: value for name, value in training.model.items() if name not in UNSAFE_FIELDS}
    config = {"architectures": [architecture], **model, "dtype": "float32"}
    contiguous = {name: weight.contiguous() for name, weight in weights.items()}
    writes: dict[str, Callable[[Path], object]] = {
        "model.safetensors": lambda path: save_file(contiguous, path, metadata={"format": "pt"}),
        **{name: partial(Path.write_bytes, data=data) for name, data in tokenizer.items()},
        "config.json": lambda path: path.write_text(json.dumps(config, indent=2) + "\n"),
    }
    try:
        write_files(folder, writes)
    except (OSError, SafetensorError) as error:  # a full disk is either
        raise OSError(f"cannot write the model to {folder}: {error}") from error


def write_losses(
    folder: Path,
    training: TrainingRun,
    losses: Mapping[int, float],
    held_out: Mapping[int, float],
) -> None:
    """Write the losses of a run as a table and a plot; those of some updates may be missing.

    `held_out` are the losses on the held-out shards, after so many updates. Raises OSError.
    """
    listed = [losses.get(update + 1) for update in range(training.num_updates)]
    title, plot = f"{training.name}, trained from scratch", folder / "losses.png"
    try:
        save_losses(listed, held_out, folder / "losses.csv")
        draw_losses(listed, held_out, title, plot, training.corpus.entropy, "held-out text")
    except OSError as error:
        raise OSError(f"cannot write the losses to {folder}: {error}") from error


async def keep_writing(write: Callable[[], None], clock: Clock, report: Report) -> None:
    """Write what is in memory only, again where it cannot be written: a full disk costs no run."""
    attempts, waits = Retry(_PAUSES, clock), Waits(report)
    while True:
        try:
            return await asyncio.to_thread(write)
        except OSError as error:
            waits.note(f"room on a disk; this is lost if the process ends before: {error}")
            attempts.note_failure()
            await attempts.pause()


def describe_held_out_loss(loss: float, entropy: float | None) -> str:
    """Return the held-out loss for people, beside its limit where that is known.

    >>> describe_held_out_loss(1.23, 1.1)
    'Held-out loss: 1.2300 nats per token; entropy of the corpus: 1.1000.'
    """
    limit = "" if entropy is None else f"; entropy of the corpus: {entropy:.4f}"
    return f"Held-out loss: {loss:.4f} nats per token{limit}."
