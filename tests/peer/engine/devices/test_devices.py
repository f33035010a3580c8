"""Which device a peer computes on, and what it says where it cannot."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_devices import load_engine, make_device

from shoal.kernels.linear.quantize import WeightFormat
from shoal.models.checkpoints.checkpoint import Checkpoint
from shoal.peer.engine.blocks.attention_kernels import MAX_PAGED_HEAD_DIM
from shoal.peer.engine.devices.cuda_device import choose_device
from shoal.peer.engine.devices.device import CPU
from shoal.peer.engine.loading import engine_loader
from shoal.peer.process.config import PeerConfig
from shoal.protocol.errors import UsageError
from shoal.protocol.spans import Span

without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")


@pytest.mark.parametrize("name", ["", "gpu", "cuda:", "cuda:x", "cuda:-1", "cuda:1000", "CPU"])
def test_what_is_no_device_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="the device must be cpu, cuda, cuda:N or auto, not"):
        PeerConfig(model="m", device=name)
    with pytest.raises(UsageError, match="the device must be cpu, cuda, cuda:N or auto, not"):
        choose_device(name)


@without_cuda
@pytest.mark.parametrize("name", ["cuda", "cuda:1"])
def test_cuda_is_refused_in_one_sentence_where_there_is_none(tiny_models: Any, name: str) -> None:
    with pytest.raises(UsageError, match=f"{name} cannot be used: .*; use --device cpu"):
        load_engine(tiny_models, name)


@without_cuda
def test_auto_is_the_cpu_where_there_is_no_cuda() -> None:
    assert choose_device("auto") is choose_device("cpu") is CPU


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_auto_is_the_first_cuda_device() -> None:
    assert (
        choose_device("auto").torch_device
        == choose_device("cuda").torch_device
        == torch.device("cuda", 0)
    )
    with pytest.raises(UsageError, match="the number of CUDA devices that torch finds is"):
        choose_device("cuda:999")


@pytest.mark.parametrize(
    ("variant", "words"),
    [("llama", "attention: triton"), ("bloom", "attention: torch")],
)
def test_peer_says_what_computes(tiny_models: Any, variant: str, words: str) -> None:
    engine = load_engine(tiny_models, make_device(), variant, WeightFormat.FP32)

    assert engine.kernels == f"fp32: torch, {words}"


def test_heads_that_the_program_takes_are_those_that_the_engine_gives_it() -> None:
    pytest.importorskip("triton")
    from shoal.kernels.attention.triton_attention import MAX_HEAD_DIM

    assert MAX_PAGED_HEAD_DIM == MAX_HEAD_DIM


def test_nf4_is_refused_on_a_cpu_with_advice(tiny_models: Any) -> None:
    """Also where `--device auto` has found no other."""
    checkpoint = Checkpoint.open(tiny_models.get().directory)

    with pytest.raises(UsageError, match=r"nf4 needs a CUDA device .* use int8"):
        engine_loader.load_engine(checkpoint, Span(0, 1), WeightFormat.NF4, kv_budget_bytes=2**20)
