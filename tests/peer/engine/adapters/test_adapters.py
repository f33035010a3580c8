"""Adapters in PEFT's format are read for the blocks that they change, or refused by name."""

from __future__ import annotations

import json
import math
import pickle
from typing import Any

import pytest
import safetensors.torch
import torch
from pass_scene import draw
from torch import Tensor

from shoal.models.checkpoints.checkpoint import Checkpoint
from shoal.models.spec_reader import read_spec
from shoal.peer.engine.adapters.adapter import Adapter
from shoal.peer.engine.adapters.adapter_file import read_adapter
from shoal.protocol.errors import ErrorCode, RefusedError
from shoal.protocol.spans import Span

CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
PATH = "base_model.model.model.layers.{}.self_attn.{}.lora_{}.weight"


def make_matrices(rank: int = 4, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    tensors = {}
    for block in range(4):
        for name, outputs in (("q_proj", 64), ("v_proj", 32)):
            seed = 10 * block + outputs
            tensors[PATH.format(block, name, "A")] = draw(rank, 64, seed=seed).to(dtype)
            tensors[PATH.format(block, name, "B")] = draw(outputs, rank, seed=seed + 1).to(dtype)
    return tensors


def read(
    tiny_models: Any,
    config: Any = CONFIG,
    tensors: dict[str, Tensor] | bytes | None = None,
    variant: str = "llama",
) -> Adapter:
    settings = Checkpoint.open(tiny_models.get(variant).directory).config
    spec = read_spec(settings)
    data = tensors if isinstance(tensors, bytes) else safetensors.torch.save(
        make_matrices() if tensors is None else tensors
    )  # fmt: skip
    written = config if isinstance(config, bytes) else json.dumps(config).encode()
    return read_adapter(written, data, spec, Span(1, 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_parts_lie_where_the_model_has_them(tiny_models, dtype: torch.dtype) -> None:
    tensors = make_matrices(dtype=dtype)

    adapter = read(tiny_models, tensors=tensors)

    assert set(adapter.parts) == {(1, "query_key_value"), (2, "query_key_value")}
    query, value = sorted(adapter.parts[1, "query_key_value"], key=lambda part: part.outputs.start)
    assert (query.outputs, value.outputs) == (slice(0, 64), slice(96, 128))
    assert query.module == "model.layers.1.self_attn.q_proj"
    assert torch.equal(query.down_RI, tensors[PATH.format(1, "q_proj", "A")])
    assert torch.equal(value.up_OR, tensors[PATH.format(1, "v_proj", "B")])
    assert adapter.num_bytes == 2 * 4 * (64 + 64 + 64 + 32) * dtype.itemsize


@pytest.mark.parametrize(("changes", "scale"), [({}, 2.0), ({"use_rslora": True}, 4.0)])
def test_scale_is_that_of_peft(tiny_models, changes: dict, scale: float) -> None:
    adapter = read(tiny_models, {**CONFIG, **changes})

    assert {part.scale for parts in adapter.parts.values() for part in parts} == {scale}


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        (b"\x80\x04", "not JSON"),
        (b"[" * 50_000, "not JSON"),
        ([], "does not describe a LoRA adapter"),
        ({**CONFIG, "peft_type": "IA3"}, "does not describe a LoRA adapter"),
        ({**CONFIG, "r": 0}, "its rank r must be a number from 1 to 256, not 0"),
        ({**CONFIG, "r": 257}, "its rank r must be a number from 1 to 256, not 257"),
        ({**CONFIG, "r": True}, "its rank r must be"),
        ({**CONFIG, "r": 2**40}, "its rank r must be"),
        ({**CONFIG, "r": 8}, r"lora_A.weight has shape \(4, 64\), this model needs \(8, 64\)"),
        ({**CONFIG, "lora_alpha": None}, "lora_alpha must be a number"),
        ({**CONFIG, "lora_alpha": float("nan")}, "lora_alpha must be a number"),
        ({**CONFIG, "use_rslora": "false"}, "use_rslora must be true or false, not 'false'"),
        ({**CONFIG, "use_dora": True}, "use_dora = True is not supported"),
        ({**CONFIG, "init_lora_weights": "pissa"}, "init_lora_weights = 'pissa' is not supported"),
        ({**CONFIG, "alora_invocation_tokens": [3]}, "alora_invocation_tokens = .* not supported"),
        ({**CONFIG, "bias": "all"}, "bias = 'all' is not supported"),
        ({**CONFIG, "rank_pattern": {"q_proj": 2}}, "rank_pattern = .* is not supported"),
    ],
)
def test_unusable_configurations_are_refused(tiny_models, config: Any, complaint: str) -> None:
    with pytest.raises(RefusedError, match=complaint) as refusal:
        read(tiny_models, config)
    assert refusal.value.code is ErrorCode.BAD_VALUES


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({PATH.format(9, "q_proj", "A"): draw(4, 64)}, "9.self_attn.q_proj has only one of"),
        ({PATH.format(0, "q_proj", "A"): draw(4, 63)}, r"\(4, 63\), this model needs \(4, 64\)"),
        ({PATH.format(3, "v_proj", "B"): draw(64, 4)}, r"\(64, 4\), this model needs \(32, 4\)"),
        ({PATH.format(0, "q_proj", "A"): draw(4, 64) / 0}, "does not hold finite floats"),
        ({PATH.format(0, "q_proj", "A"): draw(4, 64).int()}, "does not hold finite floats"),
        ({"model.layers.0.weight": draw(4, 64)}, "is not a name that PEFT gives to LoRA matrices"),
        (
            {
                PATH.format(0, "qkv_proj", "A"): draw(4, 64),
                PATH.format(0, "qkv_proj", "B"): draw(64, 4),
            },
            "no linear model.layers.0.self_attn.qkv_proj that an adapter could change",
        ),
    ],
)
def test_matrices_of_another_model_are_refused(tiny_models, changes: dict, complaint: str) -> None:
    with pytest.raises(RefusedError, match=complaint) as refusal:
        read(tiny_models, tensors={**make_matrices(), **changes})
    assert refusal.value.code is ErrorCode.BAD_VALUES


def test_rank_that_a_linear_has_no_use_for_is_refused(tiny_models) -> None:
    complaint = "v_proj has 64 inputs and 32 outputs, so its rank is at most 32, not 33"

    with pytest.raises(RefusedError, match=complaint) as refusal:
        read(tiny_models, {**CONFIG, "r": 33}, make_matrices(33))

    assert refusal.value.code is ErrorCode.BAD_VALUES
    assert read(tiny_models, {**CONFIG, "r": 32}, make_matrices(32)).rank == 32


@pytest.mark.parametrize("data", [b"", pickle.dumps({"a": 1}), b"\xff" * 100, b"PK\x03\x04" * 9])
def test_what_is_no_safetensors_file_is_refused(tiny_models, data: bytes) -> None:
    with pytest.raises(RefusedError, match="not a safetensors file"):
        read(tiny_models, tensors=data)
    with pytest.raises(RefusedError, match="it has no matrices"):
        read(tiny_models, tensors={})


def write_file(header: Any, num_bytes: int) -> bytes:
    """Return a safetensors file by hand; its matrices are all 0."""
    written = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(written).to_bytes(8, "little") + written + bytes(num_bytes)


def make_entry(start: int, shape: Any, **changes: Any) -> dict[str, Any]:
    num_bytes = 4 * math.prod(shape)
    return {"dtype": "F32", "shape": shape, "data_offsets": [start, start + num_bytes], **changes}


UP_AT = 4 * 4 * 64
DOWN_ENTRY, UP_ENTRY = make_entry(0, [4, 64]), make_entry(UP_AT, [64, 4])


@pytest.mark.parametrize(
    ("down", "up", "num_bytes", "complaint"),
    [
        (DOWN_ENTRY, UP_ENTRY, 2 * UP_AT + 1, "not a safetensors file"),
        (DOWN_ENTRY, UP_ENTRY, 2 * UP_AT - 1, "not a safetensors file"),
        (
            DOWN_ENTRY,
            make_entry(0, [64, 4]),
            UP_AT,
            "not a safetensors file",
        ),  # the same bytes twice
        (DOWN_ENTRY, make_entry(UP_AT + 4, [64, 4]), 2 * UP_AT + 4, "not a safetensors file"),
        (
            {**DOWN_ENTRY, "data_offsets": [0, 0]},
            make_entry(0, [64, 4]),
            UP_AT,
            "not a safetensors",
        ),
        ({**DOWN_ENTRY, "data_offsets": [UP_AT, 0]}, UP_ENTRY, 2 * UP_AT, "not a safetensors file"),
        (
            {**DOWN_ENTRY, "data_offsets": [0.0, UP_AT]},
            UP_ENTRY,
            2 * UP_AT,
            "not a safetensors file",
        ),
        ({**DOWN_ENTRY, "data_offsets": None}, UP_ENTRY, 2 * UP_AT, "not a safetensors file"),
        ([], UP_ENTRY, 2 * UP_AT, "not a safetensors file"),
        ({**DOWN_ENTRY, "shape": [4, 64, 1]}, UP_ENTRY, 2 * UP_AT, "not a safetensors file"),
        ({**DOWN_ENTRY, "shape": [0, 64]}, UP_ENTRY, 2 * UP_AT, r"\(0, 64\), this model needs"),
    ],
)
def test_headers_that_lie_about_their_file_are_refused(
    tiny_models, down: Any, up: Any, num_bytes: int, complaint: str
) -> None:
    names = [PATH.format(1, "q_proj", letter) for letter in "AB"]
    honest = write_file(dict(zip(names, (DOWN_ENTRY, UP_ENTRY), strict=True)), 2 * UP_AT)
    assert read(tiny_models, tensors=honest).parts.keys() == {(1, "query_key_value")}

    lying = write_file(dict(zip(names, (down, up), strict=True)), num_bytes)
    with pytest.raises(RefusedError, match=complaint):
        read(tiny_models, tensors=lying)


@pytest.mark.parametrize("header", [b"[" * 50_000, b"[]", b"{", b"\xff", b"9" * 9000])
def test_headers_that_are_no_objects_are_refused(tiny_models, header: bytes) -> None:
    with pytest.raises(RefusedError, match="not a safetensors file"):
        read(tiny_models, tensors=write_file(header, 0))


def test_nothing_is_made_of_a_header_larger_than_the_model_needs(tiny_models) -> None:
    """A million empty tensors would take as many kilobytes, and many seconds."""
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    file = write_file({str(number): entry for number in range(20_000)}, 0)

    with pytest.raises(RefusedError, match="are enough for all linears of this model"):
        read(tiny_models, tensors=file)


@pytest.mark.parametrize("variant", ["mixtral", "qwen3-moe"])
def test_adapters_of_experts_are_refused(tiny_models, variant: str) -> None:
    name = "base_model.model.model.layers.0.mlp.experts.0.down_proj.lora_{}.weight"
    tensors = {name.format("A"): draw(4, 40), name.format("B"): draw(64, 4)}

    with pytest.raises(RefusedError, match="no linear model"):
        read(tiny_models, tensors=tensors, variant=variant)
