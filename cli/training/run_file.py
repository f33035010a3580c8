"""Reads a run file: TOML, whose `model` may also be the path of a config.json."""

import errno
import json
import tomllib
from collections.abc import Sequence
from pathlib import Path

from ...protocol.errors import UsageError
from ...protocol.identity import Identity
from ...protocol.runs.run_record import sign_run
from ...protocol.runs.training_run import TrainingRun, read_run

_MAX_FILE_BYTES = 2**23
"""Far more than the record of a run may have."""


def load_run(path: Path, admitted: Sequence[str] = ()) -> TrainingRun:
    """Read a run file; UsageError says what is wrong with which field, or with the peers that its
    owner admits.
    """
    text = _read_text(path)
    try:
        content = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is no TOML file: {error}") from error
    model = content.get("model")
    if isinstance(model, str):
        config = path.parent / model
        text = _read_text(config, "run file: model: ")
        try:
            content["model"] = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"run file: model: {config} is no JSON file: {error}") from error
    run = read_run(content)
    sign_run(Identity.generate(), run, admitted)  # what cannot be signed is told before joining
    return run


def _read_text(path: Path, field: str = "") -> str:
    try:
        if path.exists() and not path.is_file():
            raise OSError(errno.EINVAL, "it is no regular file")
        with path.open("rb") as file:
            content = file.read(_MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: the name has a null character
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"{field}cannot read {path}: {reason}") from error
    if len(content) > _MAX_FILE_BYTES:
        raise UsageError(f"{field}{path} has more than {_MAX_FILE_BYTES} bytes")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{field}{path} is no text in UTF-8") from error
