import json
import math
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from shoal.kernels.linear.quantize import ON_CPUS, WeightFormat
from shoal.models.checkpoints.checkpoint import Checkpoint
from shoal.models.spec_reader import read_spec
from shoal.models.specs.model_spec import BlockTensorNames, ModelSpec
from shoal.peer.engine.blocks.block import Block
from shoal.peer.engine.devices.device import Numerics
from shoal.peer.engine.engine import Engine
from shoal.peer.engine.loading import engine_loader
from shoal.peer.engine.loading.block_loader import load_block
from shoal.peer.engine.steps import StepWork
from shoal.protocol.errors import ModelError, UsageError
from shoal.protocol.spans import Span

KV_BUDGET = 2**24


class RecordingCheckpoint:
    """A checkpoint that remembers which tensors were read, in which order."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.config = checkpoint.config
        self.reads: list[str] = []
        self._checkpoint = checkpoint

    def load(self, name: str) -> torch.Tensor:
        self.reads.append(name)
        return self._checkpoint.load(name)


def copy_model(tiny_model, directory: Path, **changed_tensors: torch.Tensor | None) -> Path:
    """Copy a tiny model as a single file; `block0_…` names stand for tensors, None removes."""
    directory.mkdir()
    config = (tiny_model.directory / "config.json").read_text()
    (directory / "config.json").write_text(config)
    tensors = load_file(tiny_model.directory / "model.safetensors")
    for name, tensor in changed_tensors.items():
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    save_file(tensors, directory / "model.safetensors")
    return directory


def load_engine(directory: Path, weights: WeightFormat, span: Span | None = None, **options):
    return engine_loader.load_engine(
        Checkpoint.open(directory),
        span or Span(0, 4),
        weights,
        kv_budget_bytes=KV_BUDGET,
        **options,
    )


def run_step(engine: Engine, hidden: torch.Tensor) -> torch.Tensor:
    cache = engine.pool.open(hidden.shape[0], hidden.shape[1], engine.span)
    (output,) = engine.execute([StepWork(cache, 0, hidden)])
    cache.close()
    assert isinstance(output, torch.Tensor), output
    return output


def test_load_reads_each_tensor_of_the_own_span_once_and_no_other(tiny_models) -> None:
    checkpoint = RecordingCheckpoint(Checkpoint.open(tiny_models.get().directory))

    engine_loader.load_engine(
        checkpoint,  # pyright: ignore[reportArgumentType]
        Span(1, 3),
        WeightFormat.INT8,
        kv_budget_bytes=KV_BUDGET,
    )

    stored = Checkpoint.open(tiny_models.get().directory).names
    expected = {name for name in stored if name.startswith(("model.layers.1.", "model.layers.2."))}
    assert sorted(checkpoint.reads) == sorted(expected)


def test_load_touches_only_the_shards_of_the_own_span(tiny_models, tmp_path: Path) -> None:
    whole = load_file(tiny_models.get().directory / "model.safetensors")
    config = (tiny_models.get().directory / "config.json").read_text()
    (tmp_path / "config.json").write_text(config)
    file_of = {
        name: f"shard-{re.sub(r'[^0-9]', '', name.partition('layers')[2]) or 'rest'}.safetensors"
        for name in whole
    }
    for file_name in set(file_of.values()):
        shard = {name: tensor for name, tensor in whole.items() if file_of[name] == file_name}
        save_file(shard, tmp_path / file_name)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": file_of}))
    sharded = Checkpoint.open(tmp_path)
    hidden = torch.randn(1, 5, 64, generator=torch.Generator().manual_seed(1))
    expected = run_step(
        load_engine(tiny_models.get().directory, WeightFormat.FP32, Span(2, 4)), hidden
    )
    for file_name in ("shard-0.safetensors", "shard-1.safetensors", "shard-rest.safetensors"):
        (tmp_path / file_name).unlink()

    engine = engine_loader.load_engine(
        sharded, Span(2, 4), WeightFormat.FP32, kv_budget_bytes=KV_BUDGET
    )

    assert torch.equal(run_step(engine, hidden), expected)


def test_loaded_weights_do_not_depend_on_the_file_any_more(tiny_models, tmp_path: Path) -> None:
    directory = copy_model(tiny_models.get(), tmp_path / "model")
    engine = load_engine(directory, WeightFormat.FP32)
    hidden = torch.randn(1, 5, 64, generator=torch.Generator().manual_seed(2))
    before = run_step(engine, hidden)

    # Overwrites in place: a mapping of the file would show it.
    with (directory / "model.safetensors").open("r+b") as file:
        file.seek(4096)
        file.write(b"\x7f" * 100_000)

    assert torch.equal(run_step(engine, hidden), before)


def test_load_reports_progress_by_blocks(tiny_models) -> None:
    reports = []

    load_engine(
        tiny_models.get().directory,
        WeightFormat.FP32,
        Span(1, 4),
        on_progress=lambda done, total: reports.append((done, total)),
    )

    assert reports == [(1, 3), (2, 3), (3, 3)]


def test_16_bit_checkpoints_load_in_every_format(tiny_models, tmp_path: Path) -> None:
    tensors = load_file(tiny_models.get("llama-biases").directory / "model.safetensors")
    halves = {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}
    directory = copy_model(tiny_models.get("llama-biases"), tmp_path / "model", **halves)
    hidden = torch.randn(1, 5, 64, generator=torch.Generator().manual_seed(3))

    outputs = {weights: run_step(load_engine(directory, weights), hidden) for weights in ON_CPUS}

    assert outputs[WeightFormat.BF16].dtype == torch.bfloat16
    for output in outputs.values():
        error = (output.float() - outputs[WeightFormat.FP32]).norm()
        assert error < 0.05 * outputs[WeightFormat.FP32].norm()


@pytest.mark.parametrize(
    ("variant", "expected"), [("gemma3", torch.float32), ("qwen3", torch.bfloat16)]
)
def test_norms_with_an_offset_keep_all_digits(tiny_models, variant: str, expected) -> None:
    engine = load_engine(tiny_models.get(variant).directory, WeightFormat.BF16, Span(0, 1))
    (block,) = engine._blocks
    assert isinstance(block, Block)

    assert {norm.weight_H.dtype for norm in block._norms.values()} == {expected}
    hidden = torch.randn(1, 3, 64, generator=torch.Generator().manual_seed(1))
    assert run_step(engine, hidden).dtype is torch.bfloat16


def test_int8_blocks_are_close_to_fp32(any_known_model) -> None:
    engine = load_engine(any_known_model.directory, WeightFormat.FP32)
    int8_engine = load_engine(any_known_model.directory, WeightFormat.INT8)
    generator = torch.Generator().manual_seed(4)
    for num_rows in (1, 40):
        hidden = torch.randn(num_rows, 4, engine.spec.hidden_size, generator=generator)

        exact, quantized = run_step(engine, hidden), run_step(int8_engine, hidden)

        # Four blocks of seven linears, each off by about one percent of its result.
        assert (quantized - exact).norm() < 0.05 * exact.norm(), num_rows


def test_int8_takes_at_most_105_bytes_for_100_parameters(tmp_path: Path, tiny_models) -> None:
    hidden, inner = 512, 1024
    config = json.loads((tiny_models.get().directory / "config.json").read_text())
    config |= {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": 1}
    config |= {"head_dim": 64, "num_attention_heads": 8, "num_key_value_heads": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = read_spec(config)
    assert isinstance(spec, ModelSpec)
    generator = torch.Generator().manual_seed(5)
    save_file(
        {
            read_name(local_name): torch.randn(shape, generator=generator)
            for local_name, shape in spec.tensor_shapes().items()
        },
        tmp_path / "model.safetensors",
    )

    engine = load_engine(tmp_path, WeightFormat.INT8, Span(0, 1))

    num_parameters = sum(math.prod(shape) for shape in spec.tensor_shapes().values())
    assert num_parameters <= engine.num_weight_bytes <= 1.05 * num_parameters


def read_name(local_name: str, block: int = 0) -> str:
    return BlockTensorNames().list_stored(block, local_name)[0]


@pytest.mark.parametrize("variant", ["bloom", "falcon", "gpt2"])
def test_checkpoints_of_the_bare_model_load_like_those_with_a_head(
    tiny_models, tmp_path: Path, variant: str
) -> None:
    directory = tiny_models.get(variant).directory
    tensors = load_file(directory / "model.safetensors")
    bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    save_file(bare, tmp_path / "model.safetensors")
    shutil.copy(directory / "config.json", tmp_path)
    hidden = torch.randn(1, 5, 64, generator=torch.Generator().manual_seed(6))

    output = run_step(load_engine(tmp_path, WeightFormat.FP32), hidden)

    assert torch.equal(output, run_step(load_engine(directory, WeightFormat.FP32), hidden))


def test_span_beyond_the_model_is_refused_before_reading(tiny_models) -> None:
    checkpoint = RecordingCheckpoint(Checkpoint.open(tiny_models.get().directory))

    with pytest.raises(UsageError, match="blocks 0:4, the span 2:5 reaches beyond"):
        engine_loader.load_engine(
            checkpoint,  # pyright: ignore[reportArgumentType]
            Span(2, 5),
            WeightFormat.FP32,
            kv_budget_bytes=KV_BUDGET,
        )
    assert checkpoint.reads == []


def test_unusable_rotary_parameters_are_refused_before_reading(tiny_models, tmp_path) -> None:
    directory = copy_model(tiny_models.get(), tmp_path / "model")
    config = json.loads((directory / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "spiral", "rope_theta": 10_000.0}
    (directory / "config.json").write_text(json.dumps(config))
    checkpoint = RecordingCheckpoint(Checkpoint.open(directory))

    with pytest.raises(ModelError, match="spiral"):
        engine_loader.load_engine(
            checkpoint,  # pyright: ignore[reportArgumentType]
            Span(0, 1),
            WeightFormat.FP32,
            kv_budget_bytes=KV_BUDGET,
        )
    assert checkpoint.reads == []


NAME = "model.layers.2.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("tensor", "complaint"),
    [
        (None, f"no tensor '{NAME}'"),
        (torch.zeros(96, 63), rf"{NAME} has shape \(96, 63\), config.json makes it \(96, 64\)"),
        (torch.zeros(96, 64, dtype=torch.int8), f"{NAME} is stored as torch.int8"),
        (torch.full((96, 64), float("nan")), f"{NAME} cannot be used"),
    ],
)
def test_unusable_tensors_are_refused_by_name(
    tiny_models, tmp_path: Path, tensor: torch.Tensor | None, complaint: str
) -> None:
    directory = copy_model(tiny_models.get(), tmp_path / "model", **{NAME: tensor})

    with pytest.raises(ModelError, match=complaint):
        load_engine(directory, WeightFormat.INT8)


def test_other_blocks_load_beside_a_damaged_one(tiny_models, tmp_path: Path) -> None:
    directory = copy_model(tiny_models.get(), tmp_path / "model", **{NAME: None})

    assert load_engine(directory, WeightFormat.INT8, Span(0, 2)).span == Span(0, 2)


def test_a_file_that_shrinks_after_opening_is_a_model_error(tiny_models, tmp_path: Path) -> None:
    directory = copy_model(tiny_models.get(), tmp_path / "model")
    checkpoint = Checkpoint.open(directory)
    spec = read_spec(checkpoint.config)
    assert isinstance(spec, ModelSpec)
    weights = directory / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])

    with pytest.raises(ModelError, match=r"model\.safetensors"):
        load_block(checkpoint, spec, 0, Numerics(WeightFormat.FP32))
