"""The two files of a LoRA adapter, as PEFT writes and reads them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.pytorch_utils import Conv1D

from ...models.checkpoints.hub import Hub, is_hub_id
from ...protocol.errors import ModelError, UsageError
from ...protocol.messages.adapters import (
    DOWN,
    PREFIX,
    UP,
    LoraConfig,
    check_rank,
    find_block,
    parse_lora_config,
)
from .whole_files import write_files

CONFIG_FILE = "adapter_config.json"
TENSORS_FILE = "adapter_model.safetensors"
_PICKLED_FILE = "adapter_model.bin"

TRAINED_FILE = "tuning.json"
"""In a folder of trained prompts or of a head; see `save_trained`."""

HEAD = "lm_head"
_UNCHANGED = ".base_layer.weight"
"""The suffix under which PEFT stores the model's own head beside its matrices."""

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class PeftFiles:
    """The content of an adapter's folder: all fields of its configuration, and matrices by name."""

    config: LoraConfig
    fields: Mapping[str, Any]
    matrices: Mapping[str, Tensor]


@dataclass(frozen=True)
class LinearShape:
    """A linear of a model as PEFT sees it; GPT-2 stores its weights transposed."""

    num_outputs: int
    num_inputs: int
    is_transposed: bool = False


def is_adapter_id(given: str | Path) -> bool:
    """Return whether a name can be that of an adapter on the Hub.

    >>> is_adapter_id("org/name"), is_adapter_id("name"), is_adapter_id("./org/name")
    (True, False, False)
    """
    return isinstance(given, str) and "/" in given and is_hub_id(given)


def fetch_folder(name: str, hub: Hub) -> Path:
    """Fetch the two files of an adapter on the Hub, both of one commit; return their folder.

    Raises ModelError that says what is missing.
    """
    try:
        folder = hub.fetch(name, CONFIG_FILE, None).parent
        return hub.fetch(name, TENSORS_FILE, folder.name).parent
    except FileNotFoundError as error:
        raise ModelError(
            f"{name} on the Hub has no {error}; an adapter is a {CONFIG_FILE} with a {TENSORS_FILE}"
        ) from error


def read_folder(folder: str | Path) -> PeftFiles:
    """Read an adapter that PEFT or we have saved; its matrices in float32.

    Raises UsageError that names the file and what is wrong with it.
    """
    folder = Path(folder)
    if (folder / TRAINED_FILE).is_file() and not (folder / CONFIG_FILE).exists():
        raise UsageError(
            f"{folder} holds trained prompts or a head and no adapter; open it with trained="
        )
    try:
        for file in (folder / CONFIG_FILE, folder / TENSORS_FILE):
            if file.is_dir():
                raise UsageError(f"{file} is a folder, not an adapter file")
        config, fields = parse_lora_config((folder / CONFIG_FILE).read_bytes())
        if not (folder / TENSORS_FILE).exists() and (folder / _PICKLED_FILE).exists():
            raise UsageError(
                f"{folder / _PICKLED_FILE} is pickled, which is never read: save the adapter as "
                "safetensors"
            )
        loaded = safetensors.torch.load_file(folder / TENSORS_FILE)
    except OSError as error:
        raise UsageError(
            f"cannot read an adapter from {error.filename or folder}: {error.strerror or error}"
        ) from error
    except SafetensorError as error:
        raise UsageError(
            f"{folder / TENSORS_FILE} is truncated or damaged ({error}); copy it again"
        ) from error
    except UsageError:
        raise
    except ValueError as error:
        raise UsageError(f"the adapter in {folder} cannot be used: {error}") from error
    matrices = {name: matrix for name, matrix in loaded.items() if not name.endswith(_UNCHANGED)}
    for name, matrix in matrices.items():
        where = f"{name} in {folder / TENSORS_FILE}"
        if matrix.dtype not in _DTYPES:
            dtype, known = _name_dtype(matrix.dtype), ", ".join(map(_name_dtype, _DTYPES))
            raise UsageError(f"{where} is of type {dtype}; adapters are read in {known}")
        if not bool(matrix.isfinite().all()):
            raise UsageError(f"{where} does not hold finite floats")
    floats = {name: matrices[name].float() for name in sorted(matrices)}
    return PeftFiles(config, fields, floats)


def _name_dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def write_folder(folder: str | Path, files: PeftFiles) -> None:
    """Write both files, for PEFT, for peers and for `read_folder`, each as a whole."""
    text = json.dumps(files.fields, indent=2, sort_keys=True) + "\n"
    matrices = {name: matrix.contiguous() for name, matrix in files.matrices.items()}
    save = partial(safetensors.torch.save_file, matrices, metadata={"format": "pt"})
    try:
        write_files(
            Path(folder),
            {TENSORS_FILE: save, CONFIG_FILE: lambda path: path.write_text(text, encoding="utf-8")},
        )
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise UsageError(f"the adapter cannot be saved in {folder}: {reason:.200}") from error


def make_fields(
    config: LoraConfig,
    targets: str | list[str],
    model_config: PreTrainedConfig,
    is_transposed: bool,
) -> dict[str, Any]:
    """Return what `adapter_config.json` says of a new adapter."""
    return {
        "base_model_name_or_path": model_config.name_or_path or None,
        "bias": "none",
        "fan_in_fan_out": is_transposed,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": config.alpha,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": config.rank,
        "target_modules": targets,
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": config.uses_root,
    }


def list_linears(model_config: PreTrainedConfig) -> dict[str, LinearShape]:
    """Return the linears of a model's blocks, and its head, by their names in transformers.

    The model is built without memory for its weights.
    """
    try:
        with torch.device("meta"):
            model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(model_config)]
            model = model_class(model_config)
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        raise ModelError(
            f"transformers cannot build a {model_config.model_type!r} model to adapt"
        ) from error
    linears: dict[str, LinearShape] = {}
    for name, module in model.named_modules():
        if name != HEAD and find_block(name) is None:
            continue
        if isinstance(module, Conv1D):
            num_inputs, num_outputs = module.weight.shape
            linears[name] = LinearShape(num_outputs, num_inputs, is_transposed=True)
        elif isinstance(module, nn.Linear):
            linears[name] = LinearShape(module.out_features, module.in_features)
    return linears


def match_targets(linears: Mapping[str, LinearShape], targets: str | list[str]) -> list[str]:
    """Return the linears that PEFT's `target_modules` mean: a pattern, or ends of names."""
    if isinstance(targets, str):
        try:
            return [name for name in linears if re.fullmatch(targets, name)]
        except re.error as error:
            raise UsageError(
                f"target_modules {targets!r} is not a regular expression: {error}"
            ) from error
    return [
        name
        for name in linears
        if any(name == target or name.endswith(f".{target}") for target in targets)
    ]


def check_linear(rank: int, module: str, linear: LinearShape) -> None:
    """Raise UsageError if a linear has no use for so high a rank."""
    try:
        check_rank(rank, module, linear.num_inputs, linear.num_outputs)
    except ValueError as error:
        raise UsageError(f"the adapter cannot be used: {error}") from None


def check_fit(matrices: Mapping[str, Tensor], rank: int, config: PreTrainedConfig) -> None:
    """Raise UsageError that names the first matrix which does not fit the model."""
    linears = list_linears(config)
    seen: dict[str, set[str]] = {}
    for name, matrix in matrices.items():
        ending = next((end for end in (DOWN, UP) if name.endswith(end)), None)
        module = name.removeprefix(PREFIX).removesuffix(ending or "")
        if "lora_embedding" in name or "embed_tokens" in module:
            raise UsageError(f"{name} changes an embedding, which is not supported")
        if ending is None or not name.startswith(PREFIX):
            raise UsageError(f"{name} is not a name that PEFT gives to LoRA matrices")
        linear = linears.get(module)
        if linear is None:
            raise UsageError(f"{name} does not fit: this model has no linear {module}")
        check_linear(rank, module, linear)
        shape = (rank, linear.num_inputs) if ending == DOWN else (linear.num_outputs, rank)
        if tuple(matrix.shape) != shape:
            raise UsageError(f"{name} has shape {tuple(matrix.shape)}, this model needs {shape}")
        seen.setdefault(module, set()).add(ending)
    for module, endings in seen.items():
        if len(endings) != 2:
            raise UsageError(f"{module} has only one of lora_A and lora_B")
    if not seen:
        raise UsageError("the adapter has no matrices")
