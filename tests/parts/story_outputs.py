"""What sessions over a swarm have to put out."""

from __future__ import annotations

from torch import Tensor

TOLERANCE = 2e-5
"""A replay in float32 sums in another order. A wrong cache is off by more than a tenth."""


def assert_same(outputs: list[Tensor], expected: list[Tensor]) -> None:
    assert len(outputs) == len(expected)
    for index, (output, right) in enumerate(zip(outputs, expected, strict=True)):
        difference = (output - right).abs().max()
        assert difference < TOLERANCE, f"output {index} is off by {difference}"
