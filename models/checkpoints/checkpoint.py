"""Read model directories and Hub repositories: `config.json` and safetensors, tensor by tensor.

Never unpickles anything; what is read from disk is checked before it is used.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path, PurePosixPath
from typing import Any, Protocol, cast

import torch
from safetensors import SafetensorError, safe_open

from ...protocol.errors import ModelError
from .fingerprint import CACHE_DIRECTORY, check_download, compute_fingerprint
from .hub import DEFAULT_HUB, Hub, is_hub_id

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

MAX_JSON_BYTES = 256 * 2**20
"""Honest files are far below; a damaged one must not make us read gigabytes of JSON."""

_PICKLE_SUFFIXES = (".bin", ".pt", ".pth")

FetchFile = Callable[[str], Path]


class Tensors(Protocol):
    """The part of a `Checkpoint` that readers of weights use."""

    def has(self, name: str) -> bool:
        """Return whether a tensor of this name is stored."""
        ...

    def load(self, name: str) -> torch.Tensor:
        """Return one tensor in its stored dtype."""
        ...


@dataclass(frozen=True)
class Checkpoint:
    """One model's configuration and weights on disk, opened but not loaded.

    `revision` is the Hub's commit, or the fingerprint of a local directory: a digest of every byte
    of its weight files.
    Files of a Hub repository arrive when a tensor in them is first asked for.
    """

    directory: Path
    config: Mapping[str, object]
    revision: str
    _file_of: Mapping[str, str] = field(repr=False)
    _fetch: FetchFile = field(repr=False)
    hub: Hub = DEFAULT_HUB
    """The Hub with which it was opened, for what else belongs to the model."""

    @classmethod
    def open(
        cls,
        model: str | Path,
        revision: str | None = None,
        cache_directory: Path = CACHE_DIRECTORY,
        hub: Hub = DEFAULT_HUB,
    ) -> "Checkpoint":
        """Open a local directory or a Hub id; `revision` is a commit, tag or branch of the Hub.

        A large local directory is read as a whole the first time, and a file from the Hub before
        its first tensor, which takes about a second per gigabyte; `cache_directory` is where the
        answer is kept for the next time.
        Raises ModelError in one sentence when there is nothing usable.
        """
        directory = Path(model).expanduser()
        if directory.is_dir():
            return _open_directory(directory, cache_directory, hub)
        if isinstance(model, str) and is_hub_id(model):
            return _open_hub(model, revision, cache_directory, hub)
        raise ModelError(f"there is no model directory {str(model)!r}; check the path")

    @property
    def names(self) -> frozenset[str]:
        """The names of all tensors."""
        return frozenset(self._file_of)

    def has(self, name: str) -> bool:
        """Return whether a tensor of this name is stored."""
        return name in self._file_of

    def load(self, name: str) -> torch.Tensor:
        """Return one tensor in its stored dtype; nothing else is read.

        The result may be a view of the mapped file: copy what should outlive the file.
        """
        if name not in self._file_of:
            raise ModelError(f"the checkpoint in {self.directory} has no tensor {name!r}")
        path = self._fetch(self._file_of[name])
        with _opening(path) as tensors:
            return tensors.get_tensor(name)


def _open_directory(directory: Path, cache_directory: Path, hub: Hub) -> Checkpoint:
    config = _read_json(directory / "config.json")
    if (directory / SINGLE_FILE).is_file():
        file_of = dict.fromkeys(_read_names(directory / SINGLE_FILE), SINGLE_FILE)
    elif (directory / INDEX_FILE).is_file():
        file_of = _read_index(directory / INDEX_FILE)
    else:
        raise ModelError(_describe_missing_weights(directory))

    files = {name: directory / name for name in sorted(set(file_of.values()))}
    for path in files.values():
        if not _is_file(path):
            raise ModelError(
                f"{directory / INDEX_FILE} names {path.name:.60}, which is not there; "
                "download the model again"
            )
        _read_names(path)  # a truncated file is named before anything large is read
    try:
        revision = compute_fingerprint(list(files.values()), cache_directory)
    except OSError as error:
        raise ModelError(f"the weights in {directory} cannot be read: {error}") from error
    return Checkpoint(directory, config, revision, file_of, directory.joinpath, hub)


def _open_hub(model: str, revision: str | None, cache_directory: Path, hub: Hub) -> Checkpoint:
    """Fetch the configuration and the index; weights follow when they are asked for."""
    fetch = partial(hub.fetch, model)
    try:
        config_path = fetch("config.json", revision)
    except FileNotFoundError as error:
        raise ModelError(f"{model} on the Hub has no config.json") from error
    # The cache keeps each commit in a folder of its name; later files come from the same commit.
    directory, commit = config_path.parent, config_path.parent.name

    @cache  # it is asked for each tensor
    def fetch_weights(file_name: str) -> Path:
        # With a commit, a file that is cached is found without a request.
        try:
            path = fetch(file_name, commit)
            check_download(path, cache_directory)
        except FileNotFoundError as error:
            raise ModelError(
                f"{model} on the Hub has no {file_name}; shoal reads safetensors only"
            ) from error
        except OSError as error:
            raise ModelError(f"{file_name} of {model} cannot be read: {error}") from error
        return path

    try:
        # A single file that is cached already spares the question, and works offline.
        is_single = (directory / SINGLE_FILE).is_file()
        file_of = {} if is_single else _read_index(fetch(INDEX_FILE, commit))
    except FileNotFoundError:
        is_single, file_of = True, {}
    if is_single:
        file_of = dict.fromkeys(_read_names(fetch_weights(SINGLE_FILE)), SINGLE_FILE)
    return Checkpoint(directory, _read_json(config_path), commit, file_of, fetch_weights, hub)


def _is_file(path: Path) -> bool:
    """Return `path.is_file()`, and False for a name that no file can have."""
    try:
        return path.is_file()
    except OSError:
        return False


def _read_json(path: Path) -> dict[str, object]:
    if not path.is_file():
        raise ModelError(f"{path.parent} has no {path.name}; is it a model directory?")
    if path.stat().st_size > MAX_JSON_BYTES:
        raise ModelError(f"{path} is too large to be genuine")
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError, OSError) as error:
        raise ModelError(f"{path} is damaged: {error}; download it again") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} is damaged: it holds no JSON object")
    return cast(dict[str, object], content)


def _read_index(path: Path) -> dict[str, str]:
    """Return tensor name -> file name; a name outside of the directory is refused."""
    weight_map = _read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{path} is damaged: it has no weight_map")
    file_of = cast(dict[str, object], weight_map)
    for file_name in set(map(str, file_of.values())):
        parts = PurePosixPath(file_name).parts
        is_inside = "\\" not in file_name and ":" not in file_name and ".." not in parts
        if not is_inside or file_name.startswith("/") or not file_name.endswith(".safetensors"):
            raise ModelError(
                f"{path} names {file_name!r}, which is no safetensors file inside of the model "
                "directory; do not use this model"
            )
    return {name: str(file_name) for name, file_name in file_of.items()}


@contextmanager
def _opening(path: Path) -> Iterator[Any]:
    """Open a safetensors file; the library checks that it is complete. Raises ModelError."""
    try:
        with safe_open(path, framework="pt", device="cpu") as tensors:
            yield tensors
    except FileNotFoundError as error:
        raise ModelError(f"{path} is missing; download it again") from error
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} is truncated or damaged ({error}); download it again") from error


def _read_names(path: Path) -> list[str]:
    with _opening(path) as tensors:
        return list(tensors.keys())


def _describe_missing_weights(directory: Path) -> str:
    files = sorted(path.name for path in directory.iterdir() if path.is_file())
    pickles = [name for name in files if name.endswith(_PICKLE_SUFFIXES)]
    tensors = [name for name in files if name.endswith(".safetensors")]
    if tensors:
        return f"{directory} has {tensors[0]} but neither {SINGLE_FILE} nor {INDEX_FILE}"
    if pickles:
        return (
            f"{directory} has only pickled weights ({pickles[0]}), which can run code when they "
            "are read; convert it to safetensors, for example with save_pretrained"
        )
    return f"{directory} has no weights; expected {SINGLE_FILE} or {INDEX_FILE}"
