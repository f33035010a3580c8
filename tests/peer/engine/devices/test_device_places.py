"""Everything that blocks compute with is where their weights are.

Torch's `meta` is a device without memory: it refuses, like any other, what mixes its tensors with
those of the CPU.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from engine_devices import decode, draw_hidden, execute, load_engine, open_work
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.kernels.linear.quantize import WeightFormat
from shoal.peer.engine.cache.paged_memory import PagedAttention
from shoal.peer.engine.devices.device import CallingCapturer, PagedDevice
from shoal.protocol.tensors import KVFormat

META = torch.device("meta")
FLOATS = (WeightFormat.FP32, WeightFormat.BF16)


class MetaDevice(PagedDevice):
    """Computes shapes, and counts how often hidden states come and go."""

    def __init__(self) -> None:
        attention = PagedAttention(attend_in_shape, attend_in_shape)
        super().__init__(META, attention, CallingCapturer())
        self.num_brought = self.num_fetched = 0

    def bring(self, hidden_NH: Tensor) -> Tensor:
        self.num_brought += 1
        brought_NH = super().bring(hidden_NH)
        assert brought_NH.device == META
        return brought_NH

    def fetch(self, hidden_NH: Tensor) -> Tensor:
        self.num_fetched += 1
        assert hidden_NH.device == META
        return torch.zeros(hidden_NH.shape, dtype=hidden_NH.dtype)


def attend_in_shape(
    queries_NHD: Tensor, pages: Tensor, tables: Tensor, seen: Tensor, *sizes: int, **options: object
) -> Tensor:
    assert pages.device == tables.device == seen.device == queries_NHD.device == META
    return torch.empty_like(queries_NHD)


VARIANTS = [
    "llama-biases", "mistral-window", "qwen3", "gemma2", "gemma3", "phi3", "gpt2", "bloom",
    "falcon-grouped", "wrapped-stablelm",
]  # fmt: skip
THOROUGH_VARIANTS = [f"wrapped-{name}" for name in ("gpt-neox", "opt", "xglm", "gptj")]
IN_TURN = {
    *((variant, WeightFormat.FP32, KVFormat.INT8) for variant in VARIANTS[::2]),
    *((variant, WeightFormat.BF16, KVFormat.FLOAT) for variant in VARIANTS[1::2]),
}
ALL_CASES = itertools.product([*VARIANTS, *THOROUGH_VARIANTS], [*FLOATS], [*KVFormat])


@pytest.mark.parametrize(
    ("variant", "weights", "kv_format"),
    [
        pytest.param(*case, marks=[pytest.mark.thorough] * (case not in IN_TURN))
        for case in ALL_CASES
    ],
)
def test_prompts_and_tokens_meet_nothing_of_the_cpu(
    tiny_models: Any, variant: str, weights: WeightFormat, kv_format: KVFormat
) -> None:
    device = MetaDevice()
    engine = load_engine(tiny_models, device, variant, weights)
    prompt, tokens = draw_hidden(1, 2, 70), draw_hidden(2, 2, 1)
    work, other = (open_work(engine, prompt, kv_format) for _ in range(2))

    execute(engine, work, other)
    decode(engine, [work, other], [tokens, tokens])

    assert device.num_brought == device.num_fetched == 2


class Operations(TorchDispatchMode):
    """Counts what torch would launch, and more that it would not."""

    num_all = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        self.num_all += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("variant", ["llama", "gemma2"])
def test_long_prompt_takes_no_more_operations_than_a_short_one(
    tiny_models: Any, variant: str
) -> None:
    engine = load_engine(tiny_models, MetaDevice(), variant, WeightFormat.FP32)

    counts = []
    for num_tokens in (8, 300):
        work = open_work(engine, draw_hidden(1, 1, num_tokens))
        with Operations() as operations:
            execute(engine, work)
        counts.append(operations.num_all)

    assert counts[0] == counts[1]
