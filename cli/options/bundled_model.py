"""Finds models by the names given on the command line, the bundled one included."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from ...models.checkpoints.hub import DEFAULT_HUB, is_hub_id
from ...protocol.errors import ModelError

BUNDLED_NAME = "shoal-stories"

# Next to this package in both layouts: <root>/cli beside <root>/models in a checkout, shoal/cli
# beside shoal/models where it is installed.
_BUNDLED_PATH = Path(__file__).resolve().parents[2] / "models" / BUNDLED_NAME


def find_model(name: str = BUNDLED_NAME) -> str:
    """Return the directory of the bundled model for its name, and any other name as it is.

    Raises ModelError when the bundled model is not installed, and for a path without a model,
    before torch is imported.
    """
    if not name:
        raise ModelError("the model name is empty; give a directory or a Hub id")
    path = Path(name).expanduser()
    if path.is_file():
        raise ModelError(f"{name} is a file; give the directory of the model")
    if not path.is_dir() and (name.startswith(("/", ".", "~")) or name.count("/") > 1):
        raise ModelError(f"there is no model directory {name!r}; check the path")
    if path.is_dir() and not (path / "config.json").is_file():
        raise ModelError(f"{name} has no config.json; is it a model directory?")
    if name != BUNDLED_NAME or path.is_dir():
        return name
    if not (_BUNDLED_PATH / "config.json").is_file():
        raise ModelError(
            f"the bundled model is missing from {_BUNDLED_PATH}; reinstall shoal, or choose "
            "another model"
        )
    return str(_BUNDLED_PATH)


def find_commit(model: str) -> str | None:
    """Return the present commit of a model on the Hub; None for a directory.

    Before torch is imported, which takes seconds. Raises ModelError where the Hub has no such model
    or cannot be asked; what the model has is checked when it is opened.
    """
    if Path(model).expanduser().is_dir():
        return None
    if not is_hub_id(model):
        raise ModelError(f"there is no model directory {model!r}; check the path")
    with suppress(FileNotFoundError):
        return DEFAULT_HUB.fetch(model, "config.json", None).parent.name
    return None


def read_configuration(model: str) -> dict[str, Any]:
    """Return the configuration in a model directory as it is; raises OSError or ValueError."""
    return json.loads((Path(model) / "config.json").read_bytes())


def count_blocks(model: str) -> int:
    """Return how many blocks a model has; raises ModelError when it cannot be opened.

    A local directory answers without torch, which takes seconds to import.
    """
    try:
        num_blocks = read_configuration(model)["num_hidden_layers"]
        if isinstance(num_blocks, int) and num_blocks > 0:
            return num_blocks
    except (OSError, ValueError, LookupError, TypeError):
        pass  # the checkpoint below raises a better error
    # These take seconds to import.
    from ...models.checkpoints.checkpoint import Checkpoint
    from ...models.spec_reader import read_spec

    return read_spec(Checkpoint.open(model).config).num_blocks
