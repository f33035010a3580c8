"""Adapters that clients train: PEFT reads what we save, and we read what PEFT saves."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from shoal.client.training.lora import LoraAdapter
from shoal.protocol.errors import UsageError

peft = pytest.importorskip("peft")

# peft's own affair.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Setting .save_embedding_layers.:UserWarning"),
]

QUERY = "base_model.model.model.layers.1.self_attn.q_proj.lora_{}.weight"


def draw_matrices(adapter: LoraAdapter) -> None:
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for matrix in adapter.parameters():
            matrix.copy_(0.2 * torch.randn(matrix.shape, generator=generator))


def compute_logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(torch.arange(20)[None]).logits


@pytest.mark.parametrize(
    ("variant", "targets"),
    [
        ("llama", "all-linear"),
        ("llama", ["q_proj", "lm_head"]),
        ("llama", r".*layers\.[12]\.mlp\.up_proj"),
        ("gpt2", "all-linear"),
        ("phi3", "all-linear"),
        ("bloom", ["query_key_value"]),
    ],
)
def test_peft_opens_what_we_save_and_we_what_peft_saves(
    tiny_models: Any, variant: str, targets: Any, tmp_path: Path
) -> None:
    reference = tiny_models.get(variant).reference
    adapter = LoraAdapter.create(reference, rank=3, alpha=5, target_modules=targets)
    draw_matrices(adapter)
    adapter.save(tmp_path / "ours")

    theirs = peft.PeftModel.from_pretrained(copy.deepcopy(reference), tmp_path / "ours")
    stored = {
        name: matrix
        for name, matrix in peft.get_peft_model_state_dict(theirs).items()
        if ".base_layer." not in name
    }
    assert stored.keys() == adapter.state_dict().keys()
    for name, matrix in adapter.state_dict().items():
        assert torch.equal(stored[name], matrix)
    assert not torch.allclose(compute_logits(theirs), compute_logits(reference), atol=1e-3)

    theirs.save_pretrained(tmp_path / "theirs")
    again = LoraAdapter.load(tmp_path / "theirs", reference)
    again.save(tmp_path / "again")
    written, read = (
        json.loads((tmp_path / name / "adapter_config.json").read_text())
        for name in ("again", "theirs")
    )
    assert written == read
    reopened = peft.PeftModel.from_pretrained(copy.deepcopy(reference), tmp_path / "again")
    assert torch.equal(compute_logits(reopened), compute_logits(theirs))


def test_new_adapter_changes_nothing_and_is_the_same_for_a_seed(tiny_models: Any) -> None:
    reference = tiny_models.get().reference
    adapter = LoraAdapter.create(reference, rank=2)
    same = LoraAdapter.create(reference, rank=2)
    other = LoraAdapter.create(reference, rank=2, seed=1)

    name = QUERY.format("A")
    assert torch.equal(adapter.state_dict()[name], same.state_dict()[name])
    assert not torch.equal(adapter.state_dict()[name], other.state_dict()[name])
    assert not adapter.state_dict()[QUERY.format("B")].any()
    assert all(matrix.requires_grad for matrix in adapter.parameters())


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"rank": 0}, "rank must be a number from 1 to 256, not 0"),
        (
            {"rank": 33, "target_modules": ["v_proj"]},
            "v_proj has 64 inputs and 32 outputs, so its rank is at most 32, not 33",
        ),
        ({"rank": True}, "rank must be a number"),
        ({"alpha": float("nan")}, "alpha must be a number above 0"),
        ({"target_modules": ["c_attn"]}, "no linear that matches target_modules"),
        (
            {"target_modules": ["q_proj", "vproj"]},
            r"target_modules \['vproj'\]; it has down_proj, gate_proj, ",
        ),
        ({"target_modules": "("}, "is not a regular expression"),
        (
            {"target_modules": "q_proj"},
            r"'q_proj' is a regular expression for .* a list, \['q_proj'\]: it has ",
        ),
        ({"target_modules": "q_proj, v_proj"}, r"a list, \['q_proj', 'v_proj'\]: it has "),
        ({"target_modules": "vproj"}, r"a list, \['down_proj'\]: it has "),
    ],
)
def test_adapter_that_cannot_be_made_is_refused(
    tiny_models: Any, arguments: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(UsageError, match=complaint):
        LoraAdapter.create(tiny_models.get().reference, **arguments)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"bias": "all"}, "bias = 'all' is not supported"),
        ({"peft_type": "IA3"}, "does not describe a LoRA adapter"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights = 'pissa' is not supported"),
        ({"r": 5}, r"has shape \(4, 96\), this model needs \(5, 96\)"),
    ],
)
def test_configuration_that_is_not_understood_is_refused(
    tiny_models: Any, change: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    reference = tiny_models.get().reference
    LoraAdapter.create(reference, rank=4).save(tmp_path)
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))

    with pytest.raises(UsageError, match=complaint):
        LoraAdapter.load(tmp_path, reference)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({QUERY.format("A"): torch.full((4, 64), float("nan"))}, "does not hold finite floats"),
        (
            {QUERY.format("A"): torch.ones(4, 64, dtype=torch.float64)},
            "is of type float64; adapters are read in float32, bfloat16, float16",
        ),
        ({QUERY.format("A"): torch.ones(4, 64, dtype=torch.int8)}, "is of type int8"),
        ({QUERY.format("B"): None}, "q_proj has only one of lora_A and lora_B"),
        ({"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(4, 128)}, "embedding"),
        ({"base_model.model.model.layers.1.gate.lora_A.weight": torch.ones(4, 64)}, "no linear"),
        ({"layers.1.weight": torch.ones(4, 64)}, "is not a name that PEFT gives to LoRA"),
    ],
)
def test_matrices_that_do_not_fit_are_refused_by_name(
    tiny_models: Any, change: dict[str, Tensor | None], complaint: str, tmp_path: Path
) -> None:
    reference = tiny_models.get().reference
    adapter = LoraAdapter.create(reference, rank=4)
    adapter.save(tmp_path)
    changed = {**adapter.state_dict(), **change}
    left = {name: matrix for name, matrix in changed.items() if matrix is not None}
    safetensors.torch.save_file(left, tmp_path / "adapter_model.safetensors")

    with pytest.raises(UsageError, match=complaint):
        LoraAdapter.load(tmp_path, reference)


def test_rank_of_peft_that_a_linear_has_no_use_for_is_refused(
    tiny_models: Any, tmp_path: Path
) -> None:
    reference = tiny_models.get().reference
    config = peft.LoraConfig(r=33, target_modules=["q_proj", "v_proj"])
    peft.get_peft_model(copy.deepcopy(reference), config).save_pretrained(tmp_path)

    with pytest.raises(UsageError, match="v_proj has 64 inputs and 32 outputs, so its rank is"):
        LoraAdapter.load(tmp_path, reference)


def test_pickled_and_missing_files_are_not_opened(tiny_models: Any, tmp_path: Path) -> None:
    reference = tiny_models.get().reference
    with pytest.raises(UsageError, match="cannot read an adapter from"):
        LoraAdapter.load(tmp_path, reference)
    LoraAdapter.create(reference).save(tmp_path)
    tensors = tmp_path / "adapter_model.safetensors"
    tensors.write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(UsageError, match=r"model\.safetensors is truncated or damaged"):
        LoraAdapter.load(tmp_path, reference)
    LoraAdapter.create(reference).save(tmp_path)
    tensors.write_bytes(tensors.read_bytes()[:-5])
    with pytest.raises(UsageError, match=r"model\.safetensors is truncated or damaged"):
        LoraAdapter.load(tmp_path, reference)
    tensors.rename(tmp_path / "adapter_model.bin")
    with pytest.raises(UsageError, match=r"adapter_model.bin is pickled"):
        LoraAdapter.load(tmp_path, reference)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_folder_in_place_of_a_file_is_named(tiny_models: Any, name: str, tmp_path: Path) -> None:
    reference = tiny_models.get().reference
    LoraAdapter.create(reference).save(tmp_path)
    (tmp_path / name).unlink()
    (tmp_path / name).mkdir()

    with pytest.raises(UsageError, match=f"{name} is a folder, not an adapter file"):
        LoraAdapter.load(tmp_path, reference)


def test_adapter_of_another_model_is_refused(tiny_models: Any, tmp_path: Path) -> None:
    LoraAdapter.create(tiny_models.get("gpt2").reference).save(tmp_path)
    with pytest.raises(UsageError, match=r"does not fit: .* no linear transformer"):
        LoraAdapter.load(tmp_path, tiny_models.get().reference)
