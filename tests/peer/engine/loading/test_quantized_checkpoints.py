"""Checkpoints that come quantized: what transformers computes with the weights they stand for."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_checkpoints import Awq, Compressed, Gptq, QuantizedModel, Scheme, save_quantized
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from shoal.kernels.linear.quantize import WeightFormat
from shoal.models.checkpoints.checkpoint import Checkpoint
from shoal.models.spec_reader import read_spec
from shoal.models.specs.model_spec import ModelSpec
from shoal.peer.engine.devices.device import Numerics
from shoal.peer.engine.loading.block_cache import open_block_cache
from shoal.peer.engine.loading.block_tensors import BlockTensors
from shoal.peer.engine.loading.engine_loader import load_engine
from shoal.peer.engine.steps import StepWork
from shoal.protocol.errors import ModelError
from shoal.protocol.spans import Span

TOLERANCE = 1e-4

SCHEMES: dict[str, Scheme] = {
    "gptq": Gptq(),
    "gptq-symmetric": Gptq(symmetric=True),
    "gptq-no-g-idx": Gptq(has_g_idx=False),
    "gptq-desc-act": Gptq(desc_act=True),
    "gptq-desc-act-symmetric": Gptq(desc_act=True, symmetric=True, group_size=32),
    "gptq-v2": Gptq(version=2),
    "gptq-one-group": Gptq(group_size=-1, symmetric=True),
    "gptq-8-bits": Gptq(bits=8),
    "gptq-uneven-groups": Gptq(group_size=40),
    "awq": Awq(),
    "awq-one-group": Awq(group_size=-1),
    "int-channel": Compressed(),
    "int-channel-w8a8": Compressed(
        activations={"num_bits": 8, "type": "int", "dynamic": True, "strategy": "token"}
    ),
    "int-tensor": Compressed("naive-quantized", strategy="tensor"),
    "int-channel-asymmetric": Compressed(symmetric=False),
    "int-group": Compressed(strategy="group"),
    "packed-4-group": Compressed("pack-quantized", bits=4, strategy="group"),
    "packed-4-channel": Compressed("pack-quantized", bits=4),
    "packed-4-asymmetric": Compressed("pack-quantized", 4, "group", symmetric=False),
    "packed-4-g-idx": Compressed("pack-quantized", 4, "group", has_g_idx=True),
    "packed-8-channel": Compressed("pack-quantized", bits=8),
}


def run(directory: Path, hidden: torch.Tensor, weights: WeightFormat, **options: Any) -> Any:
    """Return what the engine makes of hidden states."""
    engine = load_engine(
        Checkpoint.open(directory), Span(0, 4), weights, kv_budget_bytes=2**24, **options
    )
    session = engine.pool.open(hidden.shape[0], hidden.shape[1], engine.span)
    (output,) = engine.execute([StepWork(session, 0, hidden)])
    session.close()
    assert isinstance(output, torch.Tensor), output
    return output


@torch.no_grad()
def check_equal_to_transformers(model: QuantizedModel) -> None:
    reference: Any = AutoModelForCausalLM.from_pretrained(
        model.dense_directory, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    decoder = reference.base_model
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(3, 128, (2, 17), generator=generator)
    states = decoder(tokens, output_hidden_states=True).hidden_states

    output = run(model.directory, states[0], WeightFormat.FP32)

    norm = getattr(decoder, "norm", None) or decoder.ln_f
    torch.testing.assert_close(norm(output), states[-1], rtol=0, atol=TOLERANCE)


# What these do, another of the same format does as well.
ALIKE = {
    "gptq-symmetric", "gptq-desc-act", "awq-one-group", "int-channel", "packed-4-group",
    "packed-4-channel",
}  # fmt: skip


@pytest.mark.parametrize(
    "scheme",
    [
        pytest.param(scheme, id=name, marks=[pytest.mark.thorough] * (name in ALIKE))
        for name, scheme in SCHEMES.items()
    ],
)
def test_engine_computes_what_the_integers_stand_for(
    tiny_models, tmp_path: Path, scheme: Scheme
) -> None:
    source = tiny_models.get("llama").directory

    check_equal_to_transformers(save_quantized(source, tmp_path, scheme))


@pytest.mark.parametrize(
    ("variant", "scheme"),
    [
        ("llama-biases", Gptq()),
        ("gpt2", Gptq(desc_act=True)),
        ("falcon-grouped", Gptq()),
        ("falcon-grouped", Compressed()),
        ("phi3", Awq()),
        ("mixtral", Awq()),
        ("qwen3", Compressed("pack-quantized", 4, "group", group_size=8)),
    ],
)
def test_families_differ_in_nothing(
    tiny_models, tmp_path: Path, variant: str, scheme: Scheme
) -> None:
    source = tiny_models.get(variant).directory

    check_equal_to_transformers(save_quantized(source, tmp_path, scheme))


@pytest.mark.parametrize("name", ["gptq-desc-act", "awq", "packed-4-asymmetric", "int-tensor"])
def test_int8_blocks_are_those_of_the_plain_checkpoint(
    tiny_models, tmp_path: Path, name: str
) -> None:
    model = save_quantized(tiny_models.get("llama").directory, tmp_path, SCHEMES[name])
    hidden = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(4))

    exact = run(model.dense_directory, hidden, WeightFormat.FP32)
    output = run(model.directory, hidden, WeightFormat.INT8)

    assert (output - exact).norm() < 0.05 * exact.norm()


@pytest.mark.parametrize(
    "name", ["int-channel", "int-channel-w8a8", "packed-8-channel", "packed-4-channel"]
)
def test_int8_of_one_scale_per_output_is_taken_over_bit_by_bit(
    tiny_models, tmp_path: Path, name: str
) -> None:
    model = save_quantized(tiny_models.get("llama").directory, tmp_path, SCHEMES[name])
    checkpoint = Checkpoint.open(model.directory)
    spec = read_spec(checkpoint.config)
    assert isinstance(spec, ModelSpec)
    tensors = BlockTensors(checkpoint, spec, 1, Numerics(WeightFormat.INT8))

    taken = tensors._load_int8(("gate", "up"), 0)

    names = ("model.layers.1.mlp.gate_proj.", "model.layers.1.mlp.up_proj.")
    dense = load_file(model.dense_directory / "model.safetensors")
    dense_OI = torch.cat([dense[f"{stem}weight"] for stem in names])
    scales_O = torch.cat([checkpoint.load(f"{stem}weight_scale")[:, 0] for stem in names])
    assert torch.equal(taken.scales_O, scales_O.float())
    assert torch.equal(taken.values_OI.float() * taken.scales_O[:, None], dense_OI)
    assert not tensors.quantized
    if name.startswith("int"):
        stored_OI = torch.cat([checkpoint.load(f"{stem}weight") for stem in names])
        assert torch.equal(taken.values_OI, stored_OI)


def test_cache_keeps_what_was_quantized_and_not_what_came_so(
    tiny_models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.peer.engine.loading.block_cache.MIN_ENTRY_BYTES", 1)
    hidden = torch.randn(1, 5, 64, generator=torch.Generator().manual_seed(4))
    num_entries = []
    for name in ("gptq", "int-channel"):
        source = tiny_models.get("llama").directory
        model = save_quantized(source, tmp_path / name, SCHEMES[name])
        blocks = tmp_path / name / "blocks"
        outputs = [
            run(model.directory, hidden, WeightFormat.INT8, cache=open_block_cache(2**24, blocks))
            for _ in range(2)
        ]
        assert torch.equal(*outputs)
        num_entries.append(len(list(blocks.iterdir())))

    assert num_entries == [4, 0]


# What cannot be read is called by its name.


@pytest.fixture(scope="module")
def quantized(tiny_models, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One checkpoint of each kind."""
    source = tiny_models.get("llama").directory
    names = ("gptq", "awq", "int-channel", "packed-4-asymmetric")
    return {
        name: save_quantized(source, tmp_path_factory.mktemp(name), SCHEMES[name]).directory
        for name in names
    }


STEM = "model.layers.0.mlp.up_proj."


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        ("gptq", {"qweight": torch.zeros(8, 95, dtype=torch.int32)}, r"qweight has shape \(8, 95"),
        ("gptq", {"qweight": torch.zeros(8, 96)}, "qweight is stored as torch.float32 in place"),
        ("gptq", {"qzeros": None}, "no tensor .*qzeros"),
        ("gptq", {"qzeros": torch.zeros(2, 12, dtype=torch.int32)}, r"qzeros has shape \(2, 12"),
        ("gptq", {"scales": torch.zeros(4, 96).int()}, "scales is stored as torch.int32"),
        ("gptq", {"scales": torch.full((4, 96), float("nan"))}, "scales holds NaN"),
        ("gptq", {"g_idx": torch.full((64,), 4).int()}, "g_idx names groups beyond the 4"),
        ("gptq", {"g_idx": torch.full((64,), -1).int()}, "g_idx names groups beyond"),
        ("gptq", {"g_idx": torch.zeros(63).int()}, r"g_idx has shape \(63,\)"),
        ("awq", {"qweight": torch.zeros(96, 8).int()}, r"qweight has shape \(96, 8\)"),
        ("awq", {"scales": torch.zeros(4, 95)}, r"scales has shape \(4, 95\)"),
        ("int-channel", {"weight": torch.zeros(96, 64)}, "weight is stored as torch.float32"),
        ("int-channel", {"weight_scale": torch.zeros(96)}, r"weight_scale has shape \(96,\)"),
        ("packed-4-asymmetric", {"weight_shape": torch.tensor([96, 63])}, r"shape \(96, 63\)"),
        ("packed-4-asymmetric", {"weight_zero_point": None}, "no tensor .*weight_zero_point"),
        ("packed-4-asymmetric", {"weight_packed": torch.zeros(96, 9).int()}, r"\(96, 9\)"),
    ],
)
@pytest.mark.parametrize("weights", [WeightFormat.INT8, WeightFormat.FP32])
def test_impossible_parts_are_named(
    quantized: dict[str, Path],
    tmp_path: Path,
    kind: str,
    changes: dict[str, torch.Tensor | None],
    words: str,
    weights: WeightFormat,
) -> None:
    directory = tmp_path / "model"
    shutil.copytree(quantized[kind], directory)
    tensors = load_file(directory / "model.safetensors")
    for end, tensor in changes.items():
        if tensor is None:
            del tensors[STEM + end]
        else:
            tensors[STEM + end] = tensor
    save_file(tensors, directory / "model.safetensors")

    with pytest.raises(ModelError, match=words) as caught:
        load_engine(Checkpoint.open(directory), Span(0, 1), weights, kv_budget_bytes=2**24)
    assert "\n" not in str(caught.value)


GROUP = Compressed().config()["config_groups"]["group_0"]
FOUR_BITS = {**GROUP, "weights": {**GROUP["weights"], "num_bits": 4}}
FLOAT = {**GROUP, "weights": {**GROUP["weights"], "type": "float"}}
NO_SIZE = {**GROUP, "weights": {**GROUP["weights"], "strategy": "group"}}


@pytest.mark.parametrize(
    ("scheme", "changes", "words"),
    [
        (Gptq(), {"quant_method": "bitsandbytes"}, "quant_method 'bitsandbytes'"),
        (Gptq(), {"quant_method": None}, "quant_method None"),
        (Gptq(), {"quant_method": ["gptq"]}, "is not supported"),
        (Gptq(), {"bits": 3}, "GPTQ with bits 3 is not supported, only 4, 8"),
        (Gptq(), {"bits": True}, "GPTQ with bits True"),
        (Gptq(), {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
        (Gptq(), {"pack_dtype": "int64"}, "pack_dtype 'int64'"),
        (Gptq(), {"group_size": 0}, "group_size 0 is not possible"),
        (Gptq(), {"group_size": "128"}, "group_size '128' is not possible"),
        (Gptq(), {"dynamic": {"+:.*down.*": {"bits": 8}}}, "dynamic"),
        (Awq(), {"version": "gemv"}, "AWQ with version 'gemv'"),
        (Awq(), {"bits": 8}, "AWQ with bits 8"),
        (Awq(), {"zero_point": False}, "AWQ with zero_point False"),
        (Compressed(), {"format": "float-quantized"}, "format 'float-quantized'"),
        (Compressed(), {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24-bitmask"),
        (Compressed(), {"transform_config": {"config_groups": {"a": {}}}}, "transform_config"),
        (Compressed(), {"config_groups": {}}, "0 different config_groups"),
        (Compressed(), {"config_groups": {"a": GROUP, "b": FOUR_BITS}}, "2 different"),
        (Compressed(), {"config_groups": {"a": FOUR_BITS}}, "num_bits 4"),
        (Compressed(), {"config_groups": {"a": FLOAT}}, "type 'float'"),
        (Compressed(), {"config_groups": {"a": NO_SIZE}}, "no group_size"),
        (Compressed(), {"config_groups": {"a": 7}}, "config_groups must be an object"),
        (Compressed(), {"config_groups": {"a": {"weights": None}}}, "weights must be an object"),
    ],
)
def test_unsupported_settings_are_named_before_anything_is_read(
    tiny_models, scheme: Scheme, changes: dict[str, Any], words: str
) -> None:
    config = json.loads((tiny_models.get("llama").directory / "config.json").read_text())
    config["quantization_config"] = {**scheme.config(), **changes}

    with pytest.raises(ModelError, match=words) as caught:
        read_spec(config)
    assert "\n" not in str(caught.value)


def test_linears_that_were_left_alone_are_read_as_usual(
    quantized: dict[str, Path], tiny_models, tmp_path: Path
) -> None:
    directory = tmp_path / "model"
    shutil.copytree(quantized["gptq"], directory)
    tensors = load_file(directory / "model.safetensors")
    for end in ("qweight", "qzeros", "scales", "g_idx"):
        del tensors[STEM + end]
    plain = load_file(tiny_models.get("llama").directory / "model.safetensors")
    tensors[f"{STEM}weight"] = plain[f"{STEM}weight"]
    save_file(tensors, directory / "model.safetensors")
    hidden = torch.randn(1, 5, 64, generator=torch.Generator().manual_seed(4))

    output = run(directory, hidden, WeightFormat.FP32)

    assert output.isfinite().all()
    assert not torch.equal(output, run(quantized["gptq"], hidden, WeightFormat.FP32))


def test_older_name_of_the_settings_counts_as_well(quantized: dict[str, Path]) -> None:
    config: dict[str, Any] = dict(Checkpoint.open(quantized["int-channel"]).config)
    config["compression_config"] = {**config.pop("quantization_config"), "format": "marlin-24"}

    with pytest.raises(ModelError, match="format 'marlin-24'"):
        read_spec(config)
