"""Passes with adapters: their results and gradients are those of peft, row by row."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from pass_scene import check_close, draw, embed, load_engine, run_reference, stay
from torch import Tensor

from shoal.kernels.linear.quantize import WeightFormat
from shoal.peer.engine.adapters.adapter import Adapter
from shoal.peer.engine.adapters.adapter_file import read_adapter
from shoal.peer.engine.engine import Engine
from shoal.peer.engine.passes.span_passes import PassWork

peft = pytest.importorskip("peft")

# peft's own affair.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")

LLAMA_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
FUSED_TARGETS = ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"]
TARGETS = {
    "llama": LLAMA_TARGETS,
    "llama-biases": ["q_proj", "down_proj"],
    "qwen3": LLAMA_TARGETS,
    "gemma2": LLAMA_TARGETS,
    "mixtral": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "phi3": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
    "falcon": FUSED_TARGETS,
    "falcon-grouped": FUSED_TARGETS,
    "bloom": FUSED_TARGETS,
    "gpt2": ["attn.c_attn", "c_proj", "c_fc"],
}


def train_adapter(tiny_model: Any, targets: list[str], rank: int, folder: Path) -> Any:
    """Return peft's model with random matrices; its files are in the folder."""
    config = peft.LoraConfig(
        r=rank, lora_alpha=3, target_modules=targets, fan_in_fan_out=tiny_model.variant == "gpt2"
    )
    model = peft.get_peft_model(copy.deepcopy(tiny_model.reference), config).eval()
    for place, (name, matrix) in enumerate(model.named_parameters()):
        if "lora_" in name:
            matrix.data = 0.2 * draw(*matrix.shape, seed=100 * rank + place)
    model.save_pretrained(folder)
    return model


def read_files(tiny_model: Any, engine: Engine, folder: Path) -> Adapter:
    config, tensors = (
        (folder / name).read_bytes()
        for name in ("adapter_config.json", "adapter_model.safetensors")
    )
    return read_adapter(config, tensors, engine.spec, engine.span)


def differentiate_peft(
    model: Any, hidden: Tensor, grads: Tensor
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return the output of peft's blocks, and the gradients of their input and matrices."""
    hidden = hidden.clone().requires_grad_()
    model.zero_grad()
    output = run_reference(model.base_model.model.base_model, hidden, None)
    output.backward(grads)
    assert hidden.grad is not None
    matrices = {
        name.replace(".default", ""): matrix.grad
        for name, matrix in model.named_parameters()
        if "lora_" in name
    }
    return output.detach(), hidden.grad, matrices


@pytest.mark.parametrize("variant", list(TARGETS))
def test_adapters_equal_those_of_peft(tiny_models, variant: str, tmp_path: Path) -> None:
    tiny_model = tiny_models.get(variant)
    model = train_adapter(tiny_model, TARGETS[variant], 3, tmp_path)
    engine = load_engine(tiny_model)
    adapter = read_files(tiny_model, engine, tmp_path)
    hidden = embed(tiny_model, 2, 40)
    grads = draw(*hidden.shape, seed=2)
    output, hidden_grads, matrix_grads = differentiate_peft(model, hidden, grads)

    work = PassWork(engine.span, hidden, adapters=(adapter, adapter))
    found = engine.passes.run_backward(work, grads, stay)

    check_close(engine.passes.run_forward(work, stay), output)
    check_close(found.hidden_BTH, hidden_grads)
    assert found.adapters[adapter].keys() == matrix_grads.keys()
    for name, expected in matrix_grads.items():
        check_close(found.adapters[adapter][name], expected)


@pytest.mark.slow
def test_rows_with_different_adapters_share_a_pass(tiny_models, tmp_path: Path) -> None:
    tiny_model = tiny_models.get("llama")
    engine = load_engine(tiny_model)
    adapters, models = [], []
    for rank, targets in ((2, ["q_proj", "up_proj"]), (5, LLAMA_TARGETS)):
        models.append(train_adapter(tiny_model, targets, rank, tmp_path / str(rank)))
        adapters.append(read_files(tiny_model, engine, tmp_path / str(rank)))
    one, other = adapters
    hidden, grads = embed(tiny_model, 5, 70), draw(5, 70, 64, seed=2)

    work = PassWork(engine.span, hidden, adapters=(one, None, other, other, one))
    output = engine.passes.run_forward(work, stay)
    found = engine.passes.run_backward(work, grads, stay)

    plain = PassWork(engine.span, hidden[1:2])
    check_close(output[1:2], engine.passes.run_forward(plain, stay))
    check_close(
        found.hidden_BTH[1:2], engine.passes.run_backward(plain, grads[1:2], stay).hidden_BTH
    )
    for adapter, model, rows in ((one, models[0], [0, 4]), (other, models[1], [2, 3])):
        expected = differentiate_peft(model, hidden[rows], grads[rows])
        check_close(output[rows], expected[0])
        check_close(found.hidden_BTH[rows], expected[1])
        for name, gradient in expected[2].items():
            check_close(found.adapters[adapter][name], gradient)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("weights", "tolerance"), [(WeightFormat.BF16, 0.1), (WeightFormat.INT8, 0.15)]
)
def test_adapters_on_rounded_weights_are_close(
    tiny_models, weights: WeightFormat, tolerance: float, tmp_path: Path
) -> None:
    tiny_model = tiny_models.get("llama")
    model = train_adapter(tiny_model, LLAMA_TARGETS, 4, tmp_path)
    engine = load_engine(tiny_model, weights)
    adapter = read_files(tiny_model, engine, tmp_path)
    hidden, grads = embed(tiny_model, 2, 40), draw(2, 40, 64, seed=2)
    expected = differentiate_peft(model, hidden, grads)

    work = PassWork(engine.span, hidden, adapters=(adapter, adapter))
    found = engine.passes.run_backward(work, grads, stay)

    check_close(engine.passes.run_forward(work, stay), expected[0], tolerance)
    for name, gradient in expected[2].items():
        assert found.adapters[adapter][name].dtype is torch.float32
        check_close(found.adapters[adapter][name], gradient, tolerance)
