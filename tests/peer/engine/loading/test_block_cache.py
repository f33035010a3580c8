"""Quantized blocks on disk: found again, bounded, and never trusted."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import warm_python
from safetensors.torch import load_file, save_file

from shoal.kernels.linear.quantize import Int8Weight, WeightFormat
from shoal.models.checkpoints.checkpoint import Checkpoint
from shoal.models.spec_reader import read_spec
from shoal.models.specs.model_spec import ModelSpec
from shoal.peer.engine.loading.block_cache import MIN_ENTRY_BYTES, BlockCache, open_block_cache
from shoal.peer.engine.loading.engine_loader import load_engine
from shoal.peer.engine.steps import StepWork
from shoal.peer.hosting.hosted_model import HostedModel
from shoal.peer.hosting.span_loader import SpanLoader
from shoal.peer.process.config import PeerConfig
from shoal.protocol.net.clock import SystemClock
from shoal.protocol.spans import Span

BUDGET = 2**26
COLUMNS = 1024
ROWS = MIN_ENTRY_BYTES // COLUMNS


def make_weight(seed: int, rows: int = ROWS) -> Int8Weight:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-127, 128, (rows, COLUMNS), generator=generator, dtype=torch.int8)
    return Int8Weight(values, torch.rand(rows, generator=generator) + 0.1)


def make_block(seed: int = 1) -> dict[str, Int8Weight]:
    """Return weights that are just large enough to be kept."""
    return {"up.0": make_weight(seed), "down.0": make_weight(seed + 1, rows=3)}


MAX_BYTES = sum(w.values_OI.nbytes + w.scales_O.nbytes for w in make_block().values())
NAME = "model-0-int8-v1.safetensors"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "home" / "blocks"


def open_cache(directory: Path, budget_bytes: int = BUDGET) -> BlockCache:
    cache = open_block_cache(budget_bytes, directory)
    assert cache is not None
    return cache


def is_same(left: dict[str, Int8Weight], right: dict[str, Int8Weight]) -> bool:
    return left.keys() == right.keys() and all(
        torch.equal(left[name].values_OI, right[name].values_OI)
        and torch.equal(left[name].scales_O, right[name].scales_O)
        for name in left
    )


def test_entry_is_read_as_it_was_written(directory: Path) -> None:
    open_cache(directory).write(NAME, make_block())

    assert is_same(open_cache(directory).read(NAME, MAX_BYTES), make_block())
    assert [path.name for path in directory.iterdir()] == [NAME]
    assert (directory / NAME).stat().st_mode & 0o777 == 0o600
    assert directory.stat().st_mode & 0o777 == 0o700
    assert load_file(directory / NAME).keys() > {"up.0.values", "up.0.scales"}


def test_directory_into_which_others_can_write_is_not_used(directory: Path) -> None:
    open_cache(directory).write(NAME, make_block())
    directory.chmod(0o777)

    assert open_block_cache(BUDGET, directory) is None


def test_entry_that_nobody_wrote_is_empty(directory: Path) -> None:
    assert open_cache(directory).read(NAME, MAX_BYTES) == {}


def test_small_blocks_leave_no_trace(directory: Path) -> None:
    open_cache(directory).write(NAME, {"up.0": make_weight(1, rows=3)})

    assert list(directory.iterdir()) == []


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset, os.SEEK_SET if offset >= 0 else os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


def change_tensors(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    path.chmod(0o600)


def put_a_pickle(path: Path) -> None:
    torch.save({"up.0.values": torch.zeros(3)}, path)


def put_another_block(path: Path) -> None:
    open_cache(path.parent).write("other.safetensors", make_block(5))
    path.with_name("other.safetensors").replace(path)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "flipped-header": lambda path: flip(path, 20),
    "flipped-in-the-middle": lambda path: flip(path, MIN_ENTRY_BYTES // 2),
    "cut": lambda path: os.truncate(path, path.stat().st_size - 1),
    "empty": lambda path: os.truncate(path, 0),
    "header-of-2-exabytes": lambda path: path.write_bytes(b"\xff" * 7 + b"\x1f" + b"{}"),
    "holes": lambda path: os.truncate(path, MAX_BYTES),
    "a-terabyte-of-holes": lambda path: os.truncate(path, 2**40),
    "pickle": put_a_pickle,
    "another-block": put_another_block,
    "no-checksum": lambda path: change_tensors(path, lambda tensors: tensors.pop("checksum")),
    "one-scale-less": lambda path: change_tensors(
        path, lambda tensors: tensors.update({"up.0.scales": tensors["up.0.scales"][1:].clone()})
    ),
    "no-scales": lambda path: change_tensors(path, lambda tensors: tensors.pop("up.0.scales")),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_damaged_entry_is_dropped_and_made_anew(
    directory: Path, damage: Callable[[Path], object]
) -> None:
    open_cache(directory).write(NAME, make_block())
    damage(directory / NAME)
    cache = open_cache(directory)

    assert cache.read(NAME, MAX_BYTES) == {}
    assert NAME not in {path.name for path in directory.iterdir()}

    cache.write(NAME, make_block())
    assert is_same(cache.read(NAME, MAX_BYTES), make_block())


def write_forged(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write an entry with a right checksum and contents that no weights have."""
    from shoal.peer.engine.loading.block_cache import _compute_checksum

    checksum = torch.frombuffer(_compute_checksum(path.name, tensors), dtype=torch.uint8)
    save_file({**tensors, "checksum": checksum}, path)
    path.chmod(0o600)


VALUES = torch.ones(2, 3, dtype=torch.int8)


@pytest.mark.parametrize(
    "tensors",
    [
        {"up.0.values": VALUES.float(), "up.0.scales": torch.ones(2)},
        {"up.0.values": VALUES, "up.0.scales": torch.ones(2, dtype=torch.float64)},
        {"up.0.values": VALUES, "up.0.scales": torch.ones(3)},
        {"up.0.values": VALUES, "up.0.scales": torch.tensor([1.0, float("nan")])},
        {"up.0.values": VALUES, "up.0.scales": torch.tensor([1.0, 0.0])},
        {"up.0.values": VALUES[0], "up.0.scales": torch.ones(3)},
        {"up.0.values": VALUES[:0], "up.0.scales": torch.ones(0)},
        {"up.0.values": VALUES},
        {"up.0.values": VALUES, "up.0.scales": torch.ones(2), "more": torch.ones(2)},
    ],
    ids=[
        "float-values", "double-scales", "scales-too-many", "nan", "zero-scale", "vector",
        "nothing", "no-scales", "more",
    ],
)  # fmt: skip
def test_entry_with_impossible_weights_is_dropped(
    directory: Path, tensors: dict[str, torch.Tensor]
) -> None:
    cache = open_cache(directory)
    write_forged(directory / NAME, tensors)

    assert cache.read(NAME, MAX_BYTES) == {}
    assert list(directory.iterdir()) == []


def test_entry_that_cannot_be_deleted_is_ignored(directory: Path) -> None:
    cache = open_cache(directory)
    (directory / NAME / "below").mkdir(parents=True)

    assert cache.read(NAME, MAX_BYTES) == {}
    cache.write(NAME, make_block())
    assert cache.read(NAME, MAX_BYTES) == {}


def set_age(path: Path, seconds: int) -> None:
    os.utime(path, (10**9 - seconds, 10**9 - seconds))


def test_longest_unused_entries_make_room(directory: Path) -> None:
    open_cache(directory).write("a", make_block(1))
    entry_bytes = (directory / "a").stat().st_size
    for age, name in enumerate("bc"):
        open_cache(directory).write(name, make_block(2))
        set_age(directory / name, age)
    left_by_a_killed_process = directory / ".tmpabc"
    left_by_a_killed_process.write_bytes(b"half")
    set_age(directory / "a", 5)
    set_age(left_by_a_killed_process, 9)
    open_cache(directory).read("a", MAX_BYTES)  # used just now: c is the oldest entry

    open_cache(directory, budget_bytes=3 * entry_bytes).write("d", make_block(3))

    assert {path.name for path in directory.iterdir()} == {"a", "b", "d"}
    total_bytes = sum(path.stat().st_size for path in directory.iterdir())
    assert total_bytes <= 3 * entry_bytes


def test_span_beyond_the_budget_keeps_what_it_began_with(directory: Path) -> None:
    open_cache(directory).write("a", make_block())
    budget_bytes = 2 * (directory / "a").stat().st_size

    for _ in range(2):
        cache = open_cache(directory, budget_bytes)
        for name in "abc":
            if not cache.read(name, MAX_BYTES):
                cache.write(name, make_block())

        # Otherwise each start would delete just what the next one asks for first.
        assert {path.name for path in directory.iterdir()} == {"a", "b"}


def test_entry_larger_than_the_budget_deletes_nothing(directory: Path) -> None:
    open_cache(directory).write("a", make_block())

    open_cache(directory, budget_bytes=2**20).write("b", make_block())

    assert [path.name for path in directory.iterdir()] == ["a"]


def test_budget_of_zero_is_no_cache(directory: Path) -> None:
    assert open_block_cache(0, directory) is None
    assert not directory.exists()


@pytest.mark.parametrize("place", ["file/blocks", "~nobody-of-this-name/blocks"])
def test_where_no_cache_can_be_it_is_said_once(
    tmp_path: Path, place: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()

    assert open_block_cache(BUDGET, Path(place) if "~" in place else tmp_path / place) is None

    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_cache_that_becomes_unwritable_is_said_once(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = open_cache(directory)
    directory.rmdir()
    directory.touch()

    cache.write("a", make_block())
    cache.write("b", make_block())

    assert cache.read("a", MAX_BYTES) == {}
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


SCRIPT = """
import sys
from pathlib import Path
import torch
from shoal.kernels.linear.quantize import Int8Weight
from shoal.peer.process.config import PeerConfig
from shoal.peer.engine.loading.block_cache import MIN_ENTRY_BYTES, BlockCache

for turn in range(30):
    cache = BlockCache(Path(sys.argv[1]), int(2.5 * MIN_ENTRY_BYTES))
    number = turn % 3
    values = torch.full((1024, MIN_ENTRY_BYTES // 1024), number, dtype=torch.int8)
    cache.write(str(number), {"up.0": Int8Weight(values, torch.ones(1024))})
    found = cache.read(str((turn + 1) % 3), 2 * MIN_ENTRY_BYTES)
    assert all(bool((w.values_OI == (turn + 1) % 3).all()) for w in found.values())
"""


@pytest.mark.slow
def test_several_processes_write_and_make_room_at_once(
    directory: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    open_cache(directory)
    writers = [warm_python.Popen([sys.executable, "-P", "-c", SCRIPT, directory]) for _ in range(3)]

    assert [writer.wait(timeout=300) for writer in writers] == [0, 0, 0]
    assert "not kept" not in capfd.readouterr().err
    assert {path.name for path in directory.iterdir()} <= set("012")
    for path in directory.iterdir():
        (weight,) = open_cache(directory).read(path.name, 2 * MIN_ENTRY_BYTES).values()
        assert bool((weight.values_OI == int(path.name)).all())


# What an engine makes of it.


def make_model(directory: Path, hidden_size: int, intermediate_size: int, num_blocks: int) -> None:
    """Write the blocks of a random Llama in bfloat16."""
    config = {
        "model_type": "llama", "hidden_size": hidden_size, "intermediate_size": intermediate_size,
        "num_hidden_layers": num_blocks, "num_attention_heads": 8, "num_key_value_heads": 2,
        "max_position_embeddings": 64, "vocab_size": 8,
    }  # fmt: skip
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    spec = read_spec(config)
    assert isinstance(spec, ModelSpec)
    generator = torch.Generator().manual_seed(7)
    tensors = {
        spec.tensors.list_stored(block, name)[0]: torch.randn(shape, generator=generator).bfloat16()
        for block in range(num_blocks)
        for name, shape in spec.tensor_shapes().items()
    }
    save_file(tensors, directory / "model.safetensors")


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two blocks of a Llama, each large enough to be kept."""
    directory = tmp_path_factory.mktemp("wide")
    make_model(directory, hidden_size=512, intermediate_size=768, num_blocks=2)
    return directory


class CountingCheckpoint:
    """A checkpoint that remembers which matrices were read."""

    def __init__(self, directory: Path) -> None:
        self._checkpoint = Checkpoint.open(directory)
        self.config = self._checkpoint.config
        self.revision = self._checkpoint.revision
        self.has = self._checkpoint.has
        self.matrices: list[str] = []

    def load(self, name: str) -> torch.Tensor:
        tensor = self._checkpoint.load(name)
        if tensor.dim() == 2:
            self.matrices.append(name)
        return tensor


def load_and_run(
    model: Path, cache: BlockCache | None, weights: WeightFormat = WeightFormat.INT8
) -> tuple[torch.Tensor, int]:
    """Return what an engine computes, and how many matrices it read."""
    checkpoint = CountingCheckpoint(model)
    engine = load_engine(
        checkpoint,  # pyright: ignore[reportArgumentType]
        Span(0, 2),
        weights,
        kv_budget_bytes=2**24,
        cache=cache,
    )
    hidden = torch.randn(1, 5, 512, generator=torch.Generator().manual_seed(1))
    session = engine.pool.open(1, 5, engine.span)
    (output,) = engine.execute([StepWork(session, 0, hidden)])
    session.close()
    assert isinstance(output, torch.Tensor), output
    return output, len(checkpoint.matrices)


def test_second_start_quantizes_nothing_and_computes_the_same(
    wide_model: Path, directory: Path
) -> None:
    expected, num_read = load_and_run(wide_model, None)
    assert num_read == 14

    first = load_and_run(wide_model, open_cache(directory))
    second = load_and_run(wide_model, open_cache(directory))

    assert (first[1], second[1]) == (14, 0)
    assert torch.equal(first[0], expected)
    assert torch.equal(second[0], expected)
    assert len(list(directory.iterdir())) == 2


def test_damaged_block_alone_is_quantized_again(wide_model: Path, directory: Path) -> None:
    expected, _ = load_and_run(wide_model, open_cache(directory))
    flip(sorted(directory.iterdir())[1], -77)

    damaged = load_and_run(wide_model, open_cache(directory))
    mended = load_and_run(wide_model, open_cache(directory))

    assert (damaged[1], mended[1]) == (7, 0)
    assert torch.equal(damaged[0], expected)
    assert torch.equal(mended[0], expected)


def test_weights_of_another_shape_are_quantized_again(wide_model: Path, directory: Path) -> None:
    expected, _ = load_and_run(wide_model, open_cache(directory))
    path = min(directory.iterdir())
    cache = open_cache(directory)
    weights = cache.read(path.name, 2**24)
    down = weights["down.0"]
    narrow = Int8Weight(down.values_OI[:, :-1].contiguous(), down.scales_O)
    cache.write(path.name, {**weights, "down.0": narrow})

    output, num_read = load_and_run(wide_model, open_cache(directory))

    assert num_read == 1
    assert torch.equal(output, expected)
    assert load_and_run(wide_model, open_cache(directory))[1] == 0


@pytest.mark.slow
def test_other_weights_of_one_configuration_have_other_entries(
    wide_model: Path, directory: Path, tmp_path: Path
) -> None:
    load_and_run(wide_model, open_cache(directory))
    other = tmp_path / "other"
    shutil.copytree(wide_model, other)
    tensors = load_file(other / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    save_file({**tensors, name: -tensors[name]}, other / "model.safetensors")

    output, num_read = load_and_run(other, open_cache(directory))

    assert num_read == 14
    assert torch.equal(output, load_and_run(other, None)[0])


@pytest.mark.parametrize("weights", [WeightFormat.FP32, WeightFormat.BF16])
def test_float_weights_are_not_kept(
    wide_model: Path, directory: Path, weights: WeightFormat
) -> None:
    load_and_run(wide_model, open_cache(directory), weights)

    assert list(directory.iterdir()) == []


def test_blocks_with_experts_are_kept_expert_by_expert(
    tiny_models, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.peer.engine.loading.block_cache.MIN_ENTRY_BYTES", 1)
    model = tiny_models.get("mixtral").directory

    def load(cache: BlockCache | None) -> tuple[torch.Tensor, list[str]]:
        checkpoint = CountingCheckpoint(model)
        engine = load_engine(
            checkpoint,  # pyright: ignore[reportArgumentType]
            Span(0, 1), WeightFormat.INT8, kv_budget_bytes=2**24, cache=cache,
        )  # fmt: skip
        session = engine.pool.open(1, 3, engine.span)
        hidden = torch.randn(1, 3, 64, generator=torch.Generator().manual_seed(1))
        (output,) = engine.execute([StepWork(session, 0, hidden)])
        session.close()
        assert isinstance(output, torch.Tensor)
        return output, checkpoint.matrices

    expected, _ = load(open_cache(directory))
    output, read = load(open_cache(directory))

    assert torch.equal(output, expected)
    assert [name for name in read if not name.endswith("block_sparse_moe.gate.weight")] == []


@pytest.mark.parametrize(("budget_bytes", "num_entries"), [(2**30, 2), (0, 0)])
def test_peer_keeps_its_blocks_at_home(
    wide_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    budget_bytes: int,
    num_entries: int,
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    config = PeerConfig(
        model=str(wide_model), kv_budget_bytes=2**24, block_cache_bytes=budget_bytes
    )

    async def load() -> None:
        loader = SpanLoader(HostedModel.open(config), SystemClock())
        async with loader.serve(Span(0, 2), {}, lambda *_: None) as served:
            assert served.span == Span(0, 2)

    asyncio.run(load())

    assert len(list(tmp_path.glob(".cache/shoal/blocks/*"))) == num_entries


PEAK_SCRIPT = """
import sys
from pathlib import Path
from shoal.kernels.linear.quantize import WeightFormat
from shoal.peer.engine.loading.block_cache import BlockCache
from shoal.models.checkpoints.checkpoint import Checkpoint
from shoal.peer.engine.loading.engine_loader import load_engine
from shoal.protocol.spans import Span

def read_peak_bytes():
    (line,) = [x for x in open("/proc/self/status") if x.startswith("VmHWM")]
    return 1024 * int(line.split()[1])

checkpoint = Checkpoint.open(sys.argv[1])
before = read_peak_bytes()
engine = load_engine(checkpoint, Span(0, 6), WeightFormat.INT8, kv_budget_bytes=2**20,
                     num_threads=1, cache=BlockCache(Path(sys.argv[2]), 2**30))
print(read_peak_bytes() - before - engine.num_weight_bytes)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_loading_from_the_cache_peaks_below_one_more_block_in_float32(
    tmp_path: Path, directory: Path
) -> None:
    model = tmp_path / "model"
    make_model(model, hidden_size=1024, intermediate_size=2048, num_blocks=6)
    directory.mkdir(parents=True)

    checkpoint = Checkpoint.open(model)
    cache = BlockCache(directory, 2**30)
    load_engine(checkpoint, Span(0, 6), WeightFormat.INT8, kv_budget_bytes=2**20, cache=cache)

    run = subprocess.run(
        [sys.executable, "-P", "-c", PEAK_SCRIPT, model, directory],
        capture_output=True, text=True, check=True,
    )  # fmt: skip

    spec = read_spec(checkpoint.config)
    assert isinstance(spec, ModelSpec)
    num_parameters = sum(math.prod(shape) for shape in spec.tensor_shapes().values())
    assert len(list(directory.iterdir())) == 6
    assert int(run.stdout) < 4 * num_parameters
