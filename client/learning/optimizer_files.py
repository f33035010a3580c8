"""The state of an optimizer as a file, which is checked before use."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ...protocol.errors import UsageError
from .checkpoints import make_damage_text

_FILE = "optimizer.safetensors"


def save_optimizer(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], folder: Path
) -> None:
    """Write what AdamW remembers of each parameter into a folder."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{name}/{key}"] = value.contiguous()
    save_file(tensors, folder / _FILE)


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
        tensors = load_file(folder / _FILE)
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
            raise ValueError(f"{_FILE} lacks {key} of {name}")
        if value.shape != like.shape or value.dtype != like.dtype:
            raise ValueError(f"{key} of {name} in {_FILE} has another shape or type")
        if not value.isfinite().all() or (key != "exp_avg" and value.min() < 0):
            raise ValueError(f"{key} of {name} in {_FILE} holds NaN, infinity or negative values")
        state[key] = value
    return state
