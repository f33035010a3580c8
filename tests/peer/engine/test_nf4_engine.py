"""Blocks in four bits on a device. Where bitsandbytes is installed, the CPU stands in for one."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_devices import WHOLE, decode, draw_hidden, every_device, execute, make_device, open_work
from safetensors.torch import load_file, save_file

from shoal.kernels.linear.nf4 import Nf4Weight, has_bitsandbytes
from shoal.kernels.linear.quantize import WeightFormat
from shoal.models.checkpoints.checkpoint import Checkpoint
from shoal.models.spec_reader import read_spec
from shoal.models.specs.model_spec import ModelSpec
from shoal.peer.engine.loading.engine_loader import load_engine
from shoal.peer.engine.passes.span_passes import PassWork
from shoal.protocol.errors import UsageError

pytestmark = pytest.mark.skipif(not has_bitsandbytes(), reason="needs bitsandbytes")


@pytest.fixture
def rounded(tiny_models: Any, tmp_path: Path) -> Path:
    """The checkpoint with the weights that four bits stand for, in plain floats."""
    directory = tmp_path / "rounded"
    shutil.copytree(tiny_models.get().directory, directory)
    path = directory / "model.safetensors"
    tensors = load_file(path)
    for name, tensor in tensors.items():
        if ".layers." in name and tensor.dim() == 2:
            tensors[name] = Nf4Weight(tensor).dequantize(torch.float32)
    save_file(tensors, path, {"format": "pt"})
    return directory


@every_device
def test_results_are_those_of_what_four_bits_stand_for(
    tiny_models: Any, rounded: Path, device_name: str
) -> None:
    prompt, tokens, grads = draw_hidden(1, 2, 70), draw_hidden(2, 2, 6), draw_hidden(3, 2, 70)

    outputs: list[torch.Tensor] = []
    for directory, weights in (
        (tiny_models.get().directory, WeightFormat.NF4),
        (rounded, WeightFormat.BF16),
    ):
        device, checkpoint = make_device(device_name), Checkpoint.open(directory)
        engine = load_engine(checkpoint, WHOLE, weights, device=device, kv_budget_bytes=2**25)
        work = open_work(engine, prompt)
        (first,) = execute(engine, work)
        generated = decode(engine, [work], [tokens])
        gradients = engine.passes.run_backward(PassWork(WHOLE, prompt), grads, bool)
        outputs.append(torch.cat([first, *generated, gradients.hidden_BTH], dim=1).float())

    ours, expected = outputs
    assert (ours - expected).norm() / expected.norm() < 2e-2


def test_weights_take_little_more_than_half_a_byte(tiny_models: Any) -> None:
    checkpoint = Checkpoint.open(tiny_models.get().directory)
    engine = load_engine(
        checkpoint, WHOLE, WeightFormat.NF4, device=make_device(), kv_budget_bytes=2**20
    )

    spec = read_spec(checkpoint.config)
    assert isinstance(spec, ModelSpec)
    num_parameters = sum(
        math.prod(shape)
        for block in range(spec.num_blocks)
        for shape in spec.tensor_shapes(block).values()
    )
    assert 0.56 < engine.num_weight_bytes / num_parameters < 0.58
    assert "bitsandbytes" in engine.kernels


def test_layers_of_transformers_need_float_weights(tiny_models: Any) -> None:
    checkpoint = Checkpoint.open(tiny_models.get("wrapped-stablelm").directory)

    with pytest.raises(UsageError, match="use --weights bf16 or fp32"):
        load_engine(
            checkpoint, WHOLE, WeightFormat.NF4, device=make_device(), kv_budget_bytes=2**20
        )
