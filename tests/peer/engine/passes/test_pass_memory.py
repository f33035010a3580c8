"""What a pass takes of memory is what was estimated, and does not grow with the blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from chosen_cases import choose_cases
from pass_scene import draw, share_engine, stay
from torch.profiler import ProfilerActivity, profile

from shoal.kernels.linear.quantize import WeightFormat
from shoal.peer.engine.passes import pass_memory
from shoal.peer.engine.passes.span_passes import PassWork
from shoal.protocol.spans import Span


def measure_peak(run: Callable[[], object]) -> int:
    """Return the most bytes that torch held at a time while this ran, beyond what it had."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        result = run()
    assert record.profiler is not None
    assert record.profiler.kineto_results is not None
    events: list[Any] = [
        event for event in record.profiler.kineto_results.events() if event.name() == "[memory]"
    ]
    del result
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


ONE_ROW, FOUR_ROWS = (1, 300), (4, 60)


@pytest.mark.parametrize(
    ("model", "shape", "is_backward"),
    choose_cases(
        [
            ("qwen3-fp32", ONE_ROW, False),
            ("qwen3-fp32", FOUR_ROWS, True),
            ("gemma2-fp32", ONE_ROW, True),
            ("falcon-alibi-fp32", FOUR_ROWS, False),
            ("bloom-fp32", FOUR_ROWS, True),
            ("qwen3-moe-fp32", FOUR_ROWS, False),
            ("qwen3-moe-fp32", ONE_ROW, True),
            ("wrapped-stablelm-fp32", ONE_ROW, True),
            ("llama-int8", FOUR_ROWS, False),
            ("llama-int8", ONE_ROW, True),
            ("llama-bf16", FOUR_ROWS, True),
        ],
        [
            *(f"{name}-fp32" for name in ("qwen3", "gemma2", "falcon-alibi", "bloom")),
            "qwen3-moe-fp32",
            "wrapped-stablelm-fp32",
            "llama-int8",
            "llama-bf16",
        ],
        [ONE_ROW, FOUR_ROWS],
        [False, True],
    ),
)
def test_a_pass_stays_below_its_estimate_and_not_far_below(
    tiny_models,
    model: str,
    shape: tuple[int, int],
    is_backward: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The pieces of these models are smaller.
    monkeypatch.setattr(pass_memory, "PIECE_BYTES", 2**20)
    variant, _, weights = model.rpartition("-")
    engine = share_engine(tiny_models.get(variant), WeightFormat(weights))
    size = engine.spec.hidden_size
    work, grads = PassWork(engine.span, draw(*shape, size)), draw(*shape, size, seed=2)

    def run() -> object:
        if is_backward:
            return engine.passes.run_backward(work, grads, stay)
        return engine.passes.run_forward(work, stay)

    peak = measure_peak(run)

    estimate = engine.passes.estimate_bytes(4, *shape, is_backward=is_backward)
    assert peak <= estimate <= 4 * peak + 2**20, (peak, estimate)


@pytest.mark.slow
def test_a_block_more_costs_its_input_alone(tiny_models) -> None:
    engine = share_engine(tiny_models.get("llama"))
    hidden, grads = draw(4, 200, 64), draw(4, 200, 64, seed=2)

    peaks = [
        measure_peak(lambda stop=stop: engine.passes.run_backward(
            PassWork(Span(0, stop), hidden), grads, stay
        ))
        for stop in (2, 4)
    ]  # fmt: skip

    assert peaks[1] - peaks[0] <= 2 * hidden.nbytes + 2**10
    assert torch.is_grad_enabled()
