"""Checkpoints of a run: folders with safetensors and JSON, each whole or not there at all.

The state of its optimizer is one of the files, and is checked before use.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ...protocol.errors import UnavailableError, UsageError
from ..adapters.whole_files import flush

NUM_KEPT = 2
"""The newest, and the one before it in case that the newest learned something bad."""

_NAME = re.compile(r"checkpoint-(\d{6,12})")
_STATE_FILE = "state.json"
_OPTIMIZER_FILE = "optimizer.safetensors"
_PART_NAME = ".checkpoint.part"


@dataclass
class RunProgress:
    """The progress of a run, and its losses so far."""

    num_updates: int
    """Updates behind it, those that were skipped as well."""
    losses: list[float | None] = field(default_factory=list)
    """Of each update; None where it was skipped."""
    eval_losses: dict[int, float] = field(default_factory=dict)
    """By the number of updates before."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Facts of the run, which must be the same when it is resumed."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Its training settings, which may change when the run is resumed."""
    options: dict[str, str] = field(default_factory=dict[str, str])
    """Options of the caller in JSON types, which are stored and returned unread."""

    def to_json(self) -> str:
        """Return it as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> RunProgress:
        """Return the progress that `to_json` encoded; raises ValueError for anything else."""
        try:
            progress = _PROGRESS.validate_json(text)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"]))
            raise ValueError(f"{place}: {first['msg']}" if place else first["msg"]) from error
        if len(progress.losses) != progress.num_updates:
            raise ValueError("its fields do not match each other")
        return progress


_PROGRESS = TypeAdapter(RunProgress)


def name_checkpoint(num_updates: int) -> str:
    """Return the name of the folder that holds a run after so many updates."""
    return f"checkpoint-{num_updates:06}"


class Checkpoints:
    """The checkpoints in the folder of a run; the last two are kept.

    A folder is for one run: those of two could not be told apart, and one would delete the other's.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find(self) -> list[Path]:
        """Return all checkpoints, the oldest first."""
        if not self.folder.is_dir():
            return []
        found = [path for path in self.folder.iterdir() if _NAME.fullmatch(path.name)]
        return sorted(found, key=lambda path: int(path.name.partition("-")[2]))

    def save(self, progress: RunProgress, write: Callable[[Path], None]) -> Path:
        """Write a checkpoint, with what `write` puts into its folder besides; return the folder.

        Raises UnavailableError when the disk does not take it; what was there before stays.
        """
        path = self.folder / name_checkpoint(progress.num_updates)
        part = self.folder / _PART_NAME
        shutil.rmtree(part, ignore_errors=True)  # of a run that was killed meanwhile
        try:
            with naming_failures(path):
                part.mkdir(parents=True)
                write(part)
                (part / _STATE_FILE).write_text(progress.to_json(), encoding="utf-8")
                for file in (*part.iterdir(), part):
                    flush(file)
                if path.exists():
                    shutil.rmtree(path)  # of the same update: nothing new is in it
                part.rename(path)
                flush(self.folder)
        finally:
            shutil.rmtree(part, ignore_errors=True)  # half of it would only fill the disk
        for old in self.find()[:-NUM_KEPT]:
            if old != path:  # somebody may have put later ones there
                shutil.rmtree(old, ignore_errors=True)
        return path

    def load_newest(self) -> RunProgress:
        """Load the newest undamaged checkpoint; raises UsageError without one."""
        found = self.find()
        if not found:
            raise UsageError(
                f"there is no checkpoint in {self.folder}; leave out --resume to start a new run"
            )
        return self.load_progress(found[-1])

    def load_progress(self, path: Path) -> RunProgress:
        """Return the progress of the run; raises UsageError when the checkpoint is damaged."""
        try:
            return RunProgress.from_json((path / _STATE_FILE).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UsageError(make_damage_text(path, error)) from error


@contextmanager
def naming_failures(path: Path) -> Iterator[None]:
    """Raise UnavailableError with the file or folder that cannot be written."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise UnavailableError(f"cannot write to {path}: {reason:.200}") from error


def make_damage_text(path: Path, error: Exception) -> str:
    """Return a sentence about a checkpoint that cannot be read."""
    reason = getattr(error, "strerror", None) or " ".join(str(error).split())
    return f"{path} is damaged ({reason:.200}); delete it to continue from the previous checkpoint"


def save_optimizer(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], folder: Path
) -> None:
    """Write what AdamW remembers of each parameter into a folder."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{name}/{key}"] = value.contiguous()
    save_file(tensors, folder / _OPTIMIZER_FILE)


def load_optimizer(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, nn.Parameter],
    folder: Path,
    has_updates: bool,
) -> None:
    """Take what `save_optimizer` wrote; raises UsageError, and takes nothing, if it is damaged.

    Before the first update AdamW remembers nothing.
    """
    try:
        tensors = load_file(folder / _OPTIMIZER_FILE)
        states: dict[Tensor, dict[str, Tensor]] = {
            parameter: _take_state(tensors, name, parameter)
            for name, parameter in parameters.items()
            if has_updates
        }
    except (OSError, SafetensorError, ValueError) as error:
        raise UsageError(make_damage_text(folder, error)) from error
    optimizer.state.update(states)


def _take_state(
    tensors: Mapping[str, Tensor], name: str, parameter: nn.Parameter
) -> dict[str, Tensor]:
    """Return what AdamW needs of one parameter; raises ValueError unless all of it is sound."""
    likes = {"step": torch.tensor(0.0), "exp_avg": parameter, "exp_avg_sq": parameter}
    state: dict[str, Tensor] = {}
    for key, like in likes.items():
        value = tensors.get(f"{name}/{key}")
        if value is None:
            raise ValueError(f"{_OPTIMIZER_FILE} lacks {key} of {name}")
        if value.shape != like.shape or value.dtype != like.dtype:
            raise ValueError(f"{key} of {name} in {_OPTIMIZER_FILE} has another shape or type")
        if not value.isfinite().all() or (key != "exp_avg" and value.min() < 0):
            raise ValueError(
                f"{key} of {name} in {_OPTIMIZER_FILE} holds NaN, infinity or negative values"
            )
        state[key] = value
    return state
