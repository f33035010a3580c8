"""Embedding, final norm and head come from the checkpoint, and nothing else does."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from shoal.client.model.local_layers import (
    LocalLayers,
    load_config,
    load_local_layers,
    resolve_dtype,
)
from shoal.models.checkpoints.checkpoint import Checkpoint
from shoal.models.spec_reader import read_spec
from shoal.protocol.errors import ModelError, UsageError

SEED = 1234


@dataclass
class CountingCheckpoint:
    """A checkpoint that notes which tensors are read."""

    inner: Checkpoint
    read: list[str] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def load(self, name: str) -> Tensor:
        self.read.append(name)
        return self.inner.load(name)


def copy_checkpoint(
    source: Path, target: Path, config: dict[str, Any], tensors: dict[str, Tensor | None]
) -> Checkpoint:
    """Write a checkpoint with changes; a tensor of None is left out."""
    target.mkdir()
    content = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**content, **config}))
    changed = {**load_file(source / "model.safetensors"), **tensors}
    kept = {name: tensor for name, tensor in changed.items() if tensor is not None}
    save_file(kept, target / "model.safetensors", {"format": "pt"})
    return Checkpoint.open(target)


def open_layers(checkpoint: Checkpoint) -> LocalLayers:
    """Read the configuration and the layers, as models do."""
    load_config(checkpoint)
    return load_local_layers(checkpoint)


@torch.no_grad()
def test_layers_equal_transformers(any_known_model: Any) -> None:
    checkpoint = Checkpoint.open(any_known_model.directory)
    layers = load_local_layers(checkpoint)
    reference = any_known_model.reference
    generator = torch.Generator().manual_seed(SEED)
    hidden = torch.randn(2, 3, reference.config.hidden_size, generator=generator)
    ids = torch.randint(0, 128, (2, 3), generator=generator)
    logits = reference.lm_head(hidden)
    softcap = getattr(reference.config, "final_logit_softcapping", None)
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap

    torch.testing.assert_close(layers.embedding(ids), reference.get_input_embeddings()(ids))
    torch.testing.assert_close(
        layers.norm(hidden), any_known_model.final_norm(hidden), atol=1e-6, rtol=0
    )
    torch.testing.assert_close(layers.head(hidden), logits, atol=1e-5, rtol=0)


def test_loading_reads_only_the_tensors_of_the_client(tiny_models: Any) -> None:
    checkpoint = CountingCheckpoint(Checkpoint.open(tiny_models.get("llama").directory))

    load_local_layers(checkpoint)  # pyright: ignore[reportArgumentType]

    assert sorted(checkpoint.read) == [
        "lm_head.weight",
        "model.embed_tokens.weight",
        "model.norm.weight",
    ]


def test_tied_head_shares_the_embedding(tiny_models: Any) -> None:
    checkpoint = Checkpoint.open(tiny_models.get("llama-tied").directory)

    layers = load_local_layers(checkpoint)

    assert layers.head.weight is layers.embedding.weight


def test_stored_head_is_shared_only_if_it_equals_the_embedding(
    tiny_models: Any, tmp_path: Path
) -> None:
    source = tiny_models.get("llama-tied").directory
    embedding = load_file(source / "model.safetensors")["model.embed_tokens.weight"]
    same = copy_checkpoint(source, tmp_path / "a", {}, {"lm_head.weight": embedding.clone()})
    other = copy_checkpoint(source, tmp_path / "b", {}, {"lm_head.weight": embedding + 1})

    same_layers = load_local_layers(same)
    other_layers = load_local_layers(other)

    assert same_layers.head.weight is same_layers.embedding.weight
    assert torch.equal(other_layers.head.weight, embedding + 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtype_is_that_of_the_checkpoint_unless_asked(
    tiny_models: Any, tmp_path: Path, dtype: torch.dtype
) -> None:
    source = tiny_models.get("llama").directory
    tensors = load_file(source / "model.safetensors")
    stored: dict[str, Tensor | None] = {name: t.to(dtype) for name, t in tensors.items()}
    checkpoint = copy_checkpoint(source, tmp_path / "model", {}, stored)

    layers = load_local_layers(checkpoint)
    asked = load_local_layers(checkpoint, torch.float32)

    assert layers.embedding.weight.dtype == layers.norm.weight.dtype == dtype
    assert layers.head.weight.dtype == dtype
    assert layers.head(torch.ones(1, 1, 64)).dtype == torch.float32
    assert asked.head.weight.dtype == torch.float32


def test_layers_outlive_the_file(tiny_models: Any, tmp_path: Path) -> None:
    source = tiny_models.get("llama").directory
    checkpoint = copy_checkpoint(source, tmp_path / "model", {}, {})
    layers = load_local_layers(checkpoint)
    before = layers.embedding.weight.clone()

    path = tmp_path / "model" / "model.safetensors"
    path.write_bytes(b"\0" * path.stat().st_size)

    assert torch.equal(layers.embedding.weight, before)


@pytest.mark.parametrize(
    ("config", "tensors", "message"),
    [
        (
            {"model_type": "mamba"},
            {},
            "^models of type 'mamba' are not supported: its blocks (do not cache|cache more)",
        ),
        ({"model_type": "bert"}, {}, "'bert' are not supported: it is not a list of blocks"),
        (
            {"model_type": "nonsense"},
            {},
            "'nonsense' are not supported: transformers does not know",
        ),
        ({"model_type": None}, {}, "^config.json has no model_type"),
        ({"model_type": ["llama"]}, {}, "^config.json: model_type must be a string"),
        ({"hidden_size": 0}, {}, "hidden_size"),
        ({"hidden_size": 2**30}, {}, "hidden_size"),
        ({"num_hidden_layers": 0}, {}, "num_hidden_layers"),
        ({"num_hidden_layers": "8"}, {}, "^config.json: num_hidden_layers .* got '8'"),
        ({"num_attention_heads": 0}, {}, "num_attention_heads"),
        ({"rms_norm_eps": "x"}, {}, "^config.json: rms_norm_eps .* got 'x'"),
        ({"rms_norm_eps": None}, {}, "rms_norm_eps"),
        ({"rms_norm_eps": -1.0}, {}, "rms_norm_eps"),
        ({"max_position_embeddings": "many"}, {}, "^config.json: max_position_embeddings"),
        ({"vocab_size": "many"}, {}, "vocab_size"),
        ({"vocab_size": 127}, {}, r"embed_tokens.weight' has shape \[128, 64\]"),
        ({}, {"model.norm.weight": torch.ones(65)}, r"norm.weight' has shape \[65\]"),
        ({}, {"model.norm.weight": None}, "no tensor 'model.norm.weight'"),
        ({}, {"lm_head.weight": None}, "lm_head.weight"),
        ({}, {"model.norm.weight": torch.ones(64, dtype=torch.int8)}, "torch.int8"),
    ],
    ids=str,
)
def test_unusable_checkpoint_is_named(
    tiny_models: Any,
    tmp_path: Path,
    config: dict[str, Any],
    tensors: dict[str, Tensor | None],
    message: str,
) -> None:
    source = tiny_models.get("llama").directory
    checkpoint = copy_checkpoint(source, tmp_path / "model", config, tensors)

    with pytest.raises(ModelError, match=message):
        open_layers(checkpoint)


@pytest.mark.parametrize(
    "change",
    [
        *({"model_type": name} for name in (None, "nonsense", "ctrl", "nanochat", "mamba", "t5")),
        {"hidden_size": 2**30},
        {"num_attention_heads": 0},
        {"rms_norm_eps": "x"},
    ],
    ids=str,
)
def test_client_and_peers_refuse_a_model_with_the_same_sentence(
    tiny_models: Any, tmp_path: Path, change: dict[str, object]
) -> None:
    source = tiny_models.get("llama").directory
    checkpoint = copy_checkpoint(source, tmp_path / "model", change, {})

    with pytest.raises(ModelError) as by_client:
        load_config(checkpoint)
    with pytest.raises(ModelError) as by_peer:
        read_spec(checkpoint.config)

    assert str(by_client.value) == str(by_peer.value)
    assert "\n" not in str(by_peer.value)


def test_layers_of_a_bare_checkpoint_are_found(tiny_models: Any, tmp_path: Path) -> None:
    whole = Checkpoint.open(tiny_models.get("gpt2").directory)
    bare: dict[str, Tensor | None] = dict.fromkeys(whole.names)
    bare |= {name.removeprefix("transformer."): whole.load(name) for name in whole.names}
    checkpoint = copy_checkpoint(whole.directory, tmp_path / "model", {}, bare)

    layers = load_local_layers(checkpoint)

    assert layers.positions is not None
    assert torch.equal(
        layers.positions.get_parameter("weight"), whole.load("transformer.wpe.weight")
    )
    assert torch.equal(layers.norm.get_parameter("weight"), whole.load("transformer.ln_f.weight"))


@pytest.mark.parametrize("prefix", ["model.", "model.decoder."])
def test_wrapped_layers_of_a_bare_checkpoint_are_found(
    tiny_models: Any, tmp_path: Path, prefix: str
) -> None:
    whole = Checkpoint.open(tiny_models.get("wrapped-opt").directory)
    bare: dict[str, Tensor | None] = dict.fromkeys(whole.names)
    bare |= {name.removeprefix(prefix): whole.load(name) for name in whole.names}
    checkpoint = copy_checkpoint(whole.directory, tmp_path / "model", {}, bare)
    hidden = torch.randn(1, 40, 64, generator=torch.Generator().manual_seed(SEED))

    found, expected = (load_local_layers(each) for each in (checkpoint, whole))

    assert torch.equal(found.embedding.weight, expected.embedding.weight)
    assert torch.equal(found.head(hidden), expected.head(hidden))
    assert found.positions is not None
    assert expected.positions is not None
    assert torch.equal(found.positions(hidden, 3), expected.positions(hidden, 3))


def test_a_number_of_norms_that_a_wrapped_family_lacks_may_be_null(
    tiny_models: Any, tmp_path: Path
) -> None:
    source = tiny_models.get("wrapped-stablelm").directory
    checkpoint = copy_checkpoint(source, tmp_path / "model", {"rms_norm_eps": None}, {})

    assert load_config(checkpoint).model_type == "stablelm"


def test_positions_that_are_fewer_than_config_json_says_are_named(
    tiny_models: Any, tmp_path: Path
) -> None:
    source = tiny_models.get("wrapped-opt").directory
    damaged = {"max_position_embeddings": 10**15}
    checkpoint = copy_checkpoint(source, tmp_path / "model", damaged, {})

    with pytest.raises(ModelError, match=r"embed_positions.weight has shape \(514, 64\)"):
        load_local_layers(checkpoint)
    with pytest.raises(ModelError, match="max_position_embeddings must be a whole number"):
        read_spec(checkpoint.config)


def test_a_long_rotation_limits_the_model_to_what_peers_serve(tiny_models: Any) -> None:
    checkpoint = Checkpoint.open(tiny_models.get("phi3-longrope").directory)

    assert checkpoint.config["max_position_embeddings"] == 3200
    assert load_config(checkpoint).max_position_embeddings == 400


@pytest.mark.parametrize(
    ("rope", "max_positions"), [({}, 128), ({"original_max_position_embeddings": 300}, 128)]
)
def test_client_and_peers_agree_how_far_a_long_rotation_goes(
    tiny_models: Any, tmp_path: Path, rope: dict[str, Any], max_positions: int
) -> None:
    factors = {"short_factor": [1.5] * 8, "long_factor": [4.0] * 8}
    changes = {
        "rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, **factors, **rope},
        "original_max_position_embeddings": 128,
    }
    source = tiny_models.get("llama").directory
    checkpoint = copy_checkpoint(source, tmp_path / "model", changes, {})

    assert read_spec(checkpoint.config).max_positions == max_positions
    assert load_config(checkpoint).max_position_embeddings == max_positions


def test_configuration_cannot_ask_for_foreign_attention_code(
    tiny_models: Any, tmp_path: Path
) -> None:
    source = tiny_models.get("llama").directory
    checkpoint = copy_checkpoint(
        source, tmp_path / "model", {"attn_implementation": "someone/code"}, {}
    )

    assert load_config(checkpoint)._attn_implementation == "eager"


@pytest.mark.parametrize(
    ("requested", "expected"),
    [
        (None, None),
        ("auto", None),
        ("float16", torch.float16),
        ("torch.bfloat16", torch.bfloat16),
        ("bf16", torch.bfloat16),
        (torch.float32, torch.float32),
    ],
)
def test_dtype_is_resolved(requested: Any, expected: torch.dtype | None) -> None:
    assert resolve_dtype(requested) == expected


@pytest.mark.parametrize("requested", ["float8", "int8", torch.int64, "half precision"])
def test_unknown_dtype_is_refused(requested: Any) -> None:
    with pytest.raises(UsageError, match="float32, bfloat16, float16"):
        resolve_dtype(requested)
