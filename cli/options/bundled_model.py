"""Finds models by the names given on the command line, the bundled one included."""

import json
from pathlib import Path
from typing import Any

from ...protocol.errors import ModelError

BUNDLED_NAME = "shoal-stories"

# Next to this package in both layouts: <root>/cli beside <root>/models in a checkout, shoal/cli
# beside shoal/models where it is installed.
_BUNDLED_PATH = Path(__file__).resolve().parents[2] / "models" / BUNDLED_NAME


def find_model(name: str = BUNDLED_NAME) -> str:
    """Return the directory of the bundled model for its name, and any other name as it is.

    Raises ModelError when the bundled model is not installed, and for a path without a directory,
    before torch is imported.
    """
    if not name:
        raise ModelError("the model name is empty; give a directory or a Hub id")
    path = Path(name).expanduser()
    if path.is_file():
        raise ModelError(f"{name} is a file; give the directory of the model")
    if not path.is_dir() and (name.startswith(("/", ".", "~")) or name.count("/") > 1):
        raise ModelError(f"there is no model directory {name!r}; check the path")
    if name != BUNDLED_NAME or path.is_dir():
        return name
    if not (_BUNDLED_PATH / "config.json").is_file():
        raise ModelError(
            f"the bundled model is missing from {_BUNDLED_PATH}; reinstall shoal, or choose "
            "another model"
        )
    return str(_BUNDLED_PATH)


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
