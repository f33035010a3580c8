"""Devices for engines under test: the CPU in the place of one, and CUDA where there is one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import kernel_reference as reference
import pytest
import torch
from torch import Tensor

from shoal.kernels.linear.quantize import WeightFormat
from shoal.models.checkpoints.checkpoint import Checkpoint
from shoal.peer.engine.cache.paged_memory import PagedAttention
from shoal.peer.engine.devices.cuda_device import choose_device
from shoal.peer.engine.devices.device import CallingCapturer, Capturer, Device, PagedDevice
from shoal.peer.engine.engine import Engine
from shoal.peer.engine.loading import engine_loader
from shoal.peer.engine.steps import StepWork
from shoal.protocol.spans import Span
from shoal.protocol.tensors import KVFormat

HIDDEN = 64
WHOLE = Span(0, 4)

Load = Callable[..., Engine]
"""Called with a variant and weights."""

_DEVICES = (
    "paged",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
        ],
    ),
)
every_device = pytest.mark.parametrize("device_name", _DEVICES)
"""Runs a test with the CPU in the place of a device, and on a device if there is one."""

every_place = pytest.mark.parametrize("device_name", ["cpu", *_DEVICES])
"""Runs it on the CPU as such, too."""


def attend_slowly(queries_NHD: Tensor, *arguments: Any, **options: Any) -> Tensor:
    """Attend like the program in Triton, in plain torch."""
    return reference.paged_attention(queries_NHD, *arguments, **options).to(queries_NHD.dtype)


def attend_prompts_slowly(
    queries_NHD: Tensor,
    pages_PCGSW: Tensor,
    tables_XM: Tensor,
    rows_X3: Tensor,
    most_tokens: int,
    **options: Any,
) -> Tensor:
    """Attend like the program for prompts, in plain torch."""
    assert most_tokens == rows_X3[:, 1].max()
    return reference.paged_prompt_attention(
        queries_NHD, pages_PCGSW, tables_XM, rows_X3, **options
    ).float()


SLOWLY = PagedAttention(attend_slowly, attend_prompts_slowly)


def make_device(name: str = "paged", capturer: Capturer | None = None) -> Device:
    """Return the CPU with caches in pages, which calls where it would capture, or what is named."""
    if name != "paged":
        return choose_device(name)
    return PagedDevice(torch.device("cpu"), SLOWLY, capturer or CallingCapturer())


def load_engine(
    tiny_models: Any,
    device: Device | str,
    variant: str = "llama",
    weights: WeightFormat = WeightFormat.INT8,
    span: Span = WHOLE,
) -> Engine:
    """Load the blocks of a tiny model."""
    checkpoint = Checkpoint.open(tiny_models.get(variant).directory)
    return engine_loader.load_engine(
        checkpoint, span, weights, device=device, kv_budget_bytes=2**25
    )


def draw_hidden(seed: int, num_rows: int = 1, num_tokens: int = 1) -> Tensor:
    """Return hidden states for a tiny model."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, num_tokens, HIDDEN, generator=generator)


def open_work(
    engine: Engine,
    hidden_BTH: Tensor,
    kv_format: KVFormat = KVFormat.FLOAT,
    span: Span = WHOLE,
    **options: Any,
) -> StepWork:
    """Open a fresh session and return its first step."""
    cache = engine.pool.open(hidden_BTH.shape[0], 400, span, None, kv_format)
    return StepWork(cache, 0, hidden_BTH, **options)


def execute(engine: Engine, *works: StepWork) -> list[Tensor]:
    """Compute steps together, none of which is refused; the account adds up afterwards."""
    results = engine.execute(works)
    engine.pool.check_integrity()
    tensors = [result for result in results if isinstance(result, Tensor)]
    assert len(tensors) == len(works), results
    return tensors


def decode(engine: Engine, works: Sequence[StepWork], tokens: Sequence[Tensor]) -> list[Tensor]:
    """Take generated tokens [B, T, H] of some sessions, one by one and in one batch each time."""
    outputs: list[list[Tensor]] = [[] for _ in works]
    for step in range(tokens[0].shape[1]):
        batch = [
            StepWork(work.cache, work.cache.length, token[:, step : step + 1], decoded=True)
            for work, token in zip(works, tokens, strict=True)
        ]
        for output, result in zip(outputs, execute(engine, *batch), strict=True):
            output.append(result)
    return [torch.cat(output, dim=1) for output in outputs]
