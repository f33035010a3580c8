"""Trained parameters as a folder: a readable description, and safetensors.

The weights of the base model are not in it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ...kernels.wire_tensors import has_only_finite
from ...protocol.errors import UsageError
from ..adapters.peft_files import CONFIG_FILE, TRAINED_FILE
from ..adapters.whole_files import Write, write_files

ADAPTER_NAME = "adapter"
"""Name of the module that holds the active adapter of a model."""

TENSORS_FILE = "model.safetensors"
"""The name under which transformers' Trainer looks for what it resumes from."""

_MAX_DESCRIPTION_BYTES = 2**20

_OF_THE_BASE = ("model_type", "hidden_size", "num_hidden_layers", "vocab_size")
"""Config fields in which a model must agree with the model that was trained on."""


def leave_out_of_state_dicts(model: nn.Module, parameters: Iterable[nn.Parameter]) -> None:
    """Leave parameters out of state dicts, saved or loaded, while they are frozen.

    A parameter that is made trainable is saved again.
    """
    stored = set(parameters)

    def find_names(model: nn.Module) -> tuple[str, ...]:
        named = model.named_parameters(remove_duplicate=False)
        return tuple(name for name, value in named if value in stored and not value.requires_grad)

    def drop(model: nn.Module, state: dict[str, Tensor], prefix: str, _metadata: object) -> None:
        for name in find_names(model):
            state.pop(prefix + name, None)

    def ignore(model: nn.Module, incompatible: Any) -> None:
        # A model inside of another one has longer names there.
        names = find_names(model)
        missing = incompatible.missing_keys
        missing[:] = [key for key in missing if not key.endswith(names)]

    model.register_state_dict_post_hook(drop)
    model.register_load_state_dict_post_hook(ignore)


def leave_out_adapter(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return what of a state dict is not the adapter that is active in the model.

    >>> list(leave_out_adapter({"score.weight": Tensor(), "adapter.a.lora_A.weight": Tensor()}))
    ['score.weight']
    """
    return {name: value for name, value in state.items() if not name.startswith(f"{ADAPTER_NAME}.")}


def save_trained(
    directory: str | Path,
    config: Any,
    settings: Mapping[str, object] | None,
    state: Mapping[str, Tensor],
) -> None:
    """Write the trained parameters of a frozen model; readers never see partial files.

    `config` is that of the base model, `settings` is how it was opened for training; None where
    nobody opens the folder with `trained=`.
    """
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    writes: dict[str, Write] = {
        TENSORS_FILE: lambda path: save_file(tensors, path, metadata={"format": "pt"})
    }
    if settings is not None:
        base = {name: getattr(config, name) for name in _OF_THE_BASE}
        description = {"base_model": config.name_or_path, "base": base, "settings": dict(settings)}
        text = json.dumps(description, indent=2) + "\n"
        writes[TRAINED_FILE] = lambda path: path.write_text(text, encoding="utf-8")
    write_files(Path(directory), writes)


def read_settings(directory: str | Path, config: Any = None) -> dict[str, Any]:
    """Return the settings that a folder of `save_trained` was saved with.

    Raises UsageError when it is none, or, given a configuration, belongs to another model.
    """
    file = Path(directory) / TRAINED_FILE
    if not file.is_file():
        is_adapter = (file.parent / CONFIG_FILE).is_file()
        found = "a LoRA adapter; open it with active_adapter=" if is_adapter else "nothing trained"
        raise UsageError(f"{directory} has no {file.name}: it holds {found}")
    try:
        if file.stat().st_size > _MAX_DESCRIPTION_BYTES:
            raise ValueError("it is too large")
        description = json.loads(file.read_text())
        base, settings = description["base"], description["settings"]
        if not isinstance(base, dict) or not isinstance(settings, dict):
            raise TypeError("base and settings are objects")
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UsageError(f"{file} is damaged: {error}") from error
    for name in _OF_THE_BASE if config is not None else ():
        if base.get(name) != getattr(config, name):
            raise UsageError(
                f"{directory} was trained on another model: its {name} is {base.get(name)!r}, "
                f"here it is {getattr(config, name)!r}"
            )
    return settings


def load_trained(directory: str | Path) -> dict[str, Tensor]:
    """Return the tensors of a folder of `save_trained`; UsageError when they cannot be read."""
    file = Path(directory) / TENSORS_FILE
    try:
        return load_file(file)
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror or error}") from error
    except SafetensorError as error:
        raise UsageError(f"{file} is truncated or damaged ({error}); copy it again") from error


def load_fitting(directory: str | Path, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return what save_pretrained() wrote; UsageError unless it fits the parameters of a model."""
    state = leave_out_adapter(load_trained(directory))
    for name in sorted(state.keys() | own.keys()):
        found, expected = (
            list(tensors[name].shape) if name in tensors else "nothing" for tensors in (state, own)
        )
        if found != expected:
            raise UsageError(
                f"{directory} does not fit: as {name} it holds {found}, and this model trains "
                f"{expected}"
            )
    if not all(map(has_only_finite, state.values())):
        raise UsageError(f"{directory} holds NaN or infinity")
    return state
