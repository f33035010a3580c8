import json
import os
import pickle
import sys
from pathlib import Path

import pytest
import torch
import warm_python
from fake_hub import READ_HUB_SETTINGS
from safetensors.torch import save_file

from shoal.models.checkpoints.checkpoint import Checkpoint
from shoal.protocol.errors import ModelError

CONFIG = {"model_type": "llama", "hidden_size": 8}
TENSORS = {
    "first": torch.arange(6, dtype=torch.float32).view(2, 3),
    "second": torch.ones(4, dtype=torch.bfloat16),
}


def write_config(directory: Path) -> None:
    (directory / "config.json").write_text(json.dumps(CONFIG))


def write_single(directory: Path, tensors: dict[str, torch.Tensor] = TENSORS) -> None:
    write_config(directory)
    save_file(tensors, directory / "model.safetensors")


def write_sharded(directory: Path, weight_map: dict[str, object] | None = None) -> None:
    write_config(directory)
    names = {"first": "model-1.safetensors", "second": "model-2.safetensors"}
    for name, file_name in names.items():
        save_file({name: TENSORS[name]}, directory / file_name)
    index = {"metadata": {}, "weight_map": names if weight_map is None else weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("write", [write_single, write_sharded])
def test_checkpoint_loads_tensors_in_their_stored_dtype(tmp_path: Path, write) -> None:
    write(tmp_path)

    checkpoint = Checkpoint.open(str(tmp_path))

    assert checkpoint.config == CONFIG
    assert checkpoint.directory == tmp_path
    assert checkpoint.names == {"first", "second"}
    assert checkpoint.has("first")
    assert not checkpoint.has("third")
    for name, expected in TENSORS.items():
        assert checkpoint.load(name).dtype == expected.dtype
        assert torch.equal(checkpoint.load(name), expected)


def test_checkpoint_names_a_tensor_that_is_not_there(tmp_path: Path) -> None:
    write_single(tmp_path)

    with pytest.raises(ModelError, match="no tensor 'third'"):
        Checkpoint.open(tmp_path).load("third")


def test_checkpoint_reports_a_tensor_that_its_shard_lacks(tmp_path: Path) -> None:
    write_sharded(tmp_path, {"first": "model-2.safetensors", "second": "model-2.safetensors"})
    checkpoint = Checkpoint.open(tmp_path)

    with pytest.raises(ModelError, match=r"model-2.* damaged \(.*first"):
        checkpoint.load("first")


def test_revision_tells_weights_apart_and_not_directories(tmp_path: Path) -> None:
    directories = [tmp_path / name for name in ("a", "copy", "other")]
    for directory in directories:
        directory.mkdir()
        write_single(directory)
    changed = {**TENSORS, "first": TENSORS["first"] + 1}
    write_single(directories[2], changed)

    original, copy, other = (Checkpoint.open(directory).revision for directory in directories)

    assert original == copy
    assert original != other


def test_revision_covers_every_shard(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    before = Checkpoint.open(tmp_path).revision
    save_file({"second": TENSORS["second"] * 2}, tmp_path / "model-2.safetensors")

    assert Checkpoint.open(tmp_path).revision != before


def test_open_refuses_a_path_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="there is no model directory"):
        Checkpoint.open(tmp_path / "nothing")
    with pytest.raises(ModelError, match="there is no model directory"):
        Checkpoint.open("./models/nothing")


def test_open_refuses_a_directory_without_config(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")

    with pytest.raises(ModelError, match=r"has no config\.json"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff\xfe", b"[" * 100_000])
def test_open_refuses_a_damaged_config(tmp_path: Path, content: bytes) -> None:
    write_single(tmp_path)
    (tmp_path / "config.json").write_bytes(content)

    with pytest.raises(ModelError, match=r"config\.json is damaged"):
        Checkpoint.open(tmp_path)


class Bomb:
    """Leaves a trace if anybody unpickles it."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self):
        return (Path.touch, (self.trace,))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth"])
def test_open_refuses_pickles_without_reading_them(tmp_path: Path, name: str) -> None:
    write_config(tmp_path)
    (tmp_path / name).write_bytes(pickle.dumps(Bomb(tmp_path / "exploded")))

    with pytest.raises(ModelError, match="convert it to safetensors"):
        Checkpoint.open(tmp_path)
    assert not (tmp_path / "exploded").exists()


def test_open_refuses_a_directory_without_weights(tmp_path: Path) -> None:
    write_config(tmp_path)

    with pytest.raises(ModelError, match="has no weights"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("kept_bytes", [0, 7, 30, -1])
def test_open_names_a_truncated_file(tmp_path: Path, kept_bytes: int) -> None:
    write_sharded(tmp_path)
    shard = tmp_path / "model-2.safetensors"
    shard.write_bytes(shard.read_bytes()[:kept_bytes])

    with pytest.raises(ModelError, match=r"model-2\.safetensors is truncated or damaged"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize(
    "header",
    [b"[]", b"{", b'{"a": 1}', b'{"a": {"data_offsets": [0, "x"]}}', b"\xff", b"[" * 100_000],
    ids=lambda header: header[:8],
)
def test_open_names_a_file_with_a_damaged_header(tmp_path: Path, header: bytes) -> None:
    write_config(tmp_path)
    content = len(header).to_bytes(8, "little") + header
    (tmp_path / "model.safetensors").write_bytes(content)

    with pytest.raises(ModelError, match=r"model\.safetensors is truncated or damaged"):
        Checkpoint.open(tmp_path)


def test_open_refuses_a_name_that_no_file_can_have(tmp_path: Path) -> None:
    write_sharded(tmp_path, {"first": "a" * 300 + ".safetensors"})

    with pytest.raises(ModelError, match="which is not there"):
        Checkpoint.open(tmp_path)


def test_open_refuses_a_header_length_beyond_the_file(tmp_path: Path) -> None:
    write_config(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 8 + b"{}")

    with pytest.raises(ModelError, match="truncated or damaged"):
        Checkpoint.open(tmp_path)


def test_open_names_a_missing_shard(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    (tmp_path / "model-1.safetensors").unlink()

    with pytest.raises(ModelError, match=r"names model-1\.safetensors, which is not there"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize(
    "file_name",
    [
        "../outside.safetensors",
        "/outside.safetensors",
        "a/../../outside.safetensors",
        "..\\outside.safetensors",
        "C:outside.safetensors",
        "config.json",
        7,
    ],
)
def test_open_refuses_an_index_that_points_elsewhere(tmp_path: Path, file_name: object) -> None:
    directory = tmp_path / "model"
    directory.mkdir()
    save_file(TENSORS, tmp_path / "outside.safetensors")
    write_sharded(directory, {"first": file_name, "second": "model-2.safetensors"})

    with pytest.raises(ModelError, match="do not use this model"):
        Checkpoint.open(directory)


@pytest.mark.parametrize("index", ["{}", '{"weight_map": []}', '{"weight_map": {}}', "{"])
def test_open_refuses_a_damaged_index(tmp_path: Path, index: str) -> None:
    write_config(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(index)

    with pytest.raises(ModelError, match=r"index\.json is damaged"):
        Checkpoint.open(tmp_path)


COMMIT = "0123456789abcdef0123456789abcdef01234567"

HUB_SCRIPT = """
import json
from shoal.models.checkpoints.checkpoint import Checkpoint
from shoal.protocol.errors import ModelError

answers = {}
for model in ("org/sharded", "org/single", "org/partial", "org/unknown"):
    try:
        checkpoint = Checkpoint.open(model)
        answers[model] = [checkpoint.revision, checkpoint.load("first").tolist()]
        checkpoint.load("second")
    except ModelError as error:
        answers.setdefault(model, []).append(str(error))
print(json.dumps(answers))
"""


def add_to_hub_cache(cache: Path, name: str, write) -> Path:
    """Lay out what the Hub's client leaves after fetching a repository."""
    repository = cache / "hub" / f"models--org--{name}"
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    write(snapshot)
    return snapshot


@pytest.mark.slow
def test_hub_ids_open_from_the_cache_and_need_only_the_shards_asked_for(tmp_path: Path) -> None:
    add_to_hub_cache(tmp_path, "sharded", write_sharded)
    add_to_hub_cache(tmp_path, "single", write_single)
    partial = add_to_hub_cache(tmp_path, "partial", write_sharded)
    (partial / "model-2.safetensors").unlink()

    done = warm_python.run(
        [sys.executable, "-P", "-c", READ_HUB_SETTINGS + HUB_SCRIPT],
        env={**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout)
    first = TENSORS["first"].tolist()
    assert answers["org/sharded"] == [COMMIT, first]
    assert answers["org/single"] == [COMMIT, first]
    assert answers["org/partial"][:2] == [COMMIT, first]
    assert "the Hub cannot be reached for model-2.safetensors" in answers["org/partial"][2]
    assert "no directory 'org/unknown' here" in answers["org/unknown"][0]
