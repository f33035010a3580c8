"""Reads a run file: TOML, whose `model` may also be the path of a config.json."""

import json
import tomllib
from pathlib import Path

from ...protocol.errors import UsageError
from ...protocol.runs.training_run import TrainingRun, read_run


def load_run(path: Path) -> TrainingRun:
    """Read a run file; UsageError says what is wrong with which field."""
    try:
        content = tomllib.loads(_read_text(path))
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path} is no TOML file: {error}") from error
    model = content.get("model")
    if isinstance(model, str):
        config = path.parent / model
        try:
            content["model"] = json.loads(_read_text(config))
        except json.JSONDecodeError as error:
            raise UsageError(f"{config} is no JSON file: {error}") from error
    return read_run(content)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is no text in UTF-8") from error
